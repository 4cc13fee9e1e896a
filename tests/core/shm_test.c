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
#include "pair.h"
#include "traffic.h"

/* ---------------------------------------------------------------------- deaths */

/* _Fork() runs no handlers, so this child keeps all that the rank had open. */
TEST_RANK(a_killed_peer_is_noticed_although_its_child_holds_its_descriptors,
          .processes = "2")
{
    w->barrier(w);
    if (w->rank == 1) {
        if (_Fork() == 0) {
            child_main(w);
        }
        kill(getpid(), SIGKILL);
    }
    await_loss_of_rank_1(w);
}

TEST_RANK(what_a_dead_peer_had_sent_arrives, .processes = "2")
{
    static const size_t sizes[] = {300000, 100, 40000};

    w->barrier(w);
    if (w->rank == 1) {
        for (uint64_t i = 0; i < 3; i++) {
            CHECK_OK(send_filled(w, 0, i, 3000 + 9000 * i, sizes, 3));
        }
        kill(getpid(), SIGKILL);
    }
    while (smp_comm_lost(w->comm) < 0) {
        sched_yield();
    }
    for (uint64_t i = 0; i < 3; i++) {
        expect_filled(w, i, 3000 + 9000 * i, sizes, 3);
    }
    expect_end(w, SMP_ERR_PEER_LOST);
}

/* ----------------------------------------------------------------------- forks */

/* Shared memory is not copied on write: what a child can see stays as it is, until the
 * child has ended; for ever, where the parent does not see that end. */
static void
show_a_block_to_a_child(world *w, bool sees_its_end)
{
    static const size_t sizes[] = {60 << 10};
    struct rlimit       limit;
    smp_comm_stats      stats;
    smp_message        *message;
    pid_t               pid;

    CHECK_OK(send_filled(w, other(w, 0), 1, 8, sizes, 1));
    CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message));
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    if (!sees_its_end) { /* no descriptor is left that would show it */
        CHECK(setrlimit(RLIMIT_NOFILE, &(struct rlimit){.rlim_max = limit.rlim_max}) ==
              0);
    }
    pid = fork();
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    if (pid == 0) { /* looks at the block after its parent has given it back */
        while (atomic_load(&w->shared->scratch[w->rank]) == 0) {
            sched_yield();
        }
        _exit(!message_filled(message, 1, 8, sizes, 1));
    }
    smp_message_free(message);
    w->barrier(w);
    for (uint64_t i = 2; i < 50; i++) { /* the pool of 1 MiB goes round several times */
        CHECK_OK(send_filled(w, other(w, 0), i, 8, sizes, 1));
        expect_filled(w, i, 8, sizes, 1);
        w->barrier(w);
    }
    smp_comm_counters(w->comm, &stats);
    CHECK(stats.pool_in_use >= sizes[0]);
    w->barrier(w);
    atomic_store(&w->shared->scratch[w->rank], 1);
    expect_well(pid);
    do { /* and comes back soon after the child's end */
        smp_comm_counters(w->comm, &stats);
        sched_yield();
    } while (sees_its_end && stats.pool_in_use != 0);
    CHECK(sees_its_end || stats.pool_in_use >= sizes[0]);
    w->barrier(w);
}

TEST_RANK(a_block_that_a_child_sees_is_not_used_again, .processes = "2",
          .pool_bytes = 1 << 20)
{
    show_a_block_to_a_child(w, true);
}

TEST_RANK(a_block_that_a_child_sees_is_not_used_again_without_descriptors,
          .processes = "2", .pool_bytes = 1 << 20)
{
    show_a_block_to_a_child(w, false);
}

/* ----------------------------------------------------------------------- turns */

/* None whose messages are there waits for all of another's. */
TEST_RANK(peers_take_turns, .processes = "3")
{
    smp_message *message;
    int          last = -1;

    for (int i = 0; i < 10 && w->rank != 0; i++) {
        CHECK_OK(send_filled(w, 0, (uint64_t)i, 8, NULL, 0));
    }
    w->barrier(w);
    for (int i = 0; i < 20 && w->rank == 0; i++) {
        CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message));
        CHECK(message->source != last);
        last = message->source;
        smp_message_free(message);
    }
    w->barrier(w);
}

