/* What is particular to TCP: who is let in, where it listens, peers that go wrong.
 * Spec: csrc/comm/transport/connecting/meet.h, address.h, frame.h. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "comm/transport/connecting/address.h"
#include "comm/transport/connecting/lifeline.h"
#include "comm/transport/connecting/meet.h"
#include "comm/transport/tcp/frame.h"
#include "deaths.h"
#include "interfaces.h"
#include "pair.h"
#include "partings.h"
#include "traffic.h"

#define LOOPBACK "127.0.0.1"

static const smp_comm_config as_job = {.size = 2,
                                       .pool_bytes = 1 << 20,
                                       .transports = "tcp",
                                       .interface = LOOPBACK,
                                       .job = "job"};

static const smp_tcp_card *
tcp_card_of(const void *card)
{
    size_t bytes;

    return smp_card_find(card, "tcp", &bytes);
}

/* ------------------------------------------------------------- where it listens */

/* Slowed down where threads hand over what they know: the only peer is lost, and at no
 * moment one that has left. */
TEST(a_killed_peer_is_lost_however_threads_hand_over_what_they_know)
{
    for (int i = 0; i < 25; i++) {
        char seed[16];

        snprintf(seed, sizeof(seed), "%d", i + 1);
        setenv("SMP_JITTER", seed, 1);
        CHECK(!world_run_processes(
            &world_a_killed_peer_is_noticed_although_its_child_lives, "tcp", 2));
    }
    unsetenv("SMP_JITTER");
}

static smp_tcp_offer
offer_of(uint64_t space, const char *const *addresses)
{
    smp_tcp_offer offer = {.network = {.boot = "boot", .space = space}};

    for (; *addresses != NULL; addresses++) {
        smp_tcp_address *address = &offer.addresses[offer.naddresses++];
        char             text[64];

        snprintf(text, sizeof(text), "%s", *addresses);
        address->prefix = (uint8_t)atoi(strchr(text, '/') + 1);
        *strchr(text, '/') = '\0';
        address->family = strchr(text, ':') == NULL ? 4 : 6;
        address->port = 1;
        inet_pton(address->family == 4 ? AF_INET : AF_INET6, text, address->bytes);
    }
    return offer;
}

/* The choices of three ranks, of which the first two are on one host. */
static void
choices_are(const char *const *one, const char *const *two, int of_one, int of_two)
{
    smp_tcp_offer offers[3] = {offer_of(1, one), offer_of(1, one), offer_of(2, two)};
    const smp_tcp_offer *all[3] = {&offers[0], &offers[1], &offers[2]};

    CHECK(smp_tcp_choose(all, 3, 0) == of_one);
    CHECK(smp_tcp_choose(all, 3, 1) == of_one);
    CHECK(smp_tcp_choose(all, 3, 2) == of_two);
}

#define LIST(...) ((const char *const[]){__VA_ARGS__, NULL})

TEST(an_address_that_leads_to_the_others_is_taken)
{
    choices_are(LIST("127.0.0.1/8", "192.168.1.4/24", "10.0.0.1/16"),
                LIST("127.0.0.1/8", "10.0.0.2/16", "192.168.2.4/24"), 2, 1);
    /* A bridge that every host has leads nowhere. */
    choices_are(LIST("127.0.0.1/8", "172.17.0.1/16", "10.0.0.1/24"),
                LIST("127.0.0.1/8", "172.17.0.1/16", "10.0.0.2/24"), 2, 2);
    /* Across routers the first one is taken. */
    choices_are(LIST("127.0.0.1/8", "10.1.0.1/24", "10.2.0.1/24"),
                LIST("127.0.0.1/8", "10.3.0.1/24"), 1, 1);
    choices_are(LIST("::1/128", "10.1.0.1/24", "fd00:1::7/64"),
                LIST("::1/128", "fd00:1::8/64", "10.3.0.1/24"), 2, 1);
}

