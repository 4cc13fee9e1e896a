/* Spec: csrc/comm/memory/arena.h. */
#define _GNU_SOURCE
#include "comm/memory/arena.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define ARENA ((size_t)4 << 20)

typedef struct {
    smp_segment *segment;
    smp_arena   *arena;
} fixture;

static fixture
make_arena(size_t bytes)
{
    fixture f;

    if (smp_segment_create(2, bytes, &f.segment) != SMP_OK ||
        smp_arena_create(f.segment, &f.arena) != SMP_OK) {
        abort();
    }
    return f;
}

static void
drop_arena(fixture f)
{
    smp_arena_destroy(f.arena);
    smp_segment_unref(f.segment);
}

static void
give_back(fixture f, uint32_t slot)
{
    atomic_store_explicit(&f.segment->states[slot], SMP_SLOT_FREE,
                          memory_order_release);
}

static uint64_t
in_use(fixture f)
{
    smp_arena_use use;

    smp_arena_measure(f.arena, &use);
    return use.in_use;
}

typedef struct {
    uint32_t slot;
    uint64_t offset;
    size_t   bytes;
} held;

TEST(blocks_never_overlap_and_all_come_back)
{
    enum { HELD = 600, ROUNDS = 100000 };
    fixture  f = make_arena(ARENA);
    held     list[HELD] = {{0}};
    unsigned seed = 11;
    int      refused = 0;
    uint32_t slot;
    uint64_t offset;

    for (int i = 0; i < ROUNDS; i++) {
        held *h = &list[rand_r(&seed) % HELD];

        if (h->bytes != 0) {
            const uint8_t *data = f.segment->arena + h->offset;

            /* First and last byte tell of any block laid over this one. */
            CHECK(data[0] == (uint8_t)h->slot &&
                  data[h->bytes - 1] == (uint8_t)h->slot);
            give_back(f, h->slot);
            h->bytes = 0;
        } else {
            size_t bytes =
                1 + (size_t)rand_r(&seed) % ((size_t)1 << rand_r(&seed) % 19);

            if (!smp_arena_take(f.arena, bytes, &h->slot, &h->offset)) {
                refused++;
                continue;
            }
            h->bytes = bytes;
            CHECK(h->offset % 64 == 0 && h->offset + bytes <= ARENA);
            f.segment->arena[h->offset] = (uint8_t)h->slot;
            f.segment->arena[h->offset + bytes - 1] = (uint8_t)h->slot;
        }
    }
    CHECK(refused > 0);
    CHECK(in_use(f) > 0);
    for (int i = 0; i < HELD; i++) {
        if (list[i].bytes != 0) {
            give_back(f, list[i].slot);
        }
    }
    CHECK(in_use(f) == 0);
    CHECK(smp_arena_take(f.arena, ARENA, &slot, &offset)); /* all holes were joined */
    CHECK(!smp_arena_take(f.arena, 1, &slot, &offset));
    drop_arena(f);
}

TEST(a_released_block_is_used_again_at_once)
{
    fixture  f = make_arena(ARENA);
    uint32_t slot;
    uint64_t first;
    uint64_t offset;

    CHECK(smp_arena_take(f.arena, 100000, &slot, &first));
    for (int i = 0; i < 100; i++) {
        give_back(f, slot);
        CHECK(smp_arena_take(f.arena, 100000, &slot, &offset));
        CHECK(offset == first);
    }
    drop_arena(f);
}

TEST(too_much_is_refused)
{
    fixture  f = make_arena(ARENA);
    uint32_t slot;
    uint64_t offset;

    CHECK(!smp_arena_take(f.arena, ARENA + 1, &slot, &offset));
    CHECK(!smp_arena_take(f.arena, SIZE_MAX, &slot, &offset));
    CHECK(in_use(f) == 0);
    drop_arena(f);
}

TEST(an_arena_out_of_slots_is_full_and_recovers)
{
    fixture  f = make_arena(ARENA);
    uint32_t slots[5000];
    uint64_t offset;
    int      n = 0;

    while (n < 5000 && smp_arena_take(f.arena, 64, &slots[n], &offset)) {
        n++;
    }
    CHECK(n > 100 && n < 5000);
    for (int i = 0; i < n; i++) {
        give_back(f, slots[i]);
    }
    CHECK(in_use(f) == 0);
    CHECK(smp_arena_take(f.arena, ARENA, &slots[0], &offset));
    drop_arena(f);
}

enum { SHARED = 20000, THREADS = 3 };

/* Takes, writes, and gives back; the arena must never hand out the bytes meanwhile. */
static void *
take_and_give(void *arg)
{
    fixture *f = arg;

    for (int i = 0; i < SHARED; i++) {
        uint32_t slot;
        uint64_t offset;
        size_t   bytes = 64 + (size_t)(i * 37 % 30000);

        if (smp_arena_take(f->arena, bytes, &slot, &offset)) {
            uint8_t *data = f->segment->arena + offset;

            data[0] = 1;
            data[bytes - 1] = 2;
            if (data[0] != 1) {
                return "overwritten";
            }
            give_back(*f, slot);
        }
    }
    return NULL;
}

