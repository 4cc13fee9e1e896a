/* The UCX transport over a stand-in for UCX (stand_in_ucp.c): which devices it uses,
 * what it tells UCX, and what becomes of messages when UCX fails.  ucx_comm.c runs UCX
 * itself. Spec: csrc/comm/transport/ucx. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <net/if.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "comm/messaging/neighbour.h"
#include "comm/transport/ucx/devices.h"
#include "comm/transport/ucx/introduction.h"
#include "comm/transport/ucx/library.h"
#include "common/log.h"
#include "interfaces.h"
#include "pair.h"
#include "stand_in_ucp.h"
#include "traffic.h"

static char                path[512]; /* of the stand-in */
static stand_in_ucp_table *ucp;

/* --------------------------------------------------------------------- the library */

/* Whether what lies there now is refused, with these words. */
static void
is_refused(unsigned major, unsigned minor, const char *words)
{
    const smp_ucp *functions;

    ucp->major = major;
    ucp->minor = minor;
    CHECK_STATUS(smp_ucx_library(&functions), SMP_ERR_SYSTEM);
    if (strstr(smp_ucx_trouble(), words) == NULL) {
        fprintf(stderr, "'%s' lacks '%s'\n", smp_ucx_trouble(), words);
        check_fail();
    }
}

/* In a process that has none yet. */
TEST(a_package_has_the_library_where_the_system_has_none)
{
    void *systems = dlopen("libucp.so.0", RTLD_LAZY);
    pid_t pid = fork();

    if (pid == 0) {
        const smp_ucp *functions = NULL;
        bool           well;

        unsetenv("SMP_UCX_LIBRARY");
        well = systems != NULL || smp_ucx_library(&functions) == SMP_ERR_SYSTEM;
        well = well && smp_ucx_packaged(path) == SMP_OK &&
               smp_ucx_packaged("/nowhere") == SMP_OK && /* the first counts */
               smp_ucx_library(&functions) == SMP_OK;
        well = well && (systems != NULL ||
                        strcmp(functions->ucp_get_version_string(), "stand-in") == 0);
        _exit(well ? 0 : 1);
    }
    expect_well(pid);
}

TEST(a_library_that_is_missing_no_ucx_or_another_version_is_refused)
{
    const smp_ucp *functions;

    setenv("SMP_UCX_LIBRARY", "/nowhere/libucp.so.0", 1);
    is_refused(1, 13, "/nowhere/libucp.so.0: cannot open");
    setenv("SMP_UCX_LIBRARY", "libm.so.6", 1);
    is_refused(1, 13, "libucp.so.0 has no function ucp_get_version");
    setenv("SMP_UCX_LIBRARY", path, 1);
    is_refused(1, 12, "libucp.so.0 is UCX 1.12.0; needed is 1.13 or a later 1");
    is_refused(0, 99, "is UCX 0.99.0");
    is_refused(2, 14, "is UCX 2.14.0");
    ucp->major = 1;
    ucp->minor = 13;
    CHECK_OK(smp_ucx_library(&functions));
    ucp->minor = 12; /* it is loaded for good */
    CHECK_OK(smp_ucx_library(&functions));
}

/* -------------------------------------------------------------- introductions */

/* Whether the one at the other end is introduced by these bytes. */
static void
is_introduced(const void *bytes, size_t n, smp_status want)
{
    void    *address;
    uint64_t pass;
    int      fds[2];

    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0);
    CHECK(write(fds[0], bytes, n) == (ssize_t)n);
    close(fds[0]);
    CHECK_STATUS(smp_ucx_be_introduced(fds[1], PATIENCE_MS(60000), &pass, &address),
                 want);
    if (want == SMP_OK) {
        CHECK(pass == 0x123456789abcdefu && memcmp(address, "address", 8) == 0);
        free(address);
    }
    close(fds[1]);
}