TEST(loopback_serves_ranks_of_one_host_alone)
{
    smp_tcp_offer        offer = offer_of(1, LIST("10.0.0.1/24", "127.0.0.1/8"));
    smp_tcp_offer        far = offer_of(2, LIST("127.0.0.1/8"));
    const smp_tcp_offer *together[2] = {&offer, &offer};
    const smp_tcp_offer *apart[2] = {&offer, &far};
    const smp_tcp_offer *without[2] = {&offer, NULL};

    CHECK(smp_tcp_choose(together, 2, 0) == 1);
    CHECK(smp_tcp_choose(without, 2, 0) == 1);
    CHECK(smp_tcp_choose(apart, 2, 0) == 0);
    CHECK(smp_tcp_choose(apart, 2, 1) == -1);
    offer.forced = 1;
    CHECK(smp_tcp_choose(together, 2, 0) == 0);
}

TEST(an_interface_is_a_name_an_address_or_a_subnet)
{
    static const char *const good[] = {"lo", "127.0.0.1", "127.0.0.1/32",
                                       "127.0.0.0/8"};
    static const char *const bad[] = {"none0",         "127.0.0.9",   "198.51.100.0/24",
                                      "127.0.0.0/33",  "127.0.0.1/",  "127.0.0.1/8x",
                                      "127.0.0.1.1/8", "/8",          "",
                                      "127.0.0.0/-1",  "300.0.0.0/8", "::ffff/129"};
    smp_tcp_address          found[SMP_TCP_ADDRESSES];
    char                     texts[SMP_TCP_ADDRESSES][SMP_TCP_TEXT];
    smp_comm_config          config = {.size = 2, .transports = "tcp", .job = "job"};
    smp_comm                *comm;

    for (size_t i = 0; i < COUNT_OF(good); i++) {
        CHECK(smp_tcp_addresses(good[i], found, texts) >= 1);
        CHECK_TEXT(texts[0], "lo 127.0.0.1/8");
    }
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        CHECK(smp_tcp_addresses(bad[i], found, NULL) == 0);
        config.interface = bad[i];
        CHECK_STATUS(smp_comm_create(&config, &comm), SMP_ERR_INVALID);
        /* What was named is not passed over, though another transport would serve. */
        config.transports = i % 2 == 0 ? "shm,tcp" : "tcp,shm";
        CHECK_STATUS(smp_comm_create(&config, &comm), SMP_ERR_INVALID);
        config.transports = "tcp";
    }
}

/* Lists interfaces eth7 of version 6, at these addresses; the last one is down. */
static struct sockaddr_in6 *
list_at(int count, const char *const *at, int prefix_bytes, bool last_is_down)
{
    enum { MOST = SMP_TCP_ADDRESSES + 3 };
    static struct sockaddr_in6 addresses[MOST];
    static struct sockaddr_in6 mask;
    static struct ifaddrs      ones[MOST];
    static char                name[] = "eth7";

    mask = (struct sockaddr_in6){.sin6_family = AF_INET6};
    memset(&mask.sin6_addr, 0xff, (size_t)prefix_bytes);
    for (int i = 0; i < count; i++) {
        addresses[i] = (struct sockaddr_in6){.sin6_family = AF_INET6};
        inet_pton(AF_INET6, at[i], &addresses[i].sin6_addr);
        ones[i] = (struct ifaddrs){
            .ifa_next = i + 1 < count ? &ones[i + 1] : NULL,
            .ifa_name = name,
            .ifa_flags = last_is_down && i == count - 1 ? 0 : IFF_UP,
            .ifa_addr = (struct sockaddr *)&addresses[i],
            .ifa_netmask = (struct sockaddr *)&mask,
        };
    }
    listed = ones;
    return addresses;
}

TEST(addresses_of_a_link_alone_and_of_interfaces_that_are_down_are_left_out)
{
    smp_tcp_address found[SMP_TCP_ADDRESSES];
    char            texts[SMP_TCP_ADDRESSES][SMP_TCP_TEXT];

    list_at(4, LIST("fe80::1", "fd00:1::7", "febf::2", "fd00:2::7"), 8, true);
    CHECK(smp_tcp_addresses(NULL, found, texts) == 1);
    CHECK_TEXT(texts[0], "eth7 fd00:1::7/64");
    CHECK(smp_tcp_addresses("eth7", found, NULL) == 1);
    CHECK(smp_tcp_addresses("fe80::1", found, NULL) == 0);
    listed = NULL;
}

