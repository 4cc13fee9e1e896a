/* The watchdog reports a rank that does not move, and only then. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

#include "check.h"
#include "common/clock.h"
#include "server/watchdog.h"

#define LIMIT_NS (20 * SMP_NS_PER_MS)

/* Two pipelines of two. */
static const char *const names[] = {"rank 4 (pp_rank 0)", "rank 5 (pp_rank 1)",
                                    "rank 6 (pp_rank 0)", "rank 7 (pp_rank 1)"};

/* The clock, for the core as well: 0, or what it shows until the test moves it.  Its
 * times have long passed by the machine's clock, so the watchdog does not sleep. */
static _Atomic int64_t shown_ns;
static pthread_t       mover;
static _Atomic int     asked; /* by another thread than the one that moves it */

int64_t __real_smp_clock_ns(void);
int64_t __wrap_smp_clock_ns(void);

int64_t
__wrap_smp_clock_ns(void)
{
    if (atomic_load(&shown_ns) == 0) {
        return __real_smp_clock_ns();
    }
    if (!pthread_equal(pthread_self(), mover)) {
        atomic_fetch_add(&asked, 1);
    }
    return atomic_load(&shown_ns);
}

/* Moves it, and returns when the watchdog has looked.  It asks for the time twice a
 * look, so that of five times four are within two whole looks. */
static void
move_clock(int64_t to_ns)
{
    int before;

    atomic_store(&shown_ns, to_ns);
    before = atomic_load(&asked);
    while (atomic_load(&asked) < before + 5) {
        sched_yield(); /* the runner's alarm is the deadline */
    }
}

typedef struct {
    _Atomic int  reports;
    _Atomic int  ends;
    smp_standing first; /* written before reports */
} listener;

static void
take_report(void *ctx, const smp_standing *standing, bool ends)
{
    listener *self = ctx;

    if (atomic_load(&self->reports) == 0) {
        self->first = *standing;
    }
    if (ends) {
        atomic_fetch_add(&self->ends, 1);
    }
    atomic_fetch_add(&self->reports, 1);
}

static void
wait_for_reports(listener *l, int n)
{
    while (atomic_load(&l->reports) < n) {
        sched_yield(); /* the runner's alarm is the deadline */
    }
}

TEST(a_rank_that_does_not_move_is_reported_with_what_it_waits_for)
{
    static const char *const paths[] = {"encoder", "decoder.0"};
    listener                 l = {0};
    smp_watchdog_config      config = {
             .report_ns = LIMIT_NS, .report = take_report, .ctx = &l};
    smp_watchdog *watchdog;
    smp_board    *board;
    char          said[1024];

    CHECK_STATUS(smp_board_create(0, 2, "tp_rank", names, &board), SMP_OK);
    CHECK_STATUS(smp_board_name(board, paths, 2), SMP_OK);
    smp_board_begin(board, 7);
    smp_board_work(board, (smp_work){.microbatch = 3, .entry = -1});
    smp_board_wait(board, 0,
                   (smp_wait){.work = {.microbatch = 3, .entry = -1},
                              .kind = SMP_WAIT_OUTPUTS,
                              .wanted = 1,
                              .asked = 1});
    smp_board_work(board,
                   (smp_work){.microbatch = 2, .entry = 0, .phase = SMP_BACKWARD});
    CHECK_STATUS(smp_watchdog_create(board, &config, &watchdog), SMP_OK);
    wait_for_reports(&l, 2);
    smp_watchdog_destroy(watchdog);
    CHECK(l.first.step == 7 && l.first.nwaits == 1);
    CHECK(l.first.now_ns - l.first.moved_ns >= LIMIT_NS);
    CHECK(atomic_load(&l.ends) == 0);
    l.first.waits[0].since_ns = l.first.now_ns - 7 * SMP_NS_PER_S;
    (void)smp_board_write(board, 0, &l.first, said, sizeof(said));
    CHECK(strstr(said, "microbatch 2, backward: module 'encoder' runs, since ") !=
          NULL);
    CHECK(strstr(said, "microbatch 3, forward: the step function waits for module "
                       "'decoder.0' on rank 5 (pp_rank 1), since 7.0 s") != NULL);
    CHECK(strstr(said, "  rank 4 (pp_rank 0): microbatch 2") == said);
    (void)smp_board_write(board, 2, &l.first, said, sizeof(said));
    CHECK(strstr(said, "  rank 6 (pp_rank 0): microbatch 3, forward: the step function "
                       "waits for module 'decoder.0' on rank 7 (pp_rank 1), ") != NULL);
    smp_board_write_wait(board, 1, said, sizeof(said));
    CHECK(strstr(said, "microbatch 3, forward: the step function waits") == said);
    smp_board_destroy(board);
    return 0;
}

