/* What is particular to shared memory: deaths, strangers, forks, what is left behind.
 * Spec: csrc/comm/messaging/comm.h, csrc/comm/transport/shm/meet.h, csrc/common/fork.h.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "comm/memory/block.h"
#include "comm/memory/segment.h"
#include "comm/transport/shm/meet.h"
#include "comm/transport/shm/record.h"
#include "comm/transport/shm/stream.h"
#include "comm/transport/transport.h"
#include "deaths.h"
#include "traffic.h"

/* ---------------------------------------------------------------------- deaths */

/* _Fork() runs no handlers, so this child keeps all that the rank had open. */
TEST_RANK(a_killed_peer_is_noticed_although_its_child_holds_its_descriptors)
{
    w->barrier(w);
    if (w->rank == 1) {
        if (_Fork() == 0) {
            child_main(w);
        }
        kill(getpid(), SIGKILL);
    }
    return await_loss_of_rank_1(w);
}

TEST_RANK(what_a_dead_peer_had_sent_arrives)
{
    static const size_t sizes[] = {300000, 100, 40000};
    smp_message        *message;

    w->barrier(w);
    if (w->rank == 1) {
        for (uint64_t i = 0; i < 3; i++) {
            CHECK_STATUS(send_filled(w, 0, i, 3000 + 9000 * i, sizes, 3), SMP_OK);
        }
        kill(getpid(), SIGKILL);
    }
    while (smp_comm_lost(w->comm) < 0) {
        sched_yield();
    }
    for (uint64_t i = 0; i < 3; i++) {
        CHECK_STATUS(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message), SMP_OK);
        CHECK(message_filled(message, i, 3000 + 9000 * i, sizes, 3));
        smp_message_free(message);
    }
    CHECK_STATUS(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message),
                 SMP_ERR_PEER_LOST);
    return 0;
}

/* ----------------------------------------------------------------------- forks */

/* Shared memory is not copied on write: what a child can see stays as it is. */
TEST_RANK(a_block_that_a_child_sees_is_not_used_again)
{
    static const size_t sizes[] = {60 << 10};
    smp_comm_stats      stats;
    smp_message        *message;
    pid_t               pid;
    int                 how;

    CHECK_STATUS(send_filled(w, other(w, 0), 1, 8, sizes, 1), SMP_OK);
    CHECK_STATUS(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message), SMP_OK);
    pid = fork();
    if (pid == 0) { /* looks at the block after its parent has given it back */
        while (atomic_load(&w->shared->scratch[w->rank]) == 0) {
            sched_yield();
        }
        _exit(!message_filled(message, 1, 8, sizes, 1));
    }
    smp_message_free(message);
    w->barrier(w);
    for (uint64_t i = 2; i < 50; i++) { /* the pool of 1 MiB goes round several times */
        CHECK_STATUS(send_filled(w, other(w, 0), i, 8, sizes, 1), SMP_OK);
        CHECK_STATUS(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message), SMP_OK);
        smp_message_free(message);
        w->barrier(w);
    }
    smp_comm_counters(w->comm, &stats);
    CHECK(stats.pool_in_use >= sizes[0]);
    w->barrier(w);
    atomic_store(&w->shared->scratch[w->rank], 1);
    CHECK(waitpid(pid, &how, 0) == pid && WIFEXITED(how) && WEXITSTATUS(how) == 0);
    do { /* and comes back soon after the child's end */
        smp_comm_counters(w->comm, &stats);
        sched_yield();
    } while (stats.pool_in_use != 0);
    w->barrier(w);
    return 0;
}

/* So too when no descriptor is left by which the parent would see the child's end: then
 * it never is. */
TEST_RANK(a_block_that_a_child_sees_is_not_used_again_without_descriptors)
{
    static const size_t sizes[] = {60 << 10};
    struct rlimit       limit;
    struct rlimit       none;
    smp_comm_stats      stats;
    smp_message        *message;
    pid_t               pid;
    int                 how;

    CHECK_STATUS(send_filled(w, other(w, 0), 1, 8, sizes, 1), SMP_OK);
    CHECK_STATUS(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message), SMP_OK);
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    none = (struct rlimit){.rlim_cur = 0, .rlim_max = limit.rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    pid = fork();
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    if (pid == 0) {
        while (atomic_load(&w->shared->scratch[w->rank]) == 0) {
            sched_yield();
        }
        _exit(!message_filled(message, 1, 8, sizes, 1));
    }
    smp_message_free(message);
    w->barrier(w);
    for (uint64_t i = 2; i < 50; i++) {
        CHECK_STATUS(send_filled(w, other(w, 0), i, 8, sizes, 1), SMP_OK);
        CHECK_STATUS(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message), SMP_OK);
        smp_message_free(message);
        w->barrier(w);
    }
    atomic_store(&w->shared->scratch[w->rank], 1);
    CHECK(waitpid(pid, &how, 0) == pid && WIFEXITED(how) && WEXITSTATUS(how) == 0);
    smp_comm_counters(w->comm, &stats);
    CHECK(stats.pool_in_use >= sizes[0]);
    w->barrier(w);
    return 0;
}

/* ----------------------------------------------------------------------- turns */

/* None whose messages are there waits for all of another's. */
TEST_RANK(peers_take_turns)
{
    smp_message *message;
    int          last = -1;

    for (int i = 0; i < 10 && w->rank != 0; i++) {
        CHECK_STATUS(send_filled(w, 0, (uint64_t)i, 8, NULL, 0), SMP_OK);
    }
    w->barrier(w);
    for (int i = 0; i < 20 && w->rank == 0; i++) {
        CHECK_STATUS(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message), SMP_OK);
        CHECK(message->source != last);
        last = message->source;
        smp_message_free(message);
    }
    w->barrier(w);
    return 0;
}

/* ------------------------------------------------------------------- strangers */

static const smp_shm_card *
shm_card_of(const void *card)
{
    size_t bytes;

    return smp_card_find(card, "shm", &bytes);
}