TEST(more_addresses_than_a_card_holds_are_left_out_but_for_one_that_is_named)
{
    enum { COUNT = SMP_TCP_ADDRESSES + 3 };
    char                 at[COUNT][32];
    const char          *all[COUNT];
    struct sockaddr_in6 *addresses;
    smp_tcp_address      found[SMP_TCP_ADDRESSES];
    char                 texts[SMP_TCP_ADDRESSES][SMP_TCP_TEXT];

    for (int i = 0; i < COUNT; i++) {
        snprintf(at[i], sizeof(at[i]), "fd00:7:%x::1", i + 1 < COUNT ? i + 1 : 0x77);
        all[i] = at[i];
    }
    addresses = list_at(COUNT, all, 6, false);
    CHECK(smp_tcp_addresses(NULL, found, texts) == SMP_TCP_ADDRESSES);
    CHECK_TEXT(texts[0], "eth7 fd00:7:1::1/48");
    CHECK(found[SMP_TCP_ADDRESSES - 1].prefix == 48);
    CHECK(memcmp(found[SMP_TCP_ADDRESSES - 1].bytes,
                 &addresses[SMP_TCP_ADDRESSES - 1].sin6_addr, 16) == 0);
    CHECK(smp_tcp_addresses("fd00:7:77::/48", found, texts) == 1);
    CHECK_TEXT(texts[0], "eth7 fd00:7:77::1/48");
    listed = NULL;
}

/* A connection to the port of a card; -1 with errno. */
static int
call_port(const smp_tcp_card *card)
{
    struct sockaddr_storage to;
    socklen_t bytes = smp_tcp_socket_address(&card->offer.addresses[0], &to);
    int       fd = socket(to.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd >= 0 && connect(fd, (struct sockaddr *)&to, bytes) != 0) {
        int why = errno;

        close(fd);
        errno = why;
        return -1;
    }
    return fd;
}

TEST_RANK(nobody_listens_once_all_have_met, .processes = "4")
{
    CHECK_TEXT(smp_comm_transport(w->comm, other(w, 0)), "tcp");
    w->barrier(w);
    for (int r = 0; r < w->size; r++) {
        const smp_tcp_card *card = tcp_card_of(w->shared->cards[r]);

        for (uint32_t i = 0; i < card->offer.naddresses; i++) {
            smp_tcp_card one = *card;

            one.offer.addresses[0] = card->offer.addresses[i];
            CHECK(call_port(&one) < 0 && errno == ECONNREFUSED);
        }
    }
    w->barrier(w);
}

/* -------------------------------------------------------------- who is let in */

TEST(a_wrong_secret_is_refused)
{
    meeter m[2];

    create_pair(m, &as_job, "another job", 400);
    meet_pair(m);
    for (int r = 0; r < 2; r++) {
        CHECK_STATUS(m[r].status, SMP_ERR_UNREACHABLE);
        CHECK(m[r].failed == 1 - r);
    }
    drop_pair(m);
}

TEST(a_rank_that_never_comes_is_not_reached)
{
    meeter m[2];

    create_pair(m, &as_job, "job", 100);
    meet_main(&m[0]);
    CHECK_STATUS(m[0].status, SMP_ERR_UNREACHABLE);
    CHECK(m[0].failed == 1);
    drop_pair(m);
}

TEST(a_card_that_no_rank_wrote_is_malformed)
{
    smp_tcp_door door;
    smp_tcp_card good;
    smp_tcp_card bad[4];

    CHECK_OK(smp_tcp_door_open(1, LOOPBACK, &door));
    good = bad[0] = bad[1] = bad[2] = bad[3] = door.card;
    smp_tcp_door_close(&door);
    CHECK(smp_tcp_card_ok(&good, sizeof(good), 1));
    CHECK(!smp_tcp_card_ok(&good, sizeof(good), 0));
    CHECK(!smp_tcp_card_ok(&good, sizeof(good) - 1, 1));
    bad[0].version++;
    bad[1].offer.naddresses = SMP_TCP_ADDRESSES + 1;
    bad[2].offer.addresses[0].prefix = 33;
    bad[3].offer.addresses[0].family = 5;
    for (int i = 0; i < 4; i++) {
        CHECK(!smp_tcp_card_ok(&bad[i], sizeof(bad[i]), 1));
    }
}