/* ------------------------------------------------------------------- strangers */

static const smp_shm_card *
shm_card_of(const void *card)
{
    size_t bytes;

    return smp_card_find(card, "shm", &bytes);
}

TEST_RANK(the_socket_file_is_gone_once_all_have_met, .processes = "4")
{
    w->barrier(w);
    for (int r = 0; r < w->size; r++) {
        const char *path = shm_card_of(w->shared->cards[r])->path;

        CHECK(strncmp(path, "/dev/shm/smp-", 13) == 0);
        CHECK(access(path, F_OK) != 0 && errno == ENOENT);
    }
    w->barrier(w);
}

static const smp_comm_config as_job = {
    .size = 2, .pool_bytes = 1 << 20, .transports = "shm", .job = "job"};

static smp_status
create_comm(int rank, int size, smp_comm **comm)
{
    smp_comm_config config = as_job;

    config.rank = rank;
    config.size = size;
    return smp_comm_create(&config, comm);
}

TEST(a_transport_of_another_build_or_one_too_many_is_refused)
{
    static smp_transport others[SMP_TRANSPORTS];
    static const char *names[SMP_TRANSPORTS] = {"a", "b", "c", "d", "e", "f", "g", "h"};
    const smp_transport *all[SMP_TRANSPORTS];
    int                  before = smp_transport_all(all);
    pid_t                pid = fork(); /* what is registered stays so */

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
    expect_well(pid);
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
        if (create_comm(0, 2, &comm) == SMP_OK) {
            *left = *shm_card_of(smp_comm_card(comm, &bytes));
        }
        kill(getpid(), SIGKILL);
    }
    CHECK(waitpid(pid, &how, 0) == pid && WIFSIGNALED(how));
    CHECK(access(left->path, F_OK) == 0);

    pid = fork();
    if (pid == 0) {
        int ok = create_comm(0, 2, &comm) == SMP_OK;

        smp_comm_destroy(comm);
        exit(!ok);
    }
    expect_well(pid);
    CHECK(access(left->path, F_OK) != 0);
    munmap(left, sizeof(*left));
}

/* Rank 1's view of the job differs: it must not get in, and both are told. */
static void
refuse(const char *job_of_1, bool other_token)
{
    _Alignas(8) uint8_t forged[SMP_CARD_BYTES];
    meeter              m[2];

    create_pair(m, &as_job, job_of_1, 300);
    m[0].timeout_ms = 60000;
    if (other_token) {
        memcpy(forged, m[0].cards[0], m[0].bytes[0]);
        ((smp_shm_card *)(uintptr_t)shm_card_of(forged))->token[5] ^= 1;
        m[1].cards[0] = forged;
    }
    meet_pair(m);
    drop_pair(m);
    CHECK(m[0].failed == 1 && m[1].failed == 0);
    CHECK_STATUS(m[0].status, SMP_ERR_PEER_LOST); /* it has given up */
    CHECK_STATUS(m[1].status, SMP_ERR_UNREACHABLE);
}

TEST(nobody_else_can_call_at_the_door)
{
    mode_t       before = umask(0);
    smp_shm_door door;
    struct stat  file;

    CHECK_OK(smp_shm_door_open(0, &door));
    umask(before);
    CHECK(lstat(door.card.path, &file) == 0);
    CHECK(S_ISSOCK(file.st_mode) && (file.st_mode & 07777) == 0600);
    smp_shm_door_close(&door);
    CHECK(lstat(door.card.path, &file) != 0);
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
    CHECK_OK(smp_shm_door_open(0, &door));
    smp_shm_door_close(&door);
    CHECK(access(path, F_OK) == 0); /* its owner may be about to rename it */
    CHECK(utimensat(AT_FDCWD, path, long_ago, 0) == 0);
    CHECK_OK(smp_shm_door_open(0, &door));
    smp_shm_door_close(&door);
    CHECK(access(path, F_OK) != 0);
}