TEST_RANK(the_socket_file_is_gone_once_all_have_met)
{
    w->barrier(w);
    for (int r = 0; r < w->size; r++) {
        const char *path = shm_card_of(w->shared->cards[r])->path;

        CHECK(strncmp(path, "/dev/shm/smp-", 13) == 0);
        CHECK(access(path, F_OK) != 0 && errno == ENOENT);
    }
    w->barrier(w);
    return 0;
}

static smp_status
create_comm(int rank, int size, const char *job, smp_comm **comm)
{
    smp_comm_config config = {.rank = rank,
                              .size = size,
                              .pool_bytes = 1 << 20,
                              .spin_us = 0,
                              .transports = "shm"};

    snprintf(config.job, sizeof(config.job), "%s", job);
    return smp_comm_create(&config, comm);
}

TEST(the_socket_file_of_a_killed_rank_is_removed_by_the_next)
{
    smp_shm_card *left = mmap(NULL, sizeof(*left), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    smp_comm     *comm;
    size_t        bytes;
    int           how;
    pid_t         pid = fork();

    if (pid == 0) {
        if (create_comm(0, 2, "dies", &comm) == SMP_OK) {
            *left = *shm_card_of(smp_comm_card(comm, &bytes));
        }
        kill(getpid(), SIGKILL);
    }
    CHECK(waitpid(pid, &how, 0) == pid && WIFSIGNALED(how));
    CHECK(access(left->path, F_OK) == 0);

    pid = fork();
    if (pid == 0) {
        int ok = create_comm(0, 2, "next", &comm) == SMP_OK;

        smp_comm_destroy(comm);
        exit(!ok);
    }
    CHECK(waitpid(pid, &how, 0) == pid && WIFEXITED(how) && WEXITSTATUS(how) == 0);
    CHECK(access(left->path, F_OK) != 0);
    munmap(left, sizeof(*left));
    return 0;
}

/* Two ranks, each a thread, that may have different ideas of the job. */
typedef struct {
    smp_comm   *comm;
    const void *cards[2];
    size_t      bytes[2];
    int         timeout_ms;
    int         failed;
    smp_status  status;
} meeter;

static void *
meet_main(void *arg)
{
    meeter *m = arg;

    m->status = smp_comm_connect(m->comm, m->cards, m->bytes,
                                 PATIENCE_MS(m->timeout_ms), &m->failed);
    return NULL;
}

/* Rank 1's view of the job differs: it must not get in, and both are told. */
static int
refuse(const char *job_of_1, bool other_token)
{
    _Alignas(8) uint8_t forged[SMP_CARD_BYTES];
    meeter              m[2] = {{.timeout_ms = 60000, .failed = -1},
                                {.timeout_ms = 300, .failed = -1}};
    pthread_t           threads[2];

    CHECK_STATUS(create_comm(0, 2, "job", &m[0].comm), SMP_OK);
    CHECK_STATUS(create_comm(1, 2, job_of_1, &m[1].comm), SMP_OK);
    for (int r = 0; r < 2; r++) {
        m[0].cards[r] = smp_comm_card(m[r].comm, &m[0].bytes[r]);
        m[1].cards[r] = m[0].cards[r];
        m[1].bytes[r] = m[0].bytes[r];
    }
    if (other_token) {
        memcpy(forged, m[0].cards[0], m[0].bytes[0]);
        ((smp_shm_card *)(uintptr_t)shm_card_of(forged))->token[5] ^= 1;
        m[1].cards[0] = forged;
    }
    for (int r = 0; r < 2; r++) {
        CHECK(pthread_create(&threads[r], NULL, meet_main, &m[r]) == 0);
    }
    for (int r = 0; r < 2; r++) {
        pthread_join(threads[r], NULL);
        CHECK(m[r].failed == 1 - r);
        smp_comm_destroy(m[r].comm);
    }
    CHECK_STATUS(m[0].status, SMP_ERR_PEER_LOST); /* it has given up */
    CHECK_STATUS(m[1].status, SMP_ERR_UNREACHABLE);
    return 0;
}

TEST(nobody_else_can_call_at_the_door)
{
    mode_t       before = umask(0);
    smp_shm_door door;
    struct stat  file;

    CHECK_STATUS(smp_shm_door_open(0, &door), SMP_OK);
    umask(before);
    CHECK(lstat(door.card.path, &file) == 0);
    CHECK(S_ISSOCK(file.st_mode) && (file.st_mode & 07777) == 0600);
    smp_shm_door_close(&door);
    CHECK(lstat(door.card.path, &file) != 0);
    return 0;
}

/* A rank that was killed before it listened. */
TEST(a_file_that_never_got_its_name_is_removed_after_a_while)
{
    static const struct timespec long_ago[] = {{.tv_sec = 1}, {.tv_sec = 1}};
    struct sockaddr_un           address = {.sun_family = AF_UNIX};
    char                        *path = address.sun_path;
    int                          fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    smp_shm_door                 door;

    snprintf(path, sizeof(address.sun_path), "/dev/shm/smp-test-%d.new", (int)getpid());
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof(address)) == 0);
    close(fd);
    CHECK_STATUS(smp_shm_door_open(0, &door), SMP_OK);
    smp_shm_door_close(&door);
    CHECK(access(path, F_OK) == 0); /* its owner may be about to rename it */
    CHECK(utimensat(AT_FDCWD, path, long_ago, 0) == 0);
    CHECK_STATUS(smp_shm_door_open(0, &door), SMP_OK);
    smp_shm_door_close(&door);
    CHECK(access(path, F_OK) != 0);
    return 0;
}

TEST(another_job_is_refused)
{
    return refuse("another job", false);
}

TEST(a_wrong_secret_is_refused)
{
    return refuse("job", true);
}