typedef struct {
    smp_tcp_self               self;
    smp_tcp_door               door;
    const smp_tcp_card *const *cards;
    int                        fds[2];
    bool                       met[2];
} choosy;

static void *
choose_main(void *arg)
{
    choosy            *c = arg;
    const bool         wanted[2] = {true, true};
    const smp_deadline soon = {.at_ns = smp_clock_ns() + WORLD_DEADLINE_NS};

    (void)smp_tcp_meet(&c->door, &c->self, c->cards, wanted, &soon, c->fds, c->met);
    return NULL;
}

/* Rank 1, which calls, has one address; of rank 0's two, the second is where it is met.
 * Nothing is ever sent to the first. */
TEST(each_rank_is_called_where_it_listens)
{
    choosy              ranks[2] = {0};
    const smp_tcp_card *cards[2] = {&ranks[0].door.card, &ranks[1].door.card};
    smp_tcp_offer      *offer = &ranks[0].door.card.offer;
    pthread_t           threads[2];

    for (int r = 0; r < 2; r++) {
        ranks[r].self = (smp_tcp_self){.rank = r, .size = 2, .job = "job"};
        ranks[r].cards = cards;
        CHECK_OK(smp_tcp_door_open(r, LOOPBACK, &ranks[r].door));
        ranks[r].door.card.offer.forced = 0;
    }
    offer->addresses[1] = offer->addresses[0];
    memset(offer->addresses[0].bytes, 255, 4);
    offer->naddresses = 2;
    ranks[0].door.fds[1] = ranks[0].door.fds[0];
    ranks[0].door.fds[0] = -1;
    for (int r = 0; r < 2; r++) {
        CHECK(pthread_create(&threads[r], NULL, choose_main, &ranks[r]) == 0);
    }
    for (int r = 0; r < 2; r++) {
        pthread_join(threads[r], NULL);
        CHECK(ranks[r].met[1 - r]);
        close(ranks[r].fds[1 - r]);
        smp_tcp_door_close(&ranks[r].door);
    }
}

/* Waits until rank 0 listens. */
static int
call_rank_0(const meeter m[2])
{
    int64_t deadline = smp_clock_ns() + WORLD_DEADLINE_NS;
    int     fd;

    while ((fd = call_port(tcp_card_of(m[0].cards[0]))) < 0 &&
           smp_clock_ns() < deadline) {
        sched_yield();
    }
    return fd;
}

/* Whether the other side hangs up on us. */
static bool
is_hung_up(int fd)
{
    struct pollfd any = {.fd = fd, .events = POLLIN};
    char          bytes[256];
    ssize_t       n;

    do {
        if (poll(&any, 1, (int)(WORLD_DEADLINE_NS / SMP_NS_PER_MS)) <= 0) {
            return false;
        }
        n = read(fd, bytes, sizeof(bytes));
    } while (n > 0);
    return true;
}

/* Says `bytes` to rank 0, which must hang up; `end`: and says nothing more. */
static void
say_to_rank_0(const meeter m[2], const void *bytes, size_t n, bool end)
{
    int fd = call_rank_0(m);

    CHECK(fd >= 0);
    CHECK(n == 0 || write(fd, bytes, n) == (ssize_t)n);
    if (end) {
        shutdown(fd, SHUT_WR);
    }
    CHECK(is_hung_up(fd));
    close(fd);
}

static smp_tcp_hello
hello_to_rank_0(void)
{
    smp_tcp_door  door;
    smp_tcp_hello hello;

    (void)smp_tcp_door_open(1, LOOPBACK, &door);
    smp_tcp_door_close(&door);
    hello = (smp_tcp_hello){.magic = door.card.magic,
                            .version = door.card.version,
                            .from = 1,
                            .to = 0,
                            .size = 2,
                            .nonce = "any sixteen byte"};
    return hello;
}