TEST(another_job_is_refused)
{
    refuse("another job", false);
}

TEST(a_wrong_secret_is_refused)
{
    refuse("job", true);
}

TEST(a_card_of_another_rank_or_size_is_malformed)
{
    smp_comm   *comms[3];
    const void *cards[2];
    size_t      bytes[2];
    int         failed = -1;

    CHECK_OK(create_comm(0, 2, &comms[0]));
    CHECK_OK(create_comm(1, 3, &comms[1]));
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
}

/* The card's sections, which are what its reader follows. */
static void
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
        CHECK_OK(smp_shm_door_open(r, &doors[r]));
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

    CHECK_OK(create_comm(0, 2, &comm));
    check_sections(comm);
    smp_comm_destroy(comm);
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
    meeter m[2];
    int    strangers[4];
    char   nonsense[sizeof(smp_shm_hello)];

    create_pair(m, &as_job, "job", 20000);
    for (int i = 0; i < 4; i++) {
        strangers[i] = call_door(shm_card_of(m[0].cards[0]));
        CHECK(strangers[i] >= 0);
    }
    memset(nonsense, 'x', sizeof(nonsense));
    CHECK(write(strangers[1], nonsense, sizeof(nonsense)) == sizeof(nonsense));
    close(strangers[2]);
    CHECK(write(strangers[3], nonsense, sizeof(nonsense) / 2) == sizeof(nonsense) / 2);
    meet_pair(m);
    CHECK_OK(m[0].status);
    CHECK_OK(m[1].status);
    drop_pair(m);
    close(strangers[0]);
    close(strangers[1]);
    close(strangers[3]);
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

static void
make_impostor(impostor *im)
{
    _Alignas(8) static uint8_t buffer[SMP_CARD_BYTES];
    smp_card                  *card = (smp_card *)(void *)buffer;
    meeter                     m = {.timeout_ms = 20000};
    const smp_shm_card        *cards[2] = {NULL, NULL};
    smp_shm_guest              guests[2];
    bool                       met[2] = {false, false};
    int                        failed;
    smp_shm_self               self;

    CHECK_OK(create_comm(0, 2, &im->comm));
    CHECK_OK(smp_segment_create(2, 1 << 20, &im->own));
    CHECK_OK(smp_shm_door_open(1, &im->door));
    im->kick_fd = eventfd(0, EFD_CLOEXEC);
    smp_card_begin(card, 1, 2);
    CHECK(smp_card_add(card, "shm", &im->door.card, sizeof(im->door.card)));
    m.comm = im->comm;
    m.cards[0] = smp_comm_card(im->comm, &m.bytes[0]);
    m.cards[1] = card;
    m.bytes[1] = card->bytes;
    meet_in_thread(&m);
    self = (smp_shm_self){.rank = 1,
                          .size = 2,
                          .job = "job",
                          .arena_bytes = 1 << 20,
                          .segment_fd = im->own->fd,
                          .kick_fd = im->kick_fd};
    cards[0] = shm_card_of(m.cards[0]);
    CHECK_OK(smp_shm_meet(&im->door, &self, cards, PATIENCE_MS(20000), guests, met,
                          &failed));
    CHECK(met[0]);
    pthread_join(m.thread, NULL);
    CHECK_OK(m.status);
    im->guest = guests[0];
    CHECK_OK(smp_segment_attach(im->guest.segment_fd, 2, 1 << 20, &im->theirs));
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

    make_impostor(&im);
    memset(im.theirs->rings[1].data, 0xff, 4096);
    atomic_store(&im.theirs->rings[1].tail, 4096);
    CHECK_STATUS(smp_comm_receive(im.comm, WORLD_DEADLINE_NS, &message),
                 SMP_ERR_MALFORMED);
    CHECK(smp_comm_lost(im.comm) == 1);
    CHECK_STATUS(smp_comm_receive(im.comm, WORLD_DEADLINE_NS, &message),
                 SMP_ERR_MALFORMED);
    drop_impostor(&im);
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

    make_impostor(&im);
    consumer.ring = &im.own->rings[0];
    for (int i = 0; i < COUNT; i++) {
        CHECK_OK(smp_comm_send(im.comm, 1, bytes, sizeof(bytes), NULL, 0));
    }
    while (atomic_load(&consumer.ring->hungry) == 0) {
        CHECK(smp_clock_ns() < deadline);
        sched_yield();
    }
    while (taken < COUNT) {
        const void *from;
        size_t      n;

        CHECK(smp_clock_ns() < deadline);
        CHECK_OK(smp_ring_peek(&consumer, &from, &n));
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
        CHECK_OK(smp_comm_send(im.comm, 1, bytes, sizeof(bytes), NULL, 0));
    }
    drop_impostor(&im);
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

    make_impostor(&im);
    producer.ring = &im.theirs->rings[1];
    for (int i = 0; i < 2; i++) {
        CHECK_OK(smp_block_private(BYTES, &blocks[i]));
        fill(smp_block_data(blocks[i]), BYTES, (uint64_t)i);
    }
    CHECK_OK(
        smp_ring_reserve(&producer, smp_record_bytes(8, blocks, 2, im.own), &record));
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
    CHECK_OK(smp_comm_receive(im.comm, WORLD_DEADLINE_NS, &message));
    CHECK(message->source == 1 && message->nbytes == 8 && message->nblocks == 2);
    for (int i = 0; i < 2; i++) {
        CHECK(filled(smp_block_data(message->blocks[i]), BYTES, (uint64_t)i));
        smp_block_release(blocks[i]);
    }
    smp_message_free(message);
    drop_impostor(&im);
}