TEST(a_card_of_another_rank_or_size_is_malformed)
{
    smp_comm   *comms[3];
    const void *cards[2];
    size_t      bytes[2];
    int         failed = -1;

    CHECK_STATUS(create_comm(0, 2, "job", &comms[0]), SMP_OK);
    CHECK_STATUS(create_comm(1, 3, "job", &comms[1]), SMP_OK);
    cards[0] = smp_comm_card(comms[0], &bytes[0]);
    cards[1] = smp_comm_card(comms[1], &bytes[1]);
    CHECK_STATUS(smp_comm_connect(comms[0], cards, bytes, PATIENCE_MS(100), &failed),
                 SMP_ERR_MALFORMED);
    CHECK(failed == 1);
    cards[1] = cards[0];
    CHECK_STATUS(smp_comm_connect(comms[0], cards, bytes, PATIENCE_MS(100), &failed),
                 SMP_ERR_MALFORMED);
    smp_comm_destroy(comms[0]);
    smp_comm_destroy(comms[1]);
    return 0;
}

/* The card's sections, which are what its reader follows. */
static int
check_sections(smp_comm *comm)
{
    _Alignas(8) uint8_t copy[SMP_CARD_BYTES];
    smp_card           *card = (smp_card *)(void *)copy;
    const void         *good;
    size_t              n;

    good = smp_comm_card(comm, &n);
    CHECK(smp_card_ok(good, n, 0, 2));
    CHECK(!smp_card_ok(good, n - 8, 0, 2));
    memcpy(copy, good, n);
    card->sections[0].offset = (uint32_t)n - 8;
    CHECK(!smp_card_ok(copy, n, 0, 2));
    memcpy(copy, good, n);
    card->sections[0].bytes = UINT32_MAX;
    CHECK(!smp_card_ok(copy, n, 0, 2));
    memcpy(copy, good, n);
    memset(card->sections[0].name, 'x', sizeof(card->sections[0].name));
    CHECK(!smp_card_ok(copy, n, 0, 2));
    memcpy(copy, good, n);
    card->nsections = SMP_CARD_SECTIONS + 1;
    CHECK(!smp_card_ok(copy, n, 0, 2));
    memcpy(copy, good, n);
    card->version++;
    CHECK(!smp_card_ok(copy, n, 0, 2));

    smp_card_begin(card, 1, 2);
    CHECK(smp_card_add(card, "a", "x", 1) && smp_card_add(card, "b", "two", 4));
    CHECK(smp_card_ok(copy, card->bytes, 1, 2));
    CHECK(*(const char *)smp_card_find(card, "a", &n) == 'x' && n == 1);
    CHECK(strcmp(smp_card_find(card, "b", &n), "two") == 0 && n == 4);
    CHECK(card->sections[1].offset % 8 == 0);
    CHECK(smp_card_find(card, "c", &n) == NULL);
    CHECK(!smp_card_add(card, "too long", "x", 1));
    CHECK(!smp_card_add(card, "c", copy, SMP_CARD_BYTES - card->bytes + 1));
    for (uint32_t i = 2; i < SMP_CARD_SECTIONS; i++) {
        CHECK(smp_card_add(card, "c", "x", 1));
    }
    CHECK(!smp_card_add(card, "d", "x", 1));
    CHECK(smp_card_ok(copy, card->bytes, 1, 2));
    return 0;
}

TEST(cards_and_hellos_that_differ_in_anything_are_refused)
{
    smp_shm_self  self = {.rank = 0, .size = 2, .job = "job"};
    smp_shm_door  doors[2];
    smp_shm_card  card;
    smp_shm_hello good = {.rank = 1, .size = 2, .job = "job"};
    smp_shm_hello bad[8];
    smp_comm     *comm;

    for (int r = 0; r < 2; r++) {
        CHECK_STATUS(smp_shm_door_open(r, &doors[r]), SMP_OK);
        smp_shm_door_close(&doors[r]);
    }
    good.magic = doors[0].card.magic;
    good.version = doors[0].card.version;
    memcpy(good.to, doors[0].card.token, SMP_TOKEN_BYTES);
    memcpy(good.from, doors[1].card.token, SMP_TOKEN_BYTES);
    CHECK(smp_shm_hello_ok(&good, &self, 1, &doors[0].card, &doors[1].card));
    for (int i = 0; i < 8; i++) {
        bad[i] = good;
    }
    bad[0].magic++;
    bad[1].version++;
    bad[2].rank = 0;
    bad[3].size = 3;
    bad[4].to[SMP_TOKEN_BYTES - 1] ^= 1;
    bad[5].from[0] ^= 1;
    strcpy(bad[6].job, "jo");
    strcpy(bad[7].job, "job of others");
    for (int i = 0; i < 8; i++) {
        CHECK(!smp_shm_hello_ok(&bad[i], &self, 1, &doors[0].card, &doors[1].card));
    }

    card = doors[1].card;
    CHECK(smp_shm_card_ok(&card, sizeof(card), 1));
    CHECK(!smp_shm_card_ok(&card, sizeof(card), 0));
    CHECK(!smp_shm_card_ok(&card, sizeof(card) - 1, 1));
    card.magic++;
    CHECK(!smp_shm_card_ok(&card, sizeof(card), 1));
    card = doors[1].card;
    card.version++;
    CHECK(!smp_shm_card_ok(&card, sizeof(card), 1));
    strcpy(card.path, "/dev/shm/smp-a/b.sock"); /* not in this folder */
    card.version--;
    CHECK(!smp_shm_card_ok(&card, sizeof(card), 1));
    strcpy(card.path, "/run/shm/smp-a.sock");
    CHECK(!smp_shm_card_ok(&card, sizeof(card), 1));
    memset(card.path + 20, 'a', sizeof(card.path) - 20); /* without an end */
    memcpy(card.path, doors[1].card.path, 20);
    CHECK(!smp_shm_card_ok(&card, sizeof(card), 1));

    CHECK_STATUS(create_comm(0, 2, "job", &comm), SMP_OK);
    CHECK(check_sections(comm) == 0);
    smp_comm_destroy(comm);
    return 0;
}