/* Everything that is not the handshake, then one that is. */
TEST(strangers_disturb_nobody)
{
    enum { SILENT = 100 }; /* more than there is room for */
    meeter         m[2];
    smp_tcp_hello  good = hello_to_rank_0();
    smp_tcp_hello  bad[6];
    int            silent[SILENT];
    char           nonsense[5000];
    int            fd;
    smp_tcp_answer answer;
    smp_tcp_self   impostor = {.rank = 1, .size = 2, .job = "guessed"};
    uint8_t        proof[SMP_PROOF_BYTES];

    create_pair(m, &as_job, "job", 60000);
    meet_in_thread(&m[0]);

    memset(nonsense, 'x', sizeof(nonsense));
    say_to_rank_0(m, nonsense, sizeof(nonsense), false); /* oversized */
    say_to_rank_0(m, &good, sizeof(good) / 2, true);     /* truncated */
    say_to_rank_0(m, NULL, 0, true);
    say_to_rank_0(m, &good, sizeof(good), true); /* and no proof */
    for (size_t i = 0; i < 6; i++) {
        bad[i] = good;
    }
    bad[0].version++;
    bad[1].magic++;
    bad[2].from = 2;
    bad[3].from = 0;
    bad[4].size = 3;
    bad[5].to = 1;
    for (size_t i = 0; i < 6; i++) {
        say_to_rank_0(m, &bad[i], sizeof(bad[i]), false);
    }

    fd = call_rank_0(m); /* a proof made without the secret */
    CHECK(write(fd, &good, sizeof(good)) == sizeof(good));
    CHECK(recv(fd, &answer, sizeof(answer), MSG_WAITALL) == sizeof(answer));
    smp_tcp_prove(&impostor, true, &good, &answer.hello, proof);
    CHECK(write(fd, proof, sizeof(proof)) == sizeof(proof));
    CHECK(is_hung_up(fd));
    close(fd);

    fd = call_rank_0(m); /* its own proof sent back to it */
    CHECK(write(fd, &good, sizeof(good)) == sizeof(good));
    CHECK(recv(fd, &answer, sizeof(answer), MSG_WAITALL) == sizeof(answer));
    CHECK(write(fd, answer.proof, sizeof(answer.proof)) == sizeof(answer.proof));
    CHECK(is_hung_up(fd));
    close(fd);

    for (int i = 0; i < SILENT; i++) {
        silent[i] = call_rank_0(m);
        CHECK(silent[i] >= 0);
    }
    meet_main(&m[1]);
    pthread_join(m[0].thread, NULL);
    CHECK_OK(m[0].status);
    CHECK_OK(m[1].status);
    for (int i = 0; i < SILENT; i++) {
        CHECK(is_hung_up(silent[i]));
        close(silent[i]);
    }
    drop_pair(m);
}

/* What one rank said in an earlier handshake is worth nothing in the next. */
TEST(a_recorded_handshake_is_refused)
{
    meeter         m[2];
    smp_tcp_hello  hello = hello_to_rank_0();
    smp_tcp_self   self = {.rank = 1, .size = 2, .job = "job"};
    smp_tcp_answer first;
    smp_tcp_answer second;
    uint8_t        proof[SMP_PROOF_BYTES];
    int            fds[2];

    create_pair(m, &as_job, "job", 60000);
    meet_in_thread(&m[0]);
    for (int i = 0; i < 2; i++) {
        fds[i] = call_rank_0(m);
        CHECK(write(fds[i], &hello, sizeof(hello)) == sizeof(hello));
    }
    CHECK(recv(fds[0], &first, sizeof(first), MSG_WAITALL) == sizeof(first));
    CHECK(recv(fds[1], &second, sizeof(second), MSG_WAITALL) == sizeof(second));
    smp_tcp_prove(&self, true, &hello, &first.hello, proof);
    CHECK(write(fds[1], proof, sizeof(proof)) == sizeof(proof));
    CHECK(is_hung_up(fds[1]));
    CHECK(write(fds[0], proof, sizeof(proof)) == sizeof(proof));
    pthread_join(m[0].thread, NULL);
    CHECK_OK(m[0].status);
    close(fds[0]);
    close(fds[1]);
    drop_pair(m);
}

/* ---------------------------------------------------------------------- lifelines */