static void
send_frame(smp_frame frame, smp_status want)
{
    impostor     im = {0};
    smp_message *message;

    make_impostor(&im);
    CHECK(write(im.guest.socket, &frame, sizeof(frame)) == sizeof(frame));
    CHECK_STATUS(smp_comm_receive(im.comm, WORLD_DEADLINE_NS, &message), want);
    CHECK(smp_comm_lost(im.comm) == (want == SMP_ERR_CLOSED ? -1 : 1));
    drop_impostor(&im);
}

TEST(garbage_in_the_socket_is_malformed)
{
    send_frame((smp_frame){.kind = 77, .bytes = 1}, SMP_ERR_MALFORMED);
    send_frame((smp_frame){.kind = SMP_FRAME_BLOCK, .zero = 1, .bytes = 8},
               SMP_ERR_MALFORMED);
    send_frame((smp_frame){.kind = SMP_FRAME_GOODBYE, .bytes = 8}, SMP_ERR_MALFORMED);
}

TEST(a_block_larger_than_memory_is_no_memory)
{
    send_frame((smp_frame){.kind = SMP_FRAME_BLOCK, .bytes = UINT64_MAX / 2 + 1},
               SMP_ERR_NO_MEMORY);
}

TEST(a_goodbye_is_the_end)
{
    send_frame((smp_frame){.kind = SMP_FRAME_GOODBYE}, SMP_ERR_CLOSED);
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
    CHECK_OK(smp_segment_create(2, 1 << 20, &good));
    fd = memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(ftruncate(fd, (off_t)good->bytes) == 0);
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_GROW) == 0); /* it may still shrink */
    CHECK_STATUS(smp_segment_attach(fd, 2, 1 << 20, &segment), SMP_ERR_MALFORMED);
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    CHECK_STATUS(smp_segment_attach(fd, 3, 1 << 20, &segment), SMP_ERR_MALFORMED);
    CHECK_OK(smp_segment_attach(fd, 2, 1 << 20, &segment));
    smp_segment_unref(segment);
    smp_segment_unref(good);
    close(fd);
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

        CHECK_OK(smp_segment_create(ranks, 1 << 20, &s));
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
        status = create_comm(0, 2, &comm);
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
        meeter m[2];
        int    stranger;

        create_pair(m, &as_job, "job", 600000);
        stranger = call_door(shm_card_of(m[r].cards[r]));
        CHECK(stranger >= 0);
        CHECK(setrlimit(RLIMIT_NOFILE, &low) == 0);
        meet_main(&m[r]);
        CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
        CHECK_STATUS(m[r].status, SMP_ERR_SYSTEM);
        CHECK(m[r].failed == r);
        close(stranger);
        drop_pair(m);
    }
}