static int
call_door(const smp_shm_card *card)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int                fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    snprintf(address.sun_path, sizeof(address.sun_path), "%s", card->path);
    if (connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* One says nothing, one talks nonsense, one hangs up, one sends half a hello. */
TEST(strangers_at_the_door_disturb_nobody)
{
    meeter    m[2] = {{.timeout_ms = 20000}, {.timeout_ms = 20000}};
    pthread_t threads[2];
    int       strangers[4];
    char      nonsense[sizeof(smp_shm_hello)];

    CHECK_STATUS(create_comm(0, 2, "job", &m[0].comm), SMP_OK);
    CHECK_STATUS(create_comm(1, 2, "job", &m[1].comm), SMP_OK);
    for (int r = 0; r < 2; r++) {
        m[0].cards[r] = smp_comm_card(m[r].comm, &m[0].bytes[r]);
        m[1].cards[r] = m[0].cards[r];
        m[1].bytes[r] = m[0].bytes[r];
    }
    for (int i = 0; i < 4; i++) {
        strangers[i] = call_door(shm_card_of(m[0].cards[0]));
        CHECK(strangers[i] >= 0);
    }
    memset(nonsense, 'x', sizeof(nonsense));
    CHECK(write(strangers[1], nonsense, sizeof(nonsense)) == sizeof(nonsense));
    close(strangers[2]);
    CHECK(write(strangers[3], nonsense, sizeof(nonsense) / 2) == sizeof(nonsense) / 2);
    for (int r = 0; r < 2; r++) {
        CHECK(pthread_create(&threads[r], NULL, meet_main, &m[r]) == 0);
    }
    for (int r = 0; r < 2; r++) {
        pthread_join(threads[r], NULL);
        CHECK_STATUS(m[r].status, SMP_OK);
    }
    for (int r = 0; r < 2; r++) {
        smp_comm_destroy(m[r].comm);
    }
    close(strangers[0]);
    close(strangers[1]);
    close(strangers[3]);
    return 0;
}

/* ----------------------------------- a peer that knows the secrets and goes wrong */

typedef struct {
    smp_comm     *comm; /* rank 0 */
    smp_segment  *own;  /* rank 1, by hand */
    smp_segment  *theirs;
    smp_shm_door  door;
    smp_shm_guest guest;
    int           kick_fd;
} impostor;

static int
make_impostor(impostor *im)
{
    _Alignas(8) static uint8_t buffer[SMP_CARD_BYTES];
    smp_card                  *card = (smp_card *)(void *)buffer;
    meeter                     m = {.timeout_ms = 20000};
    const smp_shm_card        *cards[2] = {NULL, NULL};
    smp_shm_guest              guests[2];
    bool                       met[2] = {false, false};
    pthread_t                  thread;
    int                        failed;
    smp_shm_self               self;

    CHECK_STATUS(create_comm(0, 2, "job", &im->comm), SMP_OK);
    CHECK_STATUS(smp_segment_create(2, 1 << 20, &im->own), SMP_OK);
    CHECK_STATUS(smp_shm_door_open(1, &im->door), SMP_OK);
    im->kick_fd = eventfd(0, EFD_CLOEXEC);
    smp_card_begin(card, 1, 2);
    CHECK(smp_card_add(card, "shm", &im->door.card, sizeof(im->door.card)));
    m.comm = im->comm;
    m.cards[0] = smp_comm_card(im->comm, &m.bytes[0]);
    m.cards[1] = card;
    m.bytes[1] = card->bytes;
    CHECK(pthread_create(&thread, NULL, meet_main, &m) == 0);
    self = (smp_shm_self){.rank = 1,
                          .size = 2,
                          .job = "job",
                          .arena_bytes = 1 << 20,
                          .segment_fd = im->own->fd,
                          .kick_fd = im->kick_fd};
    cards[0] = shm_card_of(m.cards[0]);
    CHECK_STATUS(
        smp_shm_meet(&im->door, &self, cards, PATIENCE_MS(20000), guests, met, &failed),
        SMP_OK);
    CHECK(met[0]);
    pthread_join(thread, NULL);
    CHECK_STATUS(m.status, SMP_OK);
    im->guest = guests[0];
    return smp_segment_attach(im->guest.segment_fd, 2, 1 << 20, &im->theirs) != SMP_OK;
}

static void
drop_impostor(impostor *im)
{
    smp_comm_destroy(im->comm);
    close(im->guest.socket);
    close(im->guest.segment_fd);
    close(im->guest.kick_fd);
    close(im->kick_fd);
    smp_segment_unref(im->theirs);
    smp_segment_unref(im->own);
}

TEST(garbage_in_the_ring_is_malformed)
{
    impostor     im = {0};
    smp_message *message;

    CHECK(make_impostor(&im) == 0);
    memset(im.theirs->rings[1].data, 0xff, 4096);
    atomic_store(&im.theirs->rings[1].tail, 4096);
    CHECK_STATUS(smp_comm_receive(im.comm, WORLD_DEADLINE_NS, &message),
                 SMP_ERR_MALFORMED);
    CHECK(smp_comm_lost(im.comm) == 1);
    CHECK_STATUS(smp_comm_receive(im.comm, WORLD_DEADLINE_NS, &message),
                 SMP_ERR_MALFORMED);
    drop_impostor(&im);
    return 0;
}

TEST(a_full_ring_is_announced_and_filled_again_on_a_kick)
{
    enum { COUNT = 300 };
    const uint64_t    one = 1;
    uint8_t           bytes[1000] = {0};
    impostor          im = {0};
    smp_ring_consumer consumer = {0};
    int64_t           deadline = smp_clock_ns() + WORLD_DEADLINE_NS;
    int               taken = 0;

    CHECK(make_impostor(&im) == 0);
    consumer.ring = &im.own->rings[0];
    for (int i = 0; i < COUNT; i++) {
        CHECK_STATUS(smp_comm_send(im.comm, 1, bytes, sizeof(bytes), NULL, 0), SMP_OK);
    }
    while (atomic_load(&consumer.ring->hungry) == 0) {
        CHECK(smp_clock_ns() < deadline);
        sched_yield();
    }
    while (taken < COUNT) {
        const void *from;
        size_t      n;

        CHECK(smp_clock_ns() < deadline);
        CHECK_STATUS(smp_ring_peek(&consumer, &from, &n), SMP_OK);
        if (from == NULL) {
            sched_yield();
            continue;
        }
        taken++;
        if (smp_ring_advance(&consumer)) {
            CHECK(write(im.guest.kick_fd, &one, sizeof(one)) == sizeof(one));
        }
    }
    for (int i = 0; i < COUNT; i++) { /* which nobody takes: the end gives up */
        CHECK_STATUS(smp_comm_send(im.comm, 1, bytes, sizeof(bytes), NULL, 0), SMP_OK);
    }
    drop_impostor(&im);
    return 0;
}

/* A message with two blocks of the socket, of which one has come, is not there yet. */
TEST(a_message_waits_for_all_its_blocks)
{
    enum { BYTES = 5000 };
    smp_ring_producer producer = {0};
    impostor          im = {0};
    smp_block        *blocks[2];
    smp_message      *message;
    void             *record;

    CHECK(make_impostor(&im) == 0);
    producer.ring = &im.theirs->rings[1];
    for (int i = 0; i < 2; i++) {
        CHECK_STATUS(smp_block_private(BYTES, &blocks[i]), SMP_OK);
        fill(smp_block_data(blocks[i]), BYTES, (uint64_t)i);
    }
    CHECK_STATUS(
        smp_ring_reserve(&producer, smp_record_bytes(8, blocks, 2, im.own), &record),
        SMP_OK);
    smp_record_write(record, SMP_RECORD_WHOLE, "eight by", 8, blocks, 2, im.own);
    smp_ring_commit(&producer);
    for (int i = 0; i < 2; i++) {
        smp_frame frame = {.kind = SMP_FRAME_BLOCK, .bytes = BYTES};
        int       unread = 1;

        CHECK_STATUS(smp_comm_receive(im.comm, 20 * SMP_NS_PER_MS, &message),
                     SMP_ERR_TIMED_OUT);
        CHECK(write(im.guest.socket, &frame, sizeof(frame)) == sizeof(frame));
        CHECK(write(im.guest.socket, smp_block_data(blocks[i]), BYTES) == BYTES);
        while (unread != 0) {
            CHECK(ioctl(im.guest.socket, SIOCOUTQ, &unread) == 0);
            sched_yield();
        }
    }
    CHECK_STATUS(smp_comm_receive(im.comm, WORLD_DEADLINE_NS, &message), SMP_OK);
    CHECK(message->source == 1 && message->nbytes == 8 && message->nblocks == 2);
    for (int i = 0; i < 2; i++) {
        CHECK(filled(smp_block_data(message->blocks[i]), BYTES, (uint64_t)i));
        smp_block_release(blocks[i]);
    }
    smp_message_free(message);
    drop_impostor(&im);
    return 0;
}

static int
send_frame(smp_frame frame, smp_status want)
{
    impostor     im = {0};
    smp_message *message;

    CHECK(make_impostor(&im) == 0);
    CHECK(write(im.guest.socket, &frame, sizeof(frame)) == sizeof(frame));
    CHECK_STATUS(smp_comm_receive(im.comm, WORLD_DEADLINE_NS, &message), want);
    CHECK(smp_comm_lost(im.comm) == (want == SMP_ERR_CLOSED ? -1 : 1));
    drop_impostor(&im);
    return 0;
}

TEST(garbage_in_the_socket_is_malformed)
{
    CHECK(send_frame((smp_frame){.kind = 77, .bytes = 1}, SMP_ERR_MALFORMED) == 0);
    CHECK(send_frame((smp_frame){.kind = SMP_FRAME_BLOCK, .zero = 1, .bytes = 8},
                     SMP_ERR_MALFORMED) == 0);
    return send_frame((smp_frame){.kind = SMP_FRAME_GOODBYE, .bytes = 8},
                      SMP_ERR_MALFORMED);
}

TEST(a_block_larger_than_memory_is_no_memory)
{
    return send_frame((smp_frame){.kind = SMP_FRAME_BLOCK, .bytes = UINT64_MAX / 2 + 1},
                      SMP_ERR_NO_MEMORY);
}

TEST(a_goodbye_is_the_end)
{
    return send_frame((smp_frame){.kind = SMP_FRAME_GOODBYE}, SMP_ERR_CLOSED);
}

/* A segment that its maker could cut off under us is not mapped. */
TEST(a_segment_without_seals_is_refused)
{
    smp_segment *segment;
    smp_segment *good;
    int          fd = memfd_create("loose", MFD_CLOEXEC);

    CHECK(ftruncate(fd, 8 << 20) == 0);
    CHECK_STATUS(smp_segment_attach(fd, 2, 1 << 20, &segment), SMP_ERR_MALFORMED);
    close(fd);
    CHECK_STATUS(smp_segment_create(2, 1 << 20, &good), SMP_OK);
    fd = memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(ftruncate(fd, (off_t)good->bytes) == 0);
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_GROW) == 0); /* it may still shrink */
    CHECK_STATUS(smp_segment_attach(fd, 2, 1 << 20, &segment), SMP_ERR_MALFORMED);
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    CHECK_STATUS(smp_segment_attach(fd, 3, 1 << 20, &segment), SMP_ERR_MALFORMED);
    CHECK_STATUS(smp_segment_attach(fd, 2, 1 << 20, &segment), SMP_OK);
    smp_segment_unref(segment);
    smp_segment_unref(good);
    close(fd);
    return 0;
}