TEST(an_introduction_has_a_pass_and_an_address)
{
    uint64_t good[4]; /* magic and version, pass, bytes, address */
    uint64_t bad[4];
    int      fds[2];

    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0);
    CHECK(smp_ucx_introduce(fds[0], 0x123456789abcdefu, "address", 8));
    CHECK(read(fds[1], good, sizeof(good)) == sizeof(good));
    is_introduced(good, sizeof(good), SMP_OK);
    is_introduced(good, sizeof(good) - 1, SMP_ERR_PEER_LOST);
    is_introduced(good, 20, SMP_ERR_PEER_LOST);
    memcpy(bad, good, sizeof(bad));
    bad[0] = good[0] ^ 1; /* magic */
    is_introduced(bad, sizeof(bad), SMP_ERR_MALFORMED);
    bad[0] = good[0] ^ (uint64_t)1 << 40; /* version */
    is_introduced(bad, sizeof(bad), SMP_ERR_MALFORMED);
    bad[0] = good[0];
    bad[2] = 0;
    is_introduced(bad, sizeof(bad), SMP_ERR_MALFORMED);
    bad[2] = SMP_UCX_ADDRESS_BYTES + 1;
    is_introduced(bad, sizeof(bad), SMP_ERR_MALFORMED);
    close(fds[1]);
    CHECK(!smp_ucx_introduce(fds[0], 1, "address", 8));
    close(fds[0]);
}

/* --------------------------------------------------------------------- the devices */

/* Where this host's folders of devices are instead; "": nowhere else. */
static char folder[64];

/* What the kernel lists in place of this machine's interfaces; NULL: nothing takes its
 * place. */
static struct if_nameindex *names;

DIR                 *__real_opendir(const char *name);
DIR                 *__wrap_opendir(const char *name);
FILE                *__real_fopen(const char *name, const char *mode);
FILE                *__wrap_fopen(const char *name, const char *mode);
struct if_nameindex *__real_if_nameindex(void);
struct if_nameindex *__wrap_if_nameindex(void);
void                 __real_if_freenameindex(struct if_nameindex *all);
void                 __wrap_if_freenameindex(struct if_nameindex *all);

static const char *
moved(const char *name, char *room, size_t bytes)
{
    if (folder[0] == '\0' || strncmp(name, "/sys/class/", 11) != 0) {
        return name;
    }
    snprintf(room, bytes, "%s/%s", folder, name + 11);
    return room;
}

DIR *
__wrap_opendir(const char *name)
{
    char room[256];

    return __real_opendir(moved(name, room, sizeof(room)));
}

FILE *
__wrap_fopen(const char *name, const char *mode)
{
    char room[256];

    return __real_fopen(moved(name, room, sizeof(room)), mode);
}

struct if_nameindex *
__wrap_if_nameindex(void)
{
    return names != NULL ? names : __real_if_nameindex();
}

void
__wrap_if_freenameindex(struct if_nameindex *all)
{
    if (all != names) {
        __real_if_freenameindex(all);
    }
}

/* A folder below `folder`, and those above it. */
static void
make_folder(const char *name)
{
    char  whole[256];
    char *slash;

    snprintf(whole, sizeof(whole), "%s/%s/", folder, name);
    slash = whole + strlen(folder) + 1;
    while ((slash = strchr(slash, '/')) != NULL) {
        *slash = '\0';
        (void)mkdir(whole, 0700);
        *slash++ = '/';
    }
}