TEST(an_unknown_transport_is_invalid)
{
    smp_comm_config config = {.size = 2, .transports = "shm,pigeon", .job = "job"};
    smp_comm       *comm;

    CHECK_STATUS(smp_comm_create(&config, &comm), SMP_ERR_INVALID);
    config.transports = "^shm,^ucx,^tcp"; /* which leaves none */
    CHECK_STATUS(smp_comm_create(&config, &comm), SMP_ERR_INVALID);
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
}

/* Two ranks of this process, each made while its thread may run on one core alone. */
static void
connect_on(const char *transports, int cores[2], int spin_us, meeter m[2])
{
    cpu_set_t before;

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
        CHECK_OK(smp_comm_create(&config, &m[r].comm));
    }
    CHECK(sched_setaffinity(0, sizeof(before), &before) == 0);
    exchange_cards(m);
    meet_pair(m);
    CHECK_OK(m[0].status);
    CHECK_OK(m[1].status);
}

static void
spin_on(const char *transports, int cores[2], int spin_us, bool want)
{
    meeter m[2];

    connect_on(transports, cores, spin_us, m);
    for (int r = 0; r < 2; r++) {
        CHECK(smp_comm_spins(m[r].comm) == want);
        CHECK_STATUS(smp_comm_connect(m[r].comm, m[r].cards, m[r].bytes,
                                      PATIENCE_MS(100), &m[r].failed),
                     SMP_ERR_CLOSED); /* only once */
    }
    drop_pair(m);
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
    spin_on("shm", same, -1, false);
    spin_on("shm", same, 10, true); /* somebody says so */
    spin_on("tcp", same, -1, false);
    if (n == 2) {
        spin_on("shm", cores, -1, true);
        spin_on("tcp", cores, -1, false);
    }
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

        connect_on(lists[i][0], cores, 0, m);
        for (int r = 0; r < 2; r++) {
            CHECK_TEXT(smp_comm_transport(m[r].comm, 1 - r), lists[i][1]);
        }
        CHECK_OK(smp_comm_send(m[1].comm, 0, "x", 1, NULL, 0));
        smp_comm_destroy(m[1].comm);
        CHECK_OK(smp_comm_receive(m[0].comm, WORLD_DEADLINE_NS, &message));
        smp_message_free(message);
        CHECK_STATUS(smp_comm_receive(m[0].comm, WORLD_DEADLINE_NS, &message),
                     SMP_ERR_CLOSED);
        smp_comm_destroy(m[0].comm);
    }
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
    connect_on("shm", cores, 0, m);
    smp_comm_counters(m[0].comm, &stats);
    CHECK(stats.pool_made < expected && stats.pool_size == 4 << 20);
    smp_comm_expect(m[0].comm, expected);
    do {
        smp_comm_counters(m[0].comm, &stats);
        CHECK(smp_clock_ns() < deadline);
    } while (stats.pool_made < expected);
    CHECK(stats.pool_in_use == 0);
    drop_pair(m);
}

TEST(a_job_of_one_needs_no_connection)
{
    smp_message *message;
    smp_comm    *comm;
    const void  *card;
    size_t       bytes;
    int          failed;

    CHECK_OK(create_comm(0, 1, &comm));
    card = smp_comm_card(comm, &bytes);
    CHECK_OK(smp_comm_connect(comm, &card, &bytes, PATIENCE_MS(100), &failed));
    CHECK_STATUS(smp_comm_receive(comm, 1000, &message), SMP_ERR_TIMED_OUT);
    smp_comm_wake(comm);
    CHECK_STATUS(smp_comm_receive(comm, -1, &message), SMP_ERR_INTERRUPTED);
    smp_comm_destroy(comm);
}

RUN_WORLDS(.transports = "shm")