static bool
lie_apart(const void *first, size_t bytes, const void *next)
{
    return (const uint8_t *)first + bytes <= (const uint8_t *)next;
}

TEST(the_parts_of_a_segment_lie_apart)
{
    for (int ranks = 1; ranks < 6; ranks++) {
        smp_segment *s;

        CHECK_STATUS(smp_segment_create(ranks, 1 << 20, &s), SMP_OK);
        CHECK(lie_apart(s->base, 0, s->doorbell));
        CHECK(lie_apart(s->doorbell, sizeof(*s->doorbell), s->states));
        CHECK(lie_apart(s->states, s->nslots * sizeof(*s->states), s->rings));
        CHECK(lie_apart(s->rings, (size_t)ranks * sizeof(*s->rings), s->controls));
        CHECK(lie_apart(s->controls, SMP_CONTROL_BLOCKS * sizeof(*s->controls),
                        s->device));
        CHECK(lie_apart(s->device,
                        sizeof(*s->device) + (size_t)ranks * sizeof(uint32_t),
                        s->arena));
        CHECK(lie_apart(s->arena, s->arena_bytes, s->base + s->bytes));
        smp_segment_unref(s);
    }
    return 0;
}

/* ------------------------------------------------------------ what can be missing */

TEST(without_descriptors_create_fails_and_leaves_none)
{
    struct rlimit before;
    struct rlimit low;
    smp_comm     *comm;
    int           fds = open_fds();
    int           failures = 0;
    smp_status    status = SMP_ERR_SYSTEM;

    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    low = before;
    for (low.rlim_cur = 3; status != SMP_OK; low.rlim_cur++) {
        CHECK(low.rlim_cur < 100);
        CHECK(setrlimit(RLIMIT_NOFILE, &low) == 0);
        status = create_comm(0, 2, "job", &comm);
        CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
        if (status != SMP_OK) {
            CHECK_STATUS(status, SMP_ERR_SYSTEM);
            CHECK(open_fds() == fds);
            failures++;
        }
    }
    CHECK(failures >= 4);
    smp_comm_destroy(comm);
    CHECK(open_fds() == fds);
    return 0;
}