TEST(each_transport_of_each_job_has_its_own_secret)
{
    static const char *const of[][2] = {
        {"job", "ucx"}, {"job", "mpi"}, {"job", "uc"}, {"jobs", "ucx"}};
    char    secrets[4][SMP_LIFELINE_SECRET];
    uint8_t proof[SMP_PROOF_BYTES];

    for (int i = 0; i < 4; i++) {
        smp_lifeline_secret(of[i][0], of[i][1], secrets[i]);
        CHECK(strlen(secrets[i]) == SMP_LIFELINE_SECRET - 1);
        for (int j = 0; j < i; j++) {
            CHECK(strcmp(secrets[i], secrets[j]) != 0);
        }
    }
    smp_proof("job", "ucx", sizeof("ucx"), proof);
    for (int i = 0; i < SMP_PROOF_BYTES; i++) {
        char digits[3];

        snprintf(digits, sizeof(digits), "%02x", proof[i]);
        CHECK(memcmp(secrets[0] + 2 * i, digits, 2) == 0);
    }
}

static bool
gives_up(void *arg)
{
    (void)arg;
    return true;
}

TEST(a_lifeline_carries_bytes_and_tells_of_the_end)
{
    smp_deadline later = {smp_clock_deadline(WORLD_DEADLINE_NS), gives_up, NULL};
    char         bytes[8] = "";
    char         what = 0;
    int          fds[2];

    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0);
    CHECK(smp_lifeline_hear(fds[1], &what) == SMP_LIFELINE_QUIET);
    CHECK(smp_lifeline_say(fds[0], 'a') && smp_lifeline_tell(fds[0], "bcd", 3));
    CHECK(smp_lifeline_hear(fds[1], &what) == SMP_LIFELINE_SAID && what == 'a');
    CHECK_OK(smp_lifeline_listen(fds[1], bytes, 3, PATIENCE_MS(60000)));
    CHECK(memcmp(bytes, "bcd", 3) == 0);
    CHECK_STATUS(smp_lifeline_listen(fds[1], bytes, 1, PATIENCE_MS(1)),
                 SMP_ERR_TIMED_OUT);
    CHECK_STATUS(smp_lifeline_listen(fds[1], bytes, 1, &later), SMP_ERR_INTERRUPTED);
    CHECK(smp_lifeline_tell(fds[0], "ef", 2)); /* of four */
    close(fds[0]);
    CHECK_STATUS(smp_lifeline_listen(fds[1], bytes, 4, PATIENCE_MS(60000)),
                 SMP_ERR_PEER_LOST);
    CHECK(memcmp(bytes, "ef", 2) == 0);
    CHECK(smp_lifeline_hear(fds[1], &what) == SMP_LIFELINE_HUNG_UP);
    CHECK(!smp_lifeline_say(fds[1], 'g'));
    close(fds[1]);
}

/* What becomes of the socket of a rank that was met. */
typedef struct {
    smp_tcp_self self;
    smp_tcp_door door;
    const void  *cards[2];
    size_t       bytes[2];
    int          fd; /* -1: none was taken */
    bool         met[2];
    smp_status   status;
} caller;

static smp_status
take_socket(void *arg, int rank, int fd)
{
    caller *c = arg;

    c->fd = rank == 1 - c->self.rank ? fd : -1;
    return smp_lifeline_watch_over(fd) ? SMP_OK : SMP_ERR_SYSTEM;
}

static void *
call_main(void *arg)
{
    static const bool wanted[2] = {true, true};
    caller           *c = arg;
    int               failed;

    c->status = smp_tcp_connect(&c->door, &c->self, c->cards, c->bytes, wanted,
                                PATIENCE_MS(60000), take_socket, c, c->met, &failed);
    return NULL;
}

static int
option_of(int fd, int level, int name)
{
    int       value = -1;
    socklen_t bytes = sizeof(value);

    return getsockopt(fd, level, name, &value, &bytes) == 0 ? value : -1;
}