TEST(a_rank_that_moves_or_is_in_no_step_is_not_reported)
{
    listener            l = {0};
    smp_watchdog_config config = {
        .report_ns = SMP_NS_PER_S, .report = take_report, .ctx = &l};
    smp_watchdog *watchdog;
    smp_board    *board;
    int64_t       until = smp_clock_ns() + 3 * SMP_NS_PER_S / 2;

    CHECK_STATUS(smp_board_create(0, 2, "tp_rank", names, &board), SMP_OK);
    CHECK_STATUS(smp_watchdog_create(board, &config, &watchdog), SMP_OK);
    smp_board_begin(board, 1);
    while (smp_clock_ns() < until) {
        smp_board_work(board, (smp_work){.entry = -1});
        smp_board_wait(board, 300, (smp_wait){.kind = SMP_WAIT_SCHEDULE});
        smp_board_go(board, 300); /* a worker without a seat on the board */
        sched_yield();
    }
    smp_board_end(board);
    smp_watchdog_destroy(watchdog);
    CHECK(atomic_load(&l.reports) == 0);
    smp_board_destroy(board);
    return 0;
}

TEST(after_a_step_nothing_runs)
{
    static const char *const paths[] = {"encoder"};
    smp_standing             standing;
    smp_board               *board;
    char                     said[256];
    int64_t                  moved_ns;

    CHECK_STATUS(smp_board_create(0, 2, "tp_rank", names, &board), SMP_OK);
    CHECK_STATUS(smp_board_name(board, paths, 1), SMP_OK);
    smp_board_begin(board, 1);
    smp_board_work(board, (smp_work){.microbatch = 3});
    smp_board_end(board);
    smp_board_read(board, &standing);
    CHECK(smp_board_write(board, 0, &standing, said, sizeof(said)) == 0);
    smp_board_place(board, "waits in smp.barrier()");
    smp_board_read(board, &standing);
    (void)smp_board_write(board, 0, &standing, said, sizeof(said));
    CHECK(strstr(said, " waits in smp.barrier(), since ") != NULL);
    CHECK(smp_board_write(board, 1, &standing, said, sizeof(said)) ==
          0); /* not there */
    smp_board_begin(board, 2);
    smp_board_read(board, &standing);
    (void)smp_board_write(board, 0, &standing, said, sizeof(said));
    CHECK(strstr(said, " has nothing to run, since ") != NULL);
    moved_ns = standing.moved_ns;
    smp_board_idle(board); /* that it still has nothing is no move */
    smp_board_read(board, &standing);
    CHECK(standing.moved_ns == moved_ns);
    smp_board_work(board, (smp_work){.microbatch = 3});
    smp_board_read(board, &standing);
    moved_ns = standing.moved_ns;
    smp_board_idle(board);
    smp_board_read(board, &standing);
    CHECK(standing.moved_ns > moved_ns && !standing.works);
    CHECK(smp_board_write_others(board, said, sizeof(said)) == 0);
    smp_board_hear(board, "  rank 1 is elsewhere\n");
    (void)smp_board_write_others(board, said, sizeof(said));
    CHECK(strcmp(said, "  rank 1 is elsewhere\n") == 0);
    smp_board_destroy(board);
    return 0;
}

TEST(the_end_comes_at_its_limit)
{
    listener            l = {0};
    smp_watchdog_config config = {.end_ns = LIMIT_NS, .report = take_report, .ctx = &l};
    smp_watchdog       *watchdog;
    smp_board          *board;

    CHECK_STATUS(smp_board_create(0, 2, "tp_rank", names, &board), SMP_OK);
    smp_board_place(board, "waits in smp.barrier()");
    CHECK_STATUS(smp_watchdog_create(board, &config, &watchdog), SMP_OK);
    wait_for_reports(&l, 1);
    smp_watchdog_destroy(watchdog);
    CHECK(atomic_load(&l.ends) >= 1);
    smp_board_destroy(board);
    return 0;
}