/* Waiting brings none, so nobody waits: rank 1, who calls, and rank 0, who is called.
 */
TEST(without_descriptors_nobody_is_met_and_this_rank_is_named)
{
    struct rlimit before;
    struct rlimit low;

    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    low = before;
    low.rlim_cur = 3; /* all of these are open */
    for (int r = 0; r < 2; r++) {
        meeter m = {.timeout_ms = 600000, .failed = -1};
        int    stranger = -1;

        smp_comm *comms[2];

        CHECK_STATUS(create_comm(0, 2, "job", &comms[0]), SMP_OK);
        CHECK_STATUS(create_comm(1, 2, "job", &comms[1]), SMP_OK);
        m.comm = comms[r];
        for (int i = 0; i < 2; i++) {
            m.cards[i] = smp_comm_card(comms[i], &m.bytes[i]);
        }
        stranger = call_door(shm_card_of(m.cards[r]));
        CHECK(stranger >= 0);
        CHECK(setrlimit(RLIMIT_NOFILE, &low) == 0);
        meet_main(&m);
        CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
        CHECK_STATUS(m.status, SMP_ERR_SYSTEM);
        CHECK(m.failed == r);
        close(stranger);
        smp_comm_destroy(comms[0]);
        smp_comm_destroy(comms[1]);
    }
    return 0;
}

TEST(a_transport_of_another_build_or_one_too_many_is_refused)
{
    static smp_transport others[SMP_TRANSPORTS];
    static const char *names[SMP_TRANSPORTS] = {"a", "b", "c", "d", "e", "f", "g", "h"};
    const smp_transport *all[SMP_TRANSPORTS];
    int                  before = smp_transport_all(all);
    pid_t                pid = fork(); /* what is registered stays so */
    int                  how;

    if (pid == 0) {
        bool well;

        for (int i = 0; i < SMP_TRANSPORTS; i++) {
            others[i] = (smp_transport){.abi = SMP_TRANSPORT_ABI, .name = names[i]};
        }
        others[0].abi++;
        well = smp_transport_register(&others[0]) == SMP_ERR_INVALID;
        others[0].abi--;
        for (int i = 0; i < SMP_TRANSPORTS; i++) {
            well = well && smp_transport_register(&others[i]) ==
                               (before + i < SMP_TRANSPORTS ? SMP_OK : SMP_ERR_INVALID);
        }
        others[1].name = "tcp"; /* is there already */
        well = well && smp_transport_register(&others[1]) == SMP_OK;
        well = well && smp_transport_find("tcp", 3) == &smp_transport_tcp;
        well = well && smp_transport_find("a,b", 1) == &others[0];
        well = well && smp_transport_find("tc", 2) == NULL;
        well = well && smp_transport_all(all) == SMP_TRANSPORTS;
        _exit(well && all[0] == &smp_transport_shm ? 0 : 1);
    }
    CHECK(waitpid(pid, &how, 0) == pid && WIFEXITED(how) && WEXITSTATUS(how) == 0);
    return 0;
}

TEST(an_unknown_transport_is_invalid)
{
    smp_comm_config config = {.size = 2, .transports = "shm,pigeon", .job = "job"};
    smp_comm       *comm;

    CHECK_STATUS(smp_comm_create(&config, &comm), SMP_ERR_INVALID);
    config.transports = "^shm,^ucx,^tcp"; /* which leaves none */
    CHECK_STATUS(smp_comm_create(&config, &comm), SMP_ERR_INVALID);
    return 0;
}

TEST(a_rank_that_is_none_and_a_job_without_an_end_are_invalid)
{
    const smp_comm_config good = {.size = 2, .transports = "shm", .job = "job"};
    smp_comm_config       bad[4] = {good, good, good, good};
    smp_comm             *comm;

    bad[0].size = 0;
    bad[1].rank = -1;
    bad[2].rank = 2;
    memset(bad[3].job, 'x', sizeof(bad[3].job));
    for (int i = 0; i < 4; i++) {
        CHECK_STATUS(smp_comm_create(&bad[i], &comm), SMP_ERR_INVALID);
    }
    return 0;
}