/* Or messages wait for one another, and hosts that die are not noticed. */
TEST(sockets_send_at_once_and_ask_for_the_other_host)
{
    caller    callers[2];
    pthread_t threads[2];

    for (int r = 0; r < 2; r++) {
        callers[r] = (caller){.self = {.rank = r, .size = 2, .job = "job"}, .fd = -1};
        CHECK_OK(smp_tcp_door_open(r, LOOPBACK, &callers[r].door));
    }
    for (int r = 0; r < 2; r++) {
        for (int i = 0; i < 2; i++) {
            callers[r].cards[i] = &callers[i].door.card;
            callers[r].bytes[i] = sizeof(smp_tcp_card);
        }
        CHECK(pthread_create(&threads[r], NULL, call_main, &callers[r]) == 0);
    }
    for (int r = 0; r < 2; r++) {
        int fd;

        pthread_join(threads[r], NULL);
        CHECK_OK(callers[r].status);
        CHECK(callers[r].met[1 - r] && !callers[r].met[r]);
        fd = callers[r].fd;
        CHECK(fd >= 0 && (fcntl(fd, F_GETFL) & O_NONBLOCK) != 0);
        CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
        CHECK(option_of(fd, IPPROTO_TCP, TCP_NODELAY) != 0);
        CHECK(option_of(fd, SOL_SOCKET, SO_KEEPALIVE) != 0);
        CHECK(option_of(fd, IPPROTO_TCP, TCP_KEEPIDLE) == 1);
        CHECK(option_of(fd, IPPROTO_TCP, TCP_KEEPINTVL) == 1);
        CHECK(option_of(fd, IPPROTO_TCP, TCP_KEEPCNT) == SMP_TCP_SILENT_S - 1);
        CHECK(option_of(fd, IPPROTO_TCP, TCP_USER_TIMEOUT) == 1000 * SMP_TCP_SILENT_S);
        close(fd);
    }
}

/* Waiting brings none, so nobody waits: rank 1, who calls, and rank 0, who is called.
 */
TEST(without_descriptors_nobody_waits_for_a_meeting)
{
    struct rlimit before;
    struct rlimit low;

    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    low = before;
    low.rlim_cur = 3; /* all of these are open */
    for (int r = 0; r < 2; r++) {
        meeter m[2];
        int    fd = -1;

        create_pair(m, &as_job, "job", 600000);
        if (r == 0) {
            fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        }
        CHECK(setrlimit(RLIMIT_NOFILE, &low) == 0);
        meet_in_thread(&m[r]);
        if (r == 0) {
            struct sockaddr_storage to;
            const smp_tcp_card     *card = tcp_card_of(m[0].cards[0]);
            socklen_t bytes = smp_tcp_socket_address(&card->offer.addresses[0], &to);

            while (connect(fd, (struct sockaddr *)&to, bytes) != 0) {
                sched_yield();
            }
        }
        pthread_join(m[r].thread, NULL);
        CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
        CHECK_STATUS(m[r].status, SMP_ERR_SYSTEM);
        if (fd >= 0) {
            close(fd);
        }
        drop_pair(m);
    }
}

/* ----------------------------------- a peer that knows the secret and goes wrong */

typedef struct {
    meeter m[2];
    int    fd; /* to rank 0, from a rank 1 made by hand */
} impostor;

static void
make_impostor(impostor *im)
{
    smp_tcp_self        self = {.rank = 1, .size = 2, .job = "job"};
    smp_tcp_door        door = {.card = {.rank = 1}};
    const smp_tcp_card *cards[2] = {NULL, NULL};
    bool                wanted[2] = {true, false};
    bool                met[2] = {false, false};
    int                 fds[2];

    create_pair(im->m, &as_job, "job", 60000);
    meet_in_thread(&im->m[0]);
    for (int i = 0; i < SMP_TCP_ADDRESSES; i++) {
        door.fds[i] = -1;
    }
    cards[0] = tcp_card_of(im->m[0].cards[0]);
    door.card = *tcp_card_of(im->m[0].cards[1]);
    CHECK_OK(smp_tcp_meet(&door, &self, cards, wanted, PATIENCE_MS(20000), fds, met));
    CHECK(met[0]);
    pthread_join(im->m[0].thread, NULL);
    CHECK_OK(im->m[0].status);
    im->fd = fds[0];
}

static void
drop_impostor(impostor *im)
{
    close(im->fd);
    drop_pair(im->m);
}