/* Folders in which no interface has such a device. */
static void
begin_folders(void)
{
    snprintf(folder, sizeof(folder), "%s", "/tmp/smp-devices-XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
    make_folder("net");
}

static void
end_folders(void)
{
    char command[128];

    snprintf(command, sizeof(command), "rm -r '%s'", folder);
    folder[0] = '\0';
    (void)!system(command);
}

static smp_tcp_address
address_of(const char *text)
{
    smp_tcp_address address = {.family = strchr(text, ':') == NULL ? 4 : 6};

    inet_pton(address.family == 4 ? AF_INET : AF_INET6, text, address.bytes);
    return address;
}

/* Whether UCX is to use these devices for an address; NULL: there are none. */
static void
devices_are(const char *address, bool only, const char *want)
{
    smp_tcp_address at = address_of(address);
    char            got[SMP_UCX_DEVICES_BYTES];

    CHECK_STATUS(smp_ucx_devices(&at, only, got),
                 want != NULL ? SMP_OK : SMP_ERR_SYSTEM);
    if (want != NULL && strcmp(got, want) != 0) {
        fprintf(stderr, "'%s' is not '%s'\n", got, want);
        check_fail();
    }
}

/* Two interfaces with an address each, and another one. */
static void
check_devices(void)
{
    char                many[800][IF_NAMESIZE];
    char                eth[] = "eth7";
    char                ib[] = "ib0";
    char                docker[] = "docker0";
    struct sockaddr_in  four = {.sin_family = AF_INET};
    struct sockaddr_in6 six = {.sin6_family = AF_INET6};
    struct ifaddrs      ones[3] = {
             {.ifa_next = &ones[1], .ifa_name = docker},
             {.ifa_next = &ones[2], .ifa_name = eth, .ifa_addr = (struct sockaddr *)&four},
             {.ifa_name = ib, .ifa_addr = (struct sockaddr *)&six}};
    struct if_nameindex three[] = {{1, docker}, {2, eth}, {3, ib}, {0, NULL}};
    struct if_nameindex long_list[801] = {{0}};
    char                name[300];
    FILE               *port;

    inet_pton(AF_INET, "10.7.0.1", &four.sin_addr);
    inet_pton(AF_INET6, "fd00:7::1", &six.sin6_addr);
    listed = ones;
    names = three;
    CHECK(!smp_ucx_fast_devices());
    devices_are("127.0.0.1", false, "all");
    devices_are("::1", false, "all");
    devices_are("127.0.0.1", true, NULL); /* no interface has it */
    devices_are("10.7.0.2", false, NULL);
    devices_are("10.7.0.1", false, "eth7");
    devices_are("10.7.0.1", true, "eth7");
    devices_are("fd00:7::1", false, "ib0");

    make_folder("infiniband"); /* which holds nothing */
    CHECK(!smp_ucx_fast_devices());
    make_folder("infiniband/mlx5_3");
    make_folder("net/ib0/device/infiniband/mlx5_3");
    CHECK(smp_ucx_fast_devices());
    devices_are("fd00:7::1", true, "ib0,mlx5_3:1");
    snprintf(name, sizeof(name), "%s/net/ib0/dev_port", folder);
    port = __real_fopen(name, "w");
    fputs("1\n", port);
    fclose(port);
    devices_are("fd00:7::1", true, "ib0,mlx5_3:2");
    devices_are("10.7.0.1", true, "eth7");
    devices_are("10.7.0.1", false, "^docker0,ib0");
    devices_are("fd00:7::1", false, "^docker0,eth7");
    devices_are("::1", false, "all");
    names = &three[2];
    devices_are("fd00:7::1", false, "all");
    for (int i = 0; i < 800; i++) {
        snprintf(many[i], IF_NAMESIZE, "interface%u", (unsigned)i % 1000);
        long_list[i] = (struct if_nameindex){(unsigned)i + 1, many[i]};
    }
    names = long_list;
    devices_are("fd00:7::1", false, NULL);
}

TEST(devices_are_those_of_the_address_or_all_but_other_interfaces)
{
    begin_folders();
    check_devices();
    listed = NULL;
    names = NULL;
    end_folders();
}

/* ----------------------------------------------------------------------- two ranks */

static void
make_pair_at(meeter ends[2], const char *transports, const char *interface)
{
    static const int called[2] = {20, 21};

    make_pair(ends, &(smp_comm_config){.size = 2,
                                       .names = called,
                                       .pool_bytes = 4 << 20,
                                       .transports = transports,
                                       .interface = interface,
                                       .job = "job"});
}

/* Nothing of UCX's is left. */
static void
drop_ucx_pair(meeter ends[2])
{
    drop_pair(ends);
    CHECK(atomic_load(&ucp->alive) == 0);
}

/* Both talk over it. */
static void
talk_over(meeter ends[2], const char *transport)
{
    static const size_t sizes[] = {100, 0, 5000, 2048, 2049, 300000};

    for (int r = 0; r < 2; r++) {
        world w = {.comm = ends[r].comm, .rank = r, .size = 2};

        CHECK_TEXT(smp_comm_transport(w.comm, 1 - r), transport);
        CHECK_OK(send_filled(&w, 1 - r, 40 + (uint64_t)r, 50, sizes, 6));
        CHECK_OK(send_filled(&w, 1 - r, 50 + (uint64_t)r, 0, NULL, 0));
    }
    for (int r = 0; r < 2; r++) {
        world w = {.comm = ends[r].comm, .rank = r, .size = 2};

        expect_filled(&w, 41 - (uint64_t)r, 50, sizes, 6);
        expect_filled(&w, 51 - (uint64_t)r, 0, NULL, 0);
    }
}

TEST(who_has_left_is_not_lost_and_what_it_sent_arrives)
{
    static const size_t sizes[] = {300000};
    smp_message        *message;

    for (int late = 0; late < 2; late++) {
        meeter ends[2];
        world  w = {.rank = 1, .size = 2};

        ucp->late = late != 0;
        make_pair_at(ends, "ucx", NULL);
        talk_over(ends, "ucx");
        w.comm = ends[1].comm;
        for (uint64_t i = 0; i < 40; i++) {
            CHECK_OK(send_filled(&w, 0, i, 10, sizes, i % 2));
        }
        smp_comm_destroy(ends[1].comm);
        ends[1].comm = NULL;
        for (uint64_t i = 0; i < 40; i++) {
            CHECK_OK(smp_comm_receive(ends[0].comm, WORLD_DEADLINE_NS, &message));
            CHECK(message_filled(message, i, 10, sizes, i % 2));
            smp_message_free(message);
        }
        CHECK_STATUS(smp_comm_receive(ends[0].comm, WORLD_DEADLINE_NS, &message),
                     SMP_ERR_CLOSED);
        CHECK(smp_comm_left(ends[0].comm, 1) && smp_comm_lost(ends[0].comm) == -1);
        drop_ucx_pair(ends);
    }
    ucp->late = false;
}

/* ------------------------------------------------------------------------ failures */

/* Rank `who` finds that the other one is lost, which hears of it, and has so much of
 * its pool in use in the end. */
static void
is_lost(meeter ends[2], int who, uint64_t in_use)
{
    int64_t        deadline = smp_clock_ns() + WORLD_DEADLINE_NS;
    smp_comm_stats stats;
    smp_message   *message;

    for (int i = 0; i < 2; i++) {
        int r = i == 0 ? who : 1 - who;

        CHECK_STATUS(smp_comm_receive(ends[r].comm, WORLD_DEADLINE_NS, &message),
                     SMP_ERR_PEER_LOST);
        CHECK(smp_comm_lost(ends[r].comm) == 1 - r &&
              !smp_comm_left(ends[r].comm, 1 - r));
        CHECK_STATUS(smp_comm_send(ends[r].comm, 1 - r, "x", 1, NULL, 0),
                     SMP_ERR_PEER_LOST);
    }
    do {
        smp_comm_counters(ends[who].comm, &stats);
        CHECK(smp_clock_ns() < deadline);
    } while (stats.pool_in_use != in_use);
}

/* A message with two blocks from rank 0 to rank 1, one part of which fails. */
static void
fails(_Atomic int *what, int nth, bool late, int who, uint64_t in_use)
{
    static const size_t sizes[] = {10000, 20000};
    meeter              ends[2];
    world               w = {.size = 2};

    make_pair_at(ends, "ucx", NULL);
    ucp->late = late;
    atomic_store(what, nth);
    w.comm = ends[0].comm;
    CHECK_OK(send_filled(&w, 1, 5, 30, sizes, 2));
    is_lost(ends, who, in_use);
    CHECK(atomic_load(what) == 0);
    ucp->late = false;
    drop_ucx_pair(ends);
}

TEST(who_sends_what_cannot_be_fetched_is_lost)
{
    for (int late = 0; late < 2; late++) {
        fails(&ucp->fetch, 1, late != 0, 1, 0);
        /* The other block waits for it until the end. */
        fails(&ucp->fetch, 2, late != 0, 1, 10048);
    }
}

TEST(whom_nothing_can_be_sent_is_lost)
{
    for (int nth = 1; nth <= 3; nth++) {
        fails(&ucp->sent, nth, false, 0, 0);
        fails(&ucp->sent, nth, true, 0, 0);
    }
}

TEST(a_broken_connection_is_a_loss)
{
    meeter       ends[2];
    smp_message *message;

    make_pair_at(ends, "ucx", NULL);
    atomic_store(&ucp->faults, 1);
    CHECK_OK(smp_comm_send(ends[0].comm, 1, "x", 1, NULL, 0));
    for (int r = 0; r < 2; r++) { /* the one who finds it, and the one who hears */
        smp_status status;

        do {
            status = smp_comm_receive(ends[r].comm, WORLD_DEADLINE_NS, &message);
            if (status == SMP_OK) {
                smp_message_free(message);
            }
        } while (status == SMP_OK);
        CHECK_STATUS(status, SMP_ERR_PEER_LOST);
        CHECK(smp_comm_lost(ends[r].comm) == 1 - r);
    }
    drop_ucx_pair(ends);
}

TEST(a_pattern_that_cannot_be_fetched_makes_the_next_transport_serve)
{
    char   text[SMP_WARNING_BYTES];
    meeter ends[2];

    for (int late = 0; late < 2; late++) {
        ucp->late = late != 0;
        atomic_store(&ucp->fetch, 1);
        make_pair_at(ends, "ucx,tcp", NULL);
        ucp->late = false;
        talk_over(ends, "tcp");
        CHECK(smp_warning_take(text));
        CHECK(strstr(text, "rank 20 does not talk to rank 21 over UCX") != NULL ||
              strstr(text, "rank 21 does not talk to rank 20 over UCX") != NULL);
        CHECK_HAS(text, "UCX could not fetch a pattern");
        CHECK_HAS(text, "the next of comm_transports serves");
        CHECK(!smp_warning_take(text));
        drop_ucx_pair(ends);
    }
}

TEST(where_ucx_does_not_begin_the_next_transport_serves)
{
    static const char *const broken[] = {"ucp_config_read",
                                         "ucp_config_modify",
                                         "ucp_init_version",
                                         "ucp_worker_create",
                                         "ucp_worker_set_am_recv_handler",
                                         "ucp_worker_get_efd",
                                         "ucp_worker_query",
                                         "ucp_ep_create"};
    char                     text[SMP_WARNING_BYTES];
    meeter                   ends[2];

    for (size_t i = 0; i < COUNT_OF(broken); i++) {
        ucp->broken = broken[i];
        make_pair_at(ends, "ucx,tcp", NULL);
        talk_over(ends, "tcp");
        drop_ucx_pair(ends);
        CHECK(!smp_warning_take(text));
    }
    ucp->broken = NULL;
}

/* ---------------------------------------------------------------- what UCX is told */

static void
is_told(const char *interface, const char *net_devices, const char *tls)
{
    meeter ends[2];

    make_pair_at(ends, "ucx", interface);
    CHECK_TEXT(ucp->net_devices, net_devices);
    CHECK_TEXT(ucp->tls, tls);
    talk_over(ends, "ucx");
    drop_ucx_pair(ends);
}

TEST(the_users_variables_count_but_for_the_interface_that_is_named)
{
    is_told(NULL, "all", "^shm");
    is_told("127.0.0.1", "lo", "^shm");
    setenv("UCX_NET_DEVICES", "eth0", 1);
    is_told(NULL, "", "^shm");
    is_told("127.0.0.1", "lo", "^shm");
    setenv("UCX_TLS", "tcp", 1);
    is_told(NULL, "", "");
    unsetenv("UCX_NET_DEVICES");
    is_told(NULL, "all", "");
    unsetenv("UCX_TLS");
}

/* Nobody named it: it serves where this host has such devices, and by these alone. */
static void
is_chosen(const char *transport, const char *broken, const char *want)
{
    meeter ends[2];

    ucp->transport = transport;
    ucp->broken = broken;
    make_pair_at(ends, "^shm", NULL);
    talk_over(ends, want);
    ucp->transport = "rc_mlx5";
    ucp->broken = NULL;
    drop_ucx_pair(ends);
}

static void
check_choices(void)
{
    is_chosen("rc_mlx5", NULL, "tcp"); /* no such device */
    make_folder("infiniband/mlx5_0");
    is_chosen("rc_mlx5", NULL, "ucx");
    is_chosen("tcp", NULL, "tcp");
    is_chosen("rc_mlx5", "ucp_ep_query", "tcp");
}

TEST(without_being_named_it_serves_by_devices_that_tcp_does_not_drive)
{
    meeter ends[2];

    begin_folders();
    check_choices();
    end_folders();
    ucp->transport = "tcp"; /* who is named is asked for no device */
    make_pair_at(ends, "ucx", NULL);
    talk_over(ends, "ucx");
    ucp->transport = "rc_mlx5";
    drop_ucx_pair(ends);
}

/* ---------------------------------------------------------------------------- main */

/* The stand-in lies beside this program. */
static bool
load_stand_in(void)
{
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 24);
    void   *library;

    path[n < 0 ? 0 : n] = '\0';
    strcpy(strrchr(path, '/') + 1, "stand_in_ucp.so");
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    ucp = library != NULL ? dlsym(library, "stand_in_ucp") : NULL;
    return ucp != NULL;
}

int
main(int argc, char **argv)
{
    if (!load_stand_in()) {
        fprintf(stderr, "%s: %s\n", path, dlerror());
        return 1;
    }
    setenv("SMP_UCX_LIBRARY", path, 1);
    run_tests(argc, argv);
    return tests_are_over();
}
