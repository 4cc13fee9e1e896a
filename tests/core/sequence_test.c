/* One order on all ranks of a pp_rank: a leader and a follower by hand, then several
 * followers to which all comes at random. */
#include "check.h"
#include "server/sequence.h"

#include <stdlib.h>

static smp_ready
ready_of(smp_ready_kind kind, smp_phase phase, int32_t microbatch, uint64_t call)
{
    return (smp_ready){
        .kind = kind, .phase = phase, .microbatch = microbatch, .call = call};
}

static smp_wait
rest_of(int32_t kind, int32_t wanted, int32_t microbatch)
{
    return (smp_wait){
        .kind = kind, .wanted = wanted, .work = {.microbatch = microbatch}};
}

typedef struct {
    smp_sequence *leader;
    smp_sequence *follower;
} pair;

static void
begin(pair *p)
{
    CHECK_OK(smp_sequence_create(true, &p->leader));
    CHECK_OK(smp_sequence_create(false, &p->follower));
    smp_sequence_begin(p->leader);
    smp_sequence_begin(p->follower);
}

static void
end(pair *p)
{
    smp_sequence_destroy(p->leader);
    smp_sequence_destroy(p->follower);
}

/* What the leader has to tell goes to the follower.  Whether there was something. */
static bool
carry(pair *p)
{
    smp_sequence_word word;

    return smp_sequence_tell(p->leader, &word) &&
           smp_sequence_hear(p->follower, &word) == SMP_OK;
}

/* The leader runs it, and tells. */
static bool
lead(pair *p, smp_ready next)
{
    smp_sequence_run(p->leader, &next);
    return carry(p);
}

TEST(a_follower_runs_what_the_leader_ran_when_it_is_ready)
{
    const smp_ready one = ready_of(SMP_READY_REQUEST, SMP_FORWARD, 0, 7);
    const smp_ready two = ready_of(SMP_READY_REQUEST, SMP_FORWARD, 1, 8);
    const smp_ready here[] = {one, two};
    pair            p;

    begin(&p);
    CHECK(smp_sequence_leads(p.leader) && !smp_sequence_leads(p.follower));
    CHECK(smp_sequence_find(p.follower, here, 2) == -1); /* nothing is known */
    CHECK(lead(&p, two));
    CHECK(lead(&p, one));
    CHECK(smp_sequence_find(p.follower, here, 1) == -1); /* two is not here yet */
    CHECK(smp_sequence_find(p.follower, here, 2) == 1);
    smp_sequence_run(p.follower, &two);
    CHECK(smp_sequence_find(p.follower, here, 2) == 0);
    smp_sequence_run(p.follower, &one);
    CHECK(smp_sequence_find(p.follower, here, 2) == -1); /* no more is known */
    end(&p);
}

TEST(what_differs_in_anything_is_another_run)
{
    const smp_ready what = ready_of(SMP_READY_RESPONSE, SMP_BACKWARD, 2, 9);
    const smp_ready others[] = {
        ready_of(SMP_READY_REQUEST, SMP_BACKWARD, 2, 9),
        ready_of(SMP_READY_RESPONSE, SMP_FORWARD, 2, 9),
        ready_of(SMP_READY_RESPONSE, SMP_BACKWARD, 1, 9),
        ready_of(SMP_READY_RESPONSE, SMP_BACKWARD, 2, 8),
    };
    pair p;

    begin(&p);
    CHECK(lead(&p, what));
    CHECK(smp_sequence_find(p.follower, others, 4) == -1);
    end(&p);
}

TEST(of_two_that_are_alike_the_first_that_arrived_is_next)
{
    smp_ready here[3] = {ready_of(SMP_READY_REQUEST, SMP_FORWARD, 1, 7),
                         ready_of(SMP_READY_REQUEST, SMP_FORWARD, 0, 7),
                         ready_of(SMP_READY_REQUEST, SMP_FORWARD, 0, 7)};
    pair      p;

    here[0].arrival = 1;
    here[1].arrival = 5;
    here[2].arrival = 3;
    begin(&p);
    CHECK(lead(&p, ready_of(SMP_READY_REQUEST, SMP_FORWARD, 0, 7)));
    CHECK(smp_sequence_find(p.follower, here, 3) == 2);
    end(&p);
}

/* Both run the same, and come to rest so; the leader tells before, or after. */
static bool
rest_both(smp_wait leader, smp_wait own, bool is_told_first)
{
    const smp_ready  what = ready_of(SMP_READY_REQUEST, SMP_FORWARD, 0, 7);
    smp_sequence_gap gap;
    bool             differs;
    pair             p;

    begin(&p);
    CHECK(lead(&p, what));
    smp_sequence_run(p.follower, &what);
    if (!is_told_first) {
        smp_sequence_rest(p.follower, &own);
        CHECK(!smp_sequence_differs(p.follower, &gap)); /* as far as known */
    }
    smp_sequence_rest(p.leader, &leader);
    CHECK(carry(&p));
    if (is_told_first) {
        CHECK(!smp_sequence_differs(p.follower, &gap));
        smp_sequence_rest(p.follower, &own);
    }
    differs = smp_sequence_differs(p.follower, &gap);
    CHECK(!differs ||
          (gap.leader.kind == leader.kind && gap.own.kind == own.kind &&
           gap.leader.wanted == leader.wanted && gap.own.wanted == own.wanted));
    smp_sequence_begin(p.follower); /* the next step knows nothing of it */
    CHECK(!smp_sequence_differs(p.follower, &gap));
    CHECK(smp_sequence_find(p.follower, &what, 1) == -1);
    end(&p);
    return differs;
}