/* Rank 0 gets `bytes` and must come to `want`. */
static void
send_bytes(const void *bytes, size_t n, smp_status want)
{
    impostor     im;
    smp_message *message;

    make_impostor(&im);
    CHECK(write(im.fd, bytes, n) == (ssize_t)n);
    if (want == SMP_ERR_PEER_LOST) {
        shutdown(im.fd, SHUT_WR);
    }
    CHECK_STATUS(smp_comm_receive(im.m[0].comm, WORLD_DEADLINE_NS, &message), want);
    CHECK(smp_comm_lost(im.m[0].comm) == (want == SMP_ERR_CLOSED ? -1 : 1));
    if (want != SMP_ERR_CLOSED) {
        CHECK(is_hung_up(im.fd));
        CHECK_STATUS(smp_comm_send(im.m[0].comm, 1, "x", 1, NULL, 0),
                     SMP_ERR_PEER_LOST);
    }
    drop_impostor(&im);
}

typedef struct {
    smp_tcp_header header;
    uint64_t       sizes[2];
    uint8_t        bytes[8 + 6 + 10];
} small_frame;

/* A message of 8 bytes and blocks of 6 and 10. */
static small_frame
frame_number(uint64_t sequence)
{
    return (small_frame){.header = {.kind = SMP_TCP_MESSAGE,
                                    .sequence = sequence,
                                    .nbytes = 8,
                                    .nblocks = 2,
                                    .total = 16 + 8 + 6 + 10},
                         .sizes = {6, 10}};
}

static void
send_small(small_frame frame, smp_status want)
{
    send_bytes(&frame, sizeof(frame), want);
}

TEST(frames_that_no_rank_sends_are_malformed)
{
    small_frame bad[7];

    for (int i = 0; i < 7; i++) {
        bad[i] = frame_number(i == 1); /* reordered */
    }
    bad[0].header.kind = 77;
    bad[2].header.total++;
    bad[3].sizes[0]++;
    bad[4].sizes[1] = UINT64_MAX - 5; /* with the first one it wraps around */
    bad[5].header.nblocks = UINT64_MAX / 8 + 1;
    bad[6].header.kind = SMP_TCP_GOODBYE;
    for (int i = 0; i < 7; i++) {
        send_small(bad[i], SMP_ERR_MALFORMED);
    }
}

TEST(a_message_larger_than_memory_is_no_memory)
{
    small_frame frame = frame_number(0);

    frame.header.nbytes = UINT64_MAX / 4 + 1;
    frame.header.total = UINT64_MAX - 100;
    send_small(frame, SMP_ERR_NO_MEMORY);
    frame = frame_number(0);
    frame.sizes[1] = UINT64_MAX / 2 + 1;
    frame.header.total += frame.sizes[1] - 10;
    send_small(frame, SMP_ERR_NO_MEMORY);
}

TEST(a_frame_that_ends_early_is_a_loss)
{
    small_frame frame = frame_number(0);

    send_bytes(&frame, sizeof(frame) - 1, SMP_ERR_PEER_LOST);
    send_bytes(&frame, 20, SMP_ERR_PEER_LOST);
}

TEST(a_goodbye_is_the_end)
{
    smp_tcp_header header = {.kind = SMP_TCP_GOODBYE};

    send_bytes(&header, sizeof(header), SMP_ERR_CLOSED);
}

/* Whatever the pieces in which the network hands it over. */
TEST(a_frame_may_come_byte_by_byte)
{
    enum { COUNT = 20 };
    impostor     im;
    smp_message *message;

    make_impostor(&im);
    for (uint64_t i = 0; i < COUNT; i++) {
        small_frame frame = frame_number(i);

        memset(frame.bytes, (int)i, sizeof(frame.bytes));
        for (size_t at = 0; at < sizeof(frame); at++) {
            CHECK(write(im.fd, (uint8_t *)&frame + at, 1) == 1);
        }
        CHECK_OK(smp_comm_receive(im.m[0].comm, WORLD_DEADLINE_NS, &message));
        CHECK(message->source == 1 && message->nbytes == 8 && message->nblocks == 2);
        CHECK(smp_block_bytes(message->blocks[0]) == 6);
        CHECK(smp_block_bytes(message->blocks[1]) == 10);
        CHECK(memcmp(smp_block_data(message->blocks[1]), frame.bytes, 10) == 0);
        smp_message_free(message);
    }
    drop_impostor(&im);
}

RUN_WORLDS(.transports = "tcp")