TEST(reports_come_after_twice_the_time_each_until_the_rank_moves)
{
    const int64_t       limit = 10 * SMP_NS_PER_S;
    listener            l = {0};
    smp_watchdog_config config = {
        .report_ns = limit, .end_ns = 9 * limit, .report = take_report, .ctx = &l};
    smp_watchdog *watchdog;
    smp_board    *board;
    int64_t       moved_ns = 1;
    int           reports = 0;

    mover = pthread_self();
    atomic_store(&shown_ns, moved_ns);
    CHECK_STATUS(smp_board_create(0, 2, "tp_rank", names, &board), SMP_OK);
    CHECK_STATUS(smp_watchdog_create(board, &config, &watchdog), SMP_OK);
    smp_board_begin(board, 1);
    smp_board_end(board);
    smp_board_place(board, "waits in smp.barrier()");
    smp_board_place(board, NULL);
    move_clock(moved_ns + 20 * limit); /* in no step and no call, as long as it likes */
    CHECK(atomic_load(&l.reports) == 0);
    for (int times = 0; times < 3; times++) {
        moved_ns = atomic_load(&shown_ns);
        if (times == 0) {
            smp_board_begin(board, 2);
        } else {
            smp_board_work(board, (smp_work){.entry = -1});
        }
        for (int64_t after = limit; after <= 8 * limit; after *= 2) {
            move_clock(moved_ns + after - 1);
            CHECK(atomic_load(&l.reports) == reports);
            move_clock(moved_ns + after);
            CHECK(atomic_load(&l.reports) == ++reports);
        }
        CHECK(atomic_load(&l.ends) == 0);
    }
    move_clock(moved_ns + 9 * limit - 1);
    CHECK(atomic_load(&l.reports) == reports);
    move_clock(moved_ns + 9 * limit);
    CHECK(atomic_load(&l.ends) > 0);
    smp_watchdog_destroy(watchdog);
    smp_board_destroy(board);
    atomic_store(&shown_ns, 0);
    return 0;
}

TEST(the_board_shows_those_that_wait_longest)
{
    smp_standing now;
    smp_board   *board;

    CHECK_STATUS(smp_board_create(0, 2, "tp_rank", names, &board), SMP_OK);
    smp_board_begin(board, 1);
    for (uint16_t i = 0; i < 40; i++) {
        smp_board_wait(board, (uint16_t)(39 - i),
                       (smp_wait){.work = {.microbatch = i, .entry = -1}});
    }
    smp_board_work(board, (smp_work){.microbatch = 50, .entry = 7});
    smp_board_go(board, 39); /* microbatch 0 */
    smp_board_read(board, &now);
    CHECK(now.nwaits == 39 && now.nshown == SMP_STANDING_WAITS);
    for (int32_t i = 0; i < now.nshown; i++) {
        CHECK(i == 0 || now.waits[i - 1].since_ns <= now.waits[i].since_ns);
        CHECK(now.waits[i].work.microbatch <= SMP_STANDING_WAITS + 4);
    }
    CHECK(now.works == 1 && now.work.microbatch == 0 && now.work.entry == -1);
    smp_board_destroy(board);
    return 0;
}

TEST(each_kind_of_wait_is_said_with_who_and_what)
{
    static const char *const paths[] = {"encoder", "decoder.0"};
    static const struct {
        smp_wait    wait;
        int         rank;
        const char *said;
    } cases[] = {
        {{.work = {3, -1, SMP_FORWARD}, .kind = SMP_WAIT_NOTHING},
         0,
         "microbatch 3, forward: the step function has come to its end"},
        {{.work = {1, 0, SMP_FORWARD},
          .kind = SMP_WAIT_OUTPUTS,
          .wanted = 1,
          .asked = 1},
         0,
         "microbatch 1, forward: module 'encoder' waits for module 'decoder.0' on rank "
         "5 (pp_rank 1)"},
        {{.work = {1, 1, SMP_BACKWARD},
          .kind = SMP_WAIT_GRADIENTS,
          .wanted = 0,
          .asked = 0},
         3,
         "microbatch 1, backward: module 'decoder.0' waits for the backward of module "
         "'encoder' on rank 6 (pp_rank 0)"},
        {{.work = {0, 7, SMP_FORWARD},
          .kind = SMP_WAIT_OUTPUTS,
          .wanted = -1,
          .asked = 2},
         2,
         "microbatch 0, forward: module '?' waits for module '?' on ?"},
        {{.work = {2, -1, SMP_FORWARD}, .kind = SMP_WAIT_SCHEDULE},
         0,
         "microbatch 2, forward: the step function waits for its turn to begin "
         "backward"},
        {{.work = {2, 1, SMP_FORWARD}, .kind = SMP_WAIT_GATE},
         0,
         "microbatch 2, forward: module 'decoder.0' waits for earlier microbatches to "
         "pass this module, which changes its buffers or "
         "attributes"},
        {{.work = {2, 1, SMP_FORWARD},
          .kind = SMP_WAIT_ISSUE,
          .key = {.path = "split", .microbatch = 1, .time = 2, .number = 4}},
         2,
         "microbatch 2, forward: module 'decoder.0' waits for tp_rank 0 to call module "
         "'split' (microbatch 1, forward, call 2, collective 4)"},
        {{.work = {2, 1, SMP_FORWARD},
          .kind = SMP_WAIT_COLLECTIVE,
          .key = {.path = "split", .phase = SMP_BACKWARD}},
         2,
         "microbatch 2, forward: module 'decoder.0' waits for the other tp_ranks in "
         "module 'split' (microbatch 0, backward, call 0, collective 0)"},
    };
    smp_board *board;
    char       said[512];

    CHECK_STATUS(smp_board_create(0, 2, "tp_rank", names, &board), SMP_OK);
    CHECK_STATUS(smp_board_name(board, paths, 2), SMP_OK);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        smp_board_write_one(board, cases[i].rank, &cases[i].wait, said, sizeof(said));
        CHECK(strcmp(said, cases[i].said) == 0);
        smp_board_write_one(board, cases[i].rank, &cases[i].wait, said, 20);
        CHECK(strlen(said) == 19 && strncmp(said, cases[i].said, 19) == 0);
    }
    smp_board_destroy(board);
    return 0;
}

