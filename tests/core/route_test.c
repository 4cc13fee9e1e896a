/* Rounds between hosts overlap, and every part of them is done once.
 * Spec: csrc/comm/collective/inter_host/route.h. */
#include "comm/collective/inter_host/route.h"

#include <string.h>

#include "check.h"

enum { ROUNDS = 7, PER_ROUND = 4096, BYTES = 8 * PER_ROUND * 4 };

/* How often each kind of stage of a member is planned, by round; *ahead: sends before
 * the first thing that is awaited. */
static void
count_stages(smp_operation operation, int counts[SMP_STAGE_RECEIVE + 1][ROUNDS],
             int *ahead)
{
    static float data[2 * ROUNDS * PER_ROUND];
    const int    lowest[] = {0, 1};
    smp_call     call = {.operation = operation,
                         .dtype = SMP_F32,
                         .count = (size_t)ROUNDS * PER_ROUND,
                         .in = data,
                         .out = data};
    smp_hosts    hosts;
    smp_route    route;
    bool         waits = false;

    CHECK_OK(smp_hosts_init(&hosts, lowest, 2));
    CHECK_OK(smp_route_init(&route, &hosts, 0, BYTES));
    *ahead = 0;
    for (size_t tick = 0; tick < smp_route_ticks(&route, &call); tick++) {
        int phase = 0;

        CHECK_OK(smp_route_plan(&route, &call, tick, NULL));
        for (size_t i = 0; i < route.nstages; i++) {
            const smp_stage *stage = &route.stages[i];
            int              round = (int)tick - stage->phase * SMP_ROUTE_AHEAD;

            CHECK(stage->phase >= phase && round >= 0 && round < ROUNDS);
            phase = stage->phase;
            counts[stage->kind][round]++;
            waits = waits || stage->kind == SMP_STAGE_RECEIVE ||
                    stage->kind == SMP_STAGE_RECEIVE_TERMS;
            *ahead += !waits && (stage->kind == SMP_STAGE_SEND ||
                                 stage->kind == SMP_STAGE_SEND_TERMS);
        }
    }
    smp_route_fini(&route);
    smp_hosts_fini(&hosts);
}

TEST(an_all_reduce_sends_rounds_ahead)
{
    int counts[SMP_STAGE_RECEIVE + 1][ROUNDS] = {0};
    int ahead;

    count_stages(SMP_ALL_REDUCE, counts, &ahead);
    for (int round = 0; round < ROUNDS; round++) {
        CHECK(counts[SMP_STAGE_SEND_TERMS][round] == 1);
        CHECK(counts[SMP_STAGE_RECEIVE_TERMS][round] == 1);
        CHECK(counts[SMP_STAGE_MERGE][round] == 1);
        CHECK(counts[SMP_STAGE_SEND][round] == 1);
        CHECK(counts[SMP_STAGE_RECEIVE][round] == 1);
    }
    CHECK(ahead == SMP_ROUTE_SLOTS);
    CHECK(SMP_ROUTE_SLOTS > 1);
}

TEST(an_all_gather_sends_rounds_ahead)
{
    int counts[SMP_STAGE_RECEIVE + 1][ROUNDS] = {0};
    int ahead;

    count_stages(SMP_ALL_GATHER, counts, &ahead);
    for (int round = 0; round < ROUNDS; round++) {
        CHECK(counts[SMP_STAGE_SEND][round] == 1);
        CHECK(counts[SMP_STAGE_RECEIVE][round] == 1);
        CHECK(counts[SMP_STAGE_SHARE][round] == 1);
    }
    CHECK(ahead == SMP_ROUTE_SLOTS);
}

RUN_TESTS