TEST(runs_that_come_to_rest_otherwise_differ)
{
    smp_wait key = rest_of(SMP_WAIT_COLLECTIVE, 0, 0);
    smp_wait other_key = key;
    smp_wait other_entry = rest_of(SMP_WAIT_OUTPUTS, 3, 0);
    smp_wait other_phase = other_entry;

    key.key = smp_key_of("a");
    other_key.key = smp_key_of("b");
    other_entry.work.entry++;
    other_phase.work.phase = SMP_BACKWARD;
    for (int first = 0; first < 2; first++) {
        const smp_wait outputs = rest_of(SMP_WAIT_OUTPUTS, 3, 0);
        const smp_wait others[] = {
            other_entry, other_phase, rest_of(SMP_WAIT_OUTPUTS, 4, 0),
            rest_of(SMP_WAIT_OUTPUTS, 3, 1), rest_of(SMP_WAIT_NOTHING, 3, 0)};

        CHECK(!rest_both(outputs, outputs, first != 0));
        CHECK(!rest_both(key, key, first != 0));
        CHECK(rest_both(key, other_key, first != 0));
        for (size_t i = 0; i < COUNT_OF(others); i++) {
            CHECK(rest_both(outputs, others[i], first != 0));
        }
    }
}

TEST(each_thing_is_told_once)
{
    const smp_wait    rest = rest_of(SMP_WAIT_NOTHING, 0, 0);
    smp_sequence_word word;
    smp_ready         one = ready_of(SMP_READY_TURN, SMP_FORWARD, 0, 7);
    pair              p;

    begin(&p);
    smp_sequence_rest(p.leader, &rest); /* nothing ran */
    CHECK(!smp_sequence_tell(p.leader, &word));
    smp_sequence_run(p.leader, &one);
    CHECK(smp_sequence_tell(p.leader, &word) && word.runs && !word.rests);
    CHECK(!smp_sequence_tell(p.leader, &word));
    smp_sequence_rest(p.leader, &rest);
    one.call = 8;
    smp_sequence_run(p.leader, &one);
    CHECK(smp_sequence_tell(p.leader, &word) && word.runs && word.rests);
    CHECK(word.next.call == 8);
    smp_sequence_rest(p.leader, &rest);
    CHECK(smp_sequence_tell(p.leader, &word) && !word.runs && word.rests);
    CHECK(!smp_sequence_tell(p.leader, &word));
    CHECK(!smp_sequence_tell(p.follower, &word));
    end(&p);
}

TEST(what_no_leader_tells_is_malformed)
{
    const smp_sequence_word early = {.rests = true};
    const smp_sequence_word fine = {.runs = true};
    pair                    p;

    begin(&p);
    CHECK_STATUS(smp_sequence_hear(p.follower, &early), SMP_ERR_MALFORMED);
    CHECK_STATUS(smp_sequence_hear(p.leader, &fine), SMP_ERR_MALFORMED);
    CHECK_OK(smp_sequence_hear(p.follower, &fine));
    CHECK_OK(smp_sequence_hear(p.follower, &early));
    CHECK_STATUS(smp_sequence_hear(p.follower, &early), SMP_ERR_MALFORMED);
    end(&p);
}

/* Of MOST things some are ready on each rank at a time, in an order of its own; the
 * leader picks any. */
TEST(all_run_in_the_leaders_order_whatever_comes_when)
{
    enum { MOST = 200, FOLLOWERS = 3 };

    for (unsigned seed = 1; seed <= 20; seed++) {
        smp_sequence *sequences[1 + FOLLOWERS];
        uint64_t      ran[1 + FOLLOWERS][MOST];
        size_t        nran[1 + FOLLOWERS] = {0};
        bool          is_here[1 + FOLLOWERS][MOST] = {{false}};
        size_t        done = 0;

        srand(seed);
        for (int r = 0; r <= FOLLOWERS; r++) {
            CHECK_OK(smp_sequence_create(r == 0, &sequences[r]));
            smp_sequence_begin(sequences[r]);
        }
        while (done < (1 + FOLLOWERS) * MOST) {
            const int r = rand() % (1 + FOLLOWERS);
            smp_ready here[MOST];
            size_t    n = 0;
            ptrdiff_t at = -1;

            is_here[r][rand() % MOST] = true;
            for (size_t i = 0; i < MOST; i++) {
                bool has_run = false;

                for (size_t k = 0; k < nran[r]; k++) {
                    has_run = has_run || ran[r][k] == i;
                }
                if (is_here[r][i] && !has_run) {
                    here[n++] = ready_of(SMP_READY_REQUEST, SMP_FORWARD, 0, i);
                }
            }
            if (r > 0) {
                at = smp_sequence_find(sequences[r], here, n);
            } else if (n > 0) {
                at = (ptrdiff_t)((size_t)rand() % n);
            }
            if (at >= 0) {
                const smp_wait    rest = rest_of(SMP_WAIT_NOTHING, 0, 0);
                smp_sequence_word word;

                smp_sequence_run(sequences[r], &here[at]);
                ran[r][nran[r]++] = here[at].call;
                done++;
                if (smp_sequence_tell(sequences[r], &word)) {
                    for (int f = 1; f <= FOLLOWERS; f++) {
                        CHECK_OK(smp_sequence_hear(sequences[f], &word));
                    }
                }
                smp_sequence_rest(sequences[r], &rest);
            }
        }
        for (int r = 0; r <= FOLLOWERS; r++) {
            smp_sequence_gap gap;

            CHECK(memcmp(ran[r], ran[0], sizeof(ran[0])) == 0);
            CHECK(!smp_sequence_differs(sequences[r], &gap));
            smp_sequence_destroy(sequences[r]);
        }
    }
}

RUN_TESTS