/* Two ranks of this process, each made while its thread may run on one core alone. */
static int
connect_on(const char *transports, int cores[2], int spin_us, meeter m[2])
{
    cpu_set_t before;
    pthread_t threads[2];

    CHECK(sched_getaffinity(0, sizeof(before), &before) == 0);
    for (int r = 0; r < 2; r++) {
        smp_comm_config config = {.rank = r,
                                  .size = 2,
                                  .pool_bytes = 4 << 20,
                                  .spin_us = spin_us,
                                  .transports = transports,
                                  .job = "job"};
        cpu_set_t       one;

        CPU_ZERO(&one);
        CPU_SET((size_t)cores[r], &one);
        m[r] = (meeter){.timeout_ms = 60000};
        CHECK(sched_setaffinity(0, sizeof(one), &one) == 0);
        CHECK_STATUS(smp_comm_create(&config, &m[r].comm), SMP_OK);
    }
    CHECK(sched_setaffinity(0, sizeof(before), &before) == 0);
    for (int r = 0; r < 2; r++) {
        for (int i = 0; i < 2; i++) {
            m[r].cards[i] = smp_comm_card(m[i].comm, &m[r].bytes[i]);
        }
        CHECK(pthread_create(&threads[r], NULL, meet_main, &m[r]) == 0);
    }
    for (int r = 0; r < 2; r++) {
        pthread_join(threads[r], NULL);
        CHECK_STATUS(m[r].status, SMP_OK);
    }
    return 0;
}

static int
spin_on(const char *transports, int cores[2], int spin_us, bool want)
{
    meeter m[2];

    CHECK(connect_on(transports, cores, spin_us, m) == 0);
    for (int r = 0; r < 2; r++) {
        CHECK(smp_comm_spins(m[r].comm) == want);
        CHECK_STATUS(smp_comm_connect(m[r].comm, m[r].cards, m[r].bytes,
                                      PATIENCE_MS(100), &m[r].failed),
                     SMP_ERR_CLOSED); /* only once */
    }
    smp_comm_destroy(m[0].comm);
    smp_comm_destroy(m[1].comm);
    return 0;
}

/* Whoever waits would keep the core from the other rank, or from its own thread that
 * brings the messages. */
TEST(ranks_keep_their_cores_only_where_each_has_one)
{
    cpu_set_t all;
    int       cores[2] = {-1, -1};
    int       same[2];
    int       n = 0;

    CHECK(sched_getaffinity(0, sizeof(all), &all) == 0);
    for (int c = 0; c < CPU_SETSIZE && n < 2; c++) {
        if (CPU_ISSET((size_t)c, &all)) {
            cores[n++] = c;
        }
    }
    same[0] = same[1] = cores[0];
    CHECK(spin_on("shm", same, -1, false) == 0);
    CHECK(spin_on("shm", same, 10, true) == 0); /* somebody says so */
    CHECK(spin_on("tcp", same, -1, false) == 0);
    if (n == 2) {
        CHECK(spin_on("shm", cores, -1, true) == 0);
        CHECK(spin_on("tcp", cores, -1, false) == 0);
    }
    return 0;
}

/* Who is reached by the first is no matter of the second. */
TEST(the_transport_that_is_named_first_serves)
{
    static const char *const lists[][2] = {{"shm,tcp", "shm"}, {"tcp,shm", "tcp"}};
    int                      cores[2] = {0, 0};
    cpu_set_t                all;
    smp_message             *message;

    CHECK(sched_getaffinity(0, sizeof(all), &all) == 0);
    while (!CPU_ISSET((size_t)cores[0], &all)) {
        cores[0]++;
    }
    cores[1] = cores[0];
    for (int i = 0; i < 2; i++) {
        meeter m[2];

        CHECK(connect_on(lists[i][0], cores, 0, m) == 0);
        for (int r = 0; r < 2; r++) {
            CHECK(strcmp(smp_comm_transport(m[r].comm, 1 - r), lists[i][1]) == 0);
        }
        CHECK_STATUS(smp_comm_send(m[1].comm, 0, "x", 1, NULL, 0), SMP_OK);
        smp_comm_destroy(m[1].comm);
        CHECK_STATUS(smp_comm_receive(m[0].comm, WORLD_DEADLINE_NS, &message), SMP_OK);
        smp_message_free(message);
        CHECK_STATUS(smp_comm_receive(m[0].comm, WORLD_DEADLINE_NS, &message),
                     SMP_ERR_CLOSED);
        smp_comm_destroy(m[0].comm);
    }
    return 0;
}

TEST(pages_that_are_expected_are_made_while_nobody_sends)
{
    const uint64_t expected = 3 << 20;
    int64_t        deadline = smp_clock_ns() + WORLD_DEADLINE_NS;
    smp_comm_stats stats;
    int            cores[2];
    cpu_set_t      all;
    meeter         m[2];

    CHECK(sched_getaffinity(0, sizeof(all), &all) == 0);
    for (cores[0] = 0; !CPU_ISSET((size_t)cores[0], &all); cores[0]++) {
    }
    cores[1] = cores[0];
    CHECK(connect_on("shm", cores, 0, m) == 0);
    smp_comm_counters(m[0].comm, &stats);
    CHECK(stats.pool_made < expected && stats.pool_size == 4 << 20);
    smp_comm_expect(m[0].comm, expected);
    do {
        smp_comm_counters(m[0].comm, &stats);
        CHECK(smp_clock_ns() < deadline);
    } while (stats.pool_made < expected);
    CHECK(stats.pool_in_use == 0);
    smp_comm_destroy(m[0].comm);
    smp_comm_destroy(m[1].comm);
    return 0;
}