TEST(threads_may_take_and_give_back_at_once)
{
    fixture   f = make_arena(ARENA);
    pthread_t threads[THREADS];
    void     *wrong;

    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, take_and_give, &f) == 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], &wrong);
        CHECK(wrong == NULL);
    }
    CHECK(in_use(f) == 0);
    drop_arena(f);
}

TEST(pages_are_made_ahead_of_use_and_no_further)
{
    fixture  f = make_arena((size_t)64 << 20);
    uint32_t slot;
    uint64_t offset;
    int      before = 0;
    int      after = 0;

    while (smp_arena_wants_pages(f.arena)) {
        smp_arena_make_pages(f.arena);
        before++;
    }
    CHECK(before > 0 && before < 32); /* not all 64 MiB */
    CHECK(smp_arena_take(f.arena, (size_t)40 << 20, &slot, &offset));
    while (smp_arena_wants_pages(f.arena)) {
        smp_arena_make_pages(f.arena);
        after++;
    }
    CHECK(after > 0 && before + after <= 32);
    drop_arena(f);
}

TEST(pages_that_are_expected_are_made_and_measured)
{
    const uint64_t expected = (uint64_t)20 << 20;
    fixture        f = make_arena((size_t)64 << 20);
    smp_arena_use  use;
    uint32_t       slots[2];
    uint64_t       offset;

    for (int i = 0; i < 2; i++) {
        CHECK(smp_arena_take(f.arena, 3000, &slots[i], &offset));
    }
    for (int i = 0; i < 2; i++) {
        give_back(f, slots[i]);
    }
    CHECK(in_use(f) == 0);
    CHECK(smp_arena_take(f.arena, 100, &slots[0], &offset));
    smp_arena_measure(f.arena, &use);
    CHECK(use.in_use == 128 && use.high == 2 * 3008); /* in units of 64 */
    CHECK(use.made >= 2 * 3008);
    give_back(f, slots[0]);

    smp_arena_expect(f.arena, expected);
    while (smp_arena_wants_pages(f.arena)) {
        smp_arena_make_pages(f.arena);
    }
    smp_arena_measure(f.arena, &use);
    CHECK(use.made >= expected && use.made < expected + ((uint64_t)4 << 20));
    CHECK(use.size == (size_t)64 << 20);
    smp_arena_expect(f.arena, UINT64_MAX); /* no more than there is */
    while (smp_arena_wants_pages(f.arena)) {
        smp_arena_make_pages(f.arena);
    }
    smp_arena_measure(f.arena, &use);
    CHECK(use.made == use.size && use.in_use == 0);
    drop_arena(f);
}

/* How a member ends its use of a block that its owner has given back. */
typedef enum { GOES_ON, POSTS, GIVES_UP, LEAVES, MEETS_ANEW, DIES, ENDS } its_end;

static void
keep_for(its_end end)
{
    enum { LAST = 7 };
    fixture            f = make_arena(ARENA);
    fixture            other = make_arena(ARENA);
    smp_user          *users = calloc(2, sizeof(*users));
    pid_t              child = fork();
    uint32_t           first;
    uint32_t           slot;
    uint64_t           offset;
    smp_control_block *control = smp_control_block_take(other.segment->controls);

    if (child == 0) {
        pause();
        _exit(0);
    }
    CHECK(users != NULL && child > 0);
    atomic_store(&control->id, 1);
    atomic_store(&control->nonce, 5);
    atomic_store(&control->slots[(LAST - 1) & 1].notice.step, LAST - 1);
    smp_segment_ref(other.segment);
    users[1] = (smp_user){other.segment, control, 5, child};
    CHECK(smp_arena_take(f.arena, 1000, &first, &offset));
    smp_arena_keep(f.arena, offset, 1000, users, 2, LAST);
    CHECK(smp_arena_take(f.arena, 1000, &slot, &offset)); /* is not meant */
    give_back(f, slot);
    CHECK(in_use(f) > 0 && in_use(f) < 2000);
    give_back(f, first);
    CHECK(in_use(f) > 0);
    CHECK(!smp_arena_take(f.arena, ARENA, &slot, &offset));
    if (end == POSTS) {
        atomic_store(&control->slots[LAST & 1].notice.step, LAST);
    } else if (end == GIVES_UP) {
        atomic_store(&control->failed, SMP_ERR_TIMED_OUT);
    } else if (end == LEAVES) {
        smp_control_block_give_back(control);
    } else if (end == MEETS_ANEW) {
        atomic_store(&control->nonce, 6);
    }
    if (end == DIES) {
        kill(child, SIGKILL);
        CHECK(waitpid(child, NULL, 0) == child);
    }
    CHECK((in_use(f) == 0) == (end != GOES_ON));
    if (end != DIES) {
        kill(child, SIGKILL);
        CHECK(waitpid(child, NULL, 0) == child);
    }
    CHECK(smp_arena_take(f.arena, ARENA, &slot, &offset));
    drop_arena(f);
    drop_arena(other);
}

TEST(a_block_into_which_somebody_writes_is_not_used_again)
{
    for (its_end end = 0; end < ENDS; end++) {
        keep_for(end);
    }
}

RUN_TESTS