TEST(waits_that_are_not_shown_are_counted)
{
    smp_standing now;
    smp_board   *board;
    char         said[8192];

    CHECK_STATUS(smp_board_create(1, 2, "tp_rank", names, &board), SMP_OK);
    smp_board_begin(board, 1);
    for (uint16_t i = 0; i < SMP_STANDING_WAITS + 3; i++) {
        smp_board_read(board, &now);
        (void)smp_board_write(board, 1, &now, said, sizeof(said));
        CHECK((strstr(said, "more wait") != NULL) == (i > SMP_STANDING_WAITS));
        smp_board_wait(board, i, (smp_wait){.work = {.microbatch = i, .entry = -1}});
    }
    smp_board_read(board, &now);
    (void)smp_board_write(board, 1, &now, said, sizeof(said));
    CHECK(strstr(said, "  rank 5 (pp_rank 1): 3 more wait\n") != NULL);
    CHECK(smp_board_write(board, 1, &now, said, 30) == 29 && strlen(said) == 29);
    smp_board_destroy(board);
    return 0;
}

/* For which rank a task waits: one of its pipeline that has its module, or all of its
 * stage. */
TEST(of_a_rank_that_is_lost_the_task_that_waits_for_it_is_shown)
{
    smp_board *board;
    char       said[512];

    CHECK_STATUS(smp_board_create(2, 2, "tp_rank", names, &board), SMP_OK);
    smp_board_write_wait(board, 3, said, sizeof(said));
    CHECK(said[0] == '\0');
    smp_board_begin(board, 1);
    smp_board_wait(board, 0,
                   (smp_wait){.work = {0, -1, SMP_FORWARD}, .kind = SMP_WAIT_SCHEDULE});
    smp_board_wait(board, 1,
                   (smp_wait){.work = {1, -1, SMP_BACKWARD},
                              .kind = SMP_WAIT_GRADIENTS,
                              .asked = 1});
    smp_board_wait(
        board, 2,
        (smp_wait){.work = {2, -1, SMP_FORWARD}, .kind = SMP_WAIT_COLLECTIVE});
    smp_board_write_wait(board, 3, said, sizeof(said));
    CHECK(strstr(said, "microbatch 1, backward") == said);
    smp_board_write_wait(board, 0, said, sizeof(said));
    CHECK(strstr(said, "microbatch 2, forward") == said);
    smp_board_write_wait(board, 1, said, sizeof(said)); /* nobody waits for that one */
    CHECK(strstr(said, "microbatch 0, forward") == said);
    smp_board_destroy(board);

    CHECK_STATUS(smp_board_create(1, 2, "tp_rank", names, &board), SMP_OK);
    smp_board_begin(board, 1);
    smp_board_wait(board, 0,
                   (smp_wait){.work = {0, 1, SMP_FORWARD}, .kind = SMP_WAIT_GATE});
    smp_board_wait(board, 1,
                   (smp_wait){.work = {1, 1, SMP_FORWARD}, .kind = SMP_WAIT_OUTPUTS});
    smp_board_write_wait(board, 0, said, sizeof(said)); /* its pp_rank 0 */
    CHECK(strstr(said, "microbatch 1, forward") == said);
    smp_board_write_wait(board, 3, said, sizeof(said)); /* nobody waits for that one */
    CHECK(strstr(said, "microbatch 0, forward") == said);
    smp_board_destroy(board);
    return 0;
}

int
main(int argc, char **argv)
{
    static const smp_test tests[] = {
        {"report", a_rank_that_does_not_move_is_reported_with_what_it_waits_for},
        {"moving", a_rank_that_moves_or_is_in_no_step_is_not_reported},
        {"after", after_a_step_nothing_runs},
        {"end", the_end_comes_at_its_limit},
        {"longest", the_board_shows_those_that_wait_longest},
        {"kinds", each_kind_of_wait_is_said_with_who_and_what},
        {"counted", waits_that_are_not_shown_are_counted},
        {"lost", of_a_rank_that_is_lost_the_task_that_waits_for_it_is_shown},
        {"twice", reports_come_after_twice_the_time_each_until_the_rank_moves},
    };

    alarm(240);
    return run_tests(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