TEST(a_job_of_one_needs_no_connection)
{
    smp_message *message;
    smp_comm    *comm;
    const void  *card;
    size_t       bytes;
    int          failed;

    CHECK_STATUS(create_comm(0, 1, "job", &comm), SMP_OK);
    card = smp_comm_card(comm, &bytes);
    CHECK_STATUS(smp_comm_connect(comm, &card, &bytes, PATIENCE_MS(100), &failed),
                 SMP_OK);
    CHECK_STATUS(smp_comm_receive(comm, 1000, &message), SMP_ERR_TIMED_OUT);
    smp_comm_wake(comm);
    CHECK_STATUS(smp_comm_receive(comm, -1, &message), SMP_ERR_INTERRUPTED);
    smp_comm_destroy(comm);
    return 0;
}

/* ------------------------------------------------------------------------- main */

static int
run_world(const char *name, int (*rank)(world *), int size, size_t pool)
{
    world_test test = {.name = name, .rank = rank, .pool_bytes = pool};

    return world_run_processes(&test, "shm", size);
}

#define IN_WORLD(name, size, pool)                                                     \
    TEST(run_##name)                                                                   \
    {                                                                                  \
        return run_world(#name, name, size, pool);                                     \
    }

IN_WORLD(a_killed_peer_is_noticed_although_its_child_lives, 2, 0)
IN_WORLD(a_killed_peer_is_noticed_although_its_child_holds_its_descriptors, 2, 0)
IN_WORLD(what_a_dead_peer_had_sent_arrives, 2, 0)
IN_WORLD(a_rank_that_dies_before_it_connects_is_named, 3, 0)
IN_WORLD(a_forked_child_can_do_nothing_and_breaks_nothing, 2, 0)
IN_WORLD(a_block_that_a_child_sees_is_not_used_again, 2, 1 << 20)
IN_WORLD(a_block_that_a_child_sees_is_not_used_again_without_descriptors, 2, 1 << 20)
IN_WORLD(the_socket_file_is_gone_once_all_have_met, 4, 0)
IN_WORLD(peers_take_turns, 3, 0)

TEST(run_a_killed_peer_is_named_to_all_others)
{
    for (int i = 0; i < 40; i++) {
        CHECK(run_world("a_killed_peer_is_named_to_all_others",
                        a_killed_peer_is_named_to_all_others, 3, 1 << 20) == 0);
    }
    return 0;
}

int
main(int argc, char **argv)
{
    /* Those in which this process has threads come last: the others fork. */
    static const smp_test tests[] = {
        LISTED_TEST(a_transport_of_another_build_or_one_too_many_is_refused),
        {"the_socket_file_of_a_killed_rank_is_removed_by_the_next",
         the_socket_file_of_a_killed_rank_is_removed_by_the_next},
        {"a_killed_peer_is_named_to_all_others",
         run_a_killed_peer_is_named_to_all_others},
        {"a_killed_peer_is_noticed_although_its_child_lives",
         run_a_killed_peer_is_noticed_although_its_child_lives},
        {"a_killed_peer_is_noticed_although_its_child_holds_its_descriptors",
         run_a_killed_peer_is_noticed_although_its_child_holds_its_descriptors},
        {"what_a_dead_peer_had_sent_arrives", run_what_a_dead_peer_had_sent_arrives},
        {"a_rank_that_dies_before_it_connects_is_named",
         run_a_rank_that_dies_before_it_connects_is_named},
        {"a_forked_child_can_do_nothing_and_breaks_nothing",
         run_a_forked_child_can_do_nothing_and_breaks_nothing},
        {"a_block_that_a_child_sees_is_not_used_again",
         run_a_block_that_a_child_sees_is_not_used_again},
        {"a_block_that_a_child_sees_is_not_used_again_without_descriptors",
         run_a_block_that_a_child_sees_is_not_used_again_without_descriptors},
        {"the_socket_file_is_gone_once_all_have_met",
         run_the_socket_file_is_gone_once_all_have_met},
        {"peers_take_turns", run_peers_take_turns},
        {"nobody_else_can_call_at_the_door", nobody_else_can_call_at_the_door},
        {"a_file_that_never_got_its_name_is_removed_after_a_while",
         a_file_that_never_got_its_name_is_removed_after_a_while},
        {"another_job_is_refused", another_job_is_refused},
        {"a_wrong_secret_is_refused", a_wrong_secret_is_refused},
        {"a_card_of_another_rank_or_size_is_malformed",
         a_card_of_another_rank_or_size_is_malformed},
        LISTED_TEST(cards_and_hellos_that_differ_in_anything_are_refused),
        {"strangers_at_the_door_disturb_nobody", strangers_at_the_door_disturb_nobody},
        {"garbage_in_the_ring_is_malformed", garbage_in_the_ring_is_malformed},
        {"a_full_ring_is_announced_and_filled_again_on_a_kick",
         a_full_ring_is_announced_and_filled_again_on_a_kick},
        LISTED_TEST(a_message_waits_for_all_its_blocks),
        {"garbage_in_the_socket_is_malformed", garbage_in_the_socket_is_malformed},
        {"a_block_larger_than_memory_is_no_memory",
         a_block_larger_than_memory_is_no_memory},
        {"a_goodbye_is_the_end", a_goodbye_is_the_end},
        {"a_segment_without_seals_is_refused", a_segment_without_seals_is_refused},
        LISTED_TEST(the_parts_of_a_segment_lie_apart),
        {"without_descriptors_create_fails_and_leaves_none",
         without_descriptors_create_fails_and_leaves_none},
        LISTED_TEST(without_descriptors_nobody_is_met_and_this_rank_is_named),
        {"an_unknown_transport_is_invalid", an_unknown_transport_is_invalid},
        LISTED_TEST(a_rank_that_is_none_and_a_job_without_an_end_are_invalid),
        LISTED_TEST(ranks_keep_their_cores_only_where_each_has_one),
        LISTED_TEST(the_transport_that_is_named_first_serves),
        LISTED_TEST(pages_that_are_expected_are_made_while_nobody_sends),
        {"a_job_of_one_needs_no_connection", a_job_of_one_needs_no_connection},
    };
    return run_tests(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
