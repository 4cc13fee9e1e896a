/* Ranks killed at random moments, while all connect, or send messages and do
 * collectives.
 *
 * Whoever survives is told which rank died, by the first call that cannot go on; it
 * leaves at once, and the others still name that rank and not the one that left.  No
 * process and no file stays.  Spec: csrc/comm/messaging/comm.h,
 * csrc/comm/collective/group.h.
 *
 * SMP_TEST_KILLS: how many (50).  SMP_TEST_SEED: another sequence of them.
 * SMP_TEST_DEADLINE_MS: how soon one must be named, if all are connected, in the median
 * of all kills (a machine may stall); without it, some time.  SMP_TEST_NETWORK: the
 * transport between hosts (tcp). */
#define _GNU_SOURCE
#include <sched.h>

#include "comm/collective/group.h"
#include "reference.h"
#include "traffic.h"

enum { DEFAULT_KILLS = 50, MOST_KILLS = 100000, GROUPS = 3 };

/* A moment of a kill, from the meeting of the groups on, or while all connect. */
#define LATEST_NS (8 * SMP_NS_PER_MS)
#define LATEST_CONNECTING_NS (2 * SMP_NS_PER_MS)

/* One of so many is killed while all connect; of these, one of so many in a job of
 * several hosts, where the others wait for half of the time that they have. */
enum { CONNECTING = 4, ON_HOSTS = 4 };
#define CONNECT_MS 60000
#define CONNECT_HOSTS_MS 4000

/* Places in the scratch of a world. */
enum { KILLED_AT, READY, NOTICED_AT }; /* NOTICED_AT + rank */

typedef struct {
    uint64_t    seed;
    int         size;
    const char *hosts; /* as of a world_test */
    int         victim;
    bool        connecting;
    int         ready; /* ... so many of the ranks, at least */
    int64_t     delay_ns;
} kill_plan;

/* ------------------------------------------------------------------ what ranks do */

/* One rank's end of it. */
typedef struct {
    world           *w;
    const kill_plan *plan;
    smp_group       *groups[GROUPS];
    int              ngroups;
    uint64_t         shared_seed; /* the same on all ranks */
    uint64_t         own_seed;
} actor;

/* Whether `status` of a call on the comm names the victim. */
static bool
names_in_comm(const actor *a, smp_status status)
{
    return status == SMP_ERR_PEER_LOST && smp_comm_lost(a->w->comm) == a->plan->victim;
}

static bool
names_in_group(const actor *a, const smp_group *group)
{
    char text[32];

    snprintf(text, sizeof(text), "rank %d is lost", a->plan->victim);
    return strstr(smp_group_error(group), text) != NULL;
}

static void
note_the_time(const actor *a)
{
    atomic_store(&a->w->shared->scratch[NOTICED_AT + a->w->rank], smp_clock_ns());
}

/* Groups of all, of all from the last to the first by slots alone, and of those up to
 * this rank's neighbours.  *named: not made, because of the victim. */
static void
meet(actor *a, bool *named)
{
    int ranks[WORLD_RANKS];

    for (int g = 0; g < GROUPS; g++) {
        smp_group_config config = {.ranks = ranks,
                                   .size = a->w->size,
                                   .id = (uint64_t)g + 1,
                                   .name = "test",
                                   .timeout_ns = WORLD_DEADLINE_NS,
                                   .reading = g == 1 ? SMP_READ_NEVER : SMP_READ_ALWAYS,
                                   .round_bytes = 64 << 10};
        int              failed = -1;
        smp_status       status;

        for (int r = 0; r < a->w->size; r++) {
            ranks[r] = g == 1 ? a->w->size - 1 - r : r;
        }
        status = smp_group_create(a->w->comm, &config, &a->groups[g], &failed);
        if (status != SMP_OK) {
            note_the_time(a);
            *named = failed == a->plan->victim;
            if (!*named) {
                fprintf(stderr, "rank %d: making group %d: %s, rank %d\n", a->w->rank,
                        g, smp_status_name(status), failed);
            }
            CHECK(*named);
            return;
        }
        a->ngroups++;
    }
}

/* Messages to all, and what has come.  *named: the victim is. */
static void
talk(actor *a, bool *named)
{
    static const size_t sizes[] = {100, 20000, 300000};
    smp_message        *message;
    smp_status          status = SMP_OK;

    for (int j = 0; j < a->w->size - 1; j++) {
        size_t nblocks = next_random(&a->own_seed) % 4;

        status = send_filled(a->w, other(a->w, j), a->own_seed, 50, sizes, nblocks);
        if (names_in_comm(a, status)) {
            *named = true;
            return;
        }
        /* Another survivor may have heard of it first, and left. */
        CHECK(status == SMP_OK || status == SMP_ERR_CLOSED);
    }
    do {
        status = smp_comm_receive(a->w->comm, 0, &message);
        if (status == SMP_OK) {
            smp_message_free(message);
        }
    } while (status == SMP_OK);
    *named = names_in_comm(a, status);
    CHECK(*named || status == SMP_ERR_TIMED_OUT);
}

/* What all call; *named: it was not done because of the victim. */
static void
call(actor *a, bool *named)
{
    smp_group     *group = a->groups[next_random(&a->shared_seed) % GROUPS];
    smp_operation  o = (smp_operation)(next_random(&a->shared_seed) % SMP_OPERATIONS);
    size_t         count = next_random(&a->shared_seed) % 4 == 0 ? 200000 : 100;
    uint64_t       content = next_random(&a->shared_seed);
    reference_call r;
    smp_status     status;

    CHECK(reference_make(&r, group, o, SMP_F32, count, false, content));
    status = smp_group_run(group, &r.call);
    if (status == SMP_OK) {
        CHECK(reference_right(&r));
    } else {
        note_the_time(a);
        *named = names_in_group(a, group);
        if (!*named) {
            fprintf(stderr, "rank %d: %s, %s\n", a->w->rank, smp_status_name(status),
                    smp_group_error(group));
        }
    }
    reference_free(&r);
    CHECK(status == SMP_OK || *named);
}

static void
act(world *w, const kill_plan *plan)
{
    actor a = {.w = w,
               .plan = plan,
               .shared_seed = plan->seed | 1,
               .own_seed = plan->seed * 31 + (uint64_t)w->rank + 1};
    bool  named = false;

    meet(&a, &named);
    while (!named) {
        talk(&a, &named);
        if (!named) {
            call(&a, &named);
        }
    }
    if (atomic_load(&w->shared->scratch[NOTICED_AT + w->rank]) == 0) {
        note_the_time(&a);
    }
    for (int g = 0; g < a.ngroups; g++) {
        smp_group_destroy(a.groups[g]);
    }
}

/* Connects while the victim may die.  *named: that is why it did not work.  (Between
 * hosts, who comes late may find one that has left because of it, and cannot tell.) */
static void
connect_meanwhile(world *w, const kill_plan *plan, bool *named)
{
    int        failed = -1;
    world_end  end;
    smp_status status;

    CHECK_OK(world_prepare(w, "kills", &end));
    w->comm = end.comm;
    if (plan->connecting) {
        atomic_fetch_add(&w->shared->scratch[READY], 1);
    }
    status = smp_comm_connect(end.comm, end.cards, end.card_bytes,
                              PATIENCE_MS(plan->connecting && plan->hosts != NULL
                                              ? CONNECT_HOSTS_MS
                                              : CONNECT_MS),
                              &failed);
    *named = status != SMP_OK && plan->connecting &&
             (failed == plan->victim ||
              (plan->hosts != NULL && status == SMP_ERR_UNREACHABLE));
    if (status != SMP_OK && !*named) {
        fprintf(stderr, "rank %d connects: %s, rank %d\n", w->rank,
                smp_status_name(status), failed);
        check_fail();
    }
    if (!plan->connecting) {
        atomic_fetch_add(&w->shared->scratch[READY], 1);
    }
}

static char transports[32];

static void
be_rank(const kill_plan *plan, world_shared *shared, int rank)
{
    world_test test = {.name = "kill",
                       .hosts = plan->hosts,
                       .pool_bytes = 1 << 20}; /* some blocks go through the socket */
    world      w = world_of(&test, transports, rank, plan->size, shared);
    bool       named = false;

    alarm(WORLD_SECONDS);
    connect_meanwhile(&w, plan, &named);
    if (!named) {
        act(&w, plan);
    }
    smp_comm_destroy(w.comm);
}

/* ------------------------------------------------------------------------- kills */

static kill_plan
make_plan(uint64_t *seed)
{
    static const char *const layouts[] = {NULL, NULL, NULL, "ab", "aab", "abab", "abc"};
    kill_plan                plan = {.seed = next_random(seed)};

    plan.connecting = next_random(seed) % CONNECTING == 0;
    plan.hosts = layouts[next_random(seed) % (COUNT_OF(layouts))];
    if (plan.connecting && next_random(seed) % ON_HOSTS != 0) {
        plan.hosts = NULL;
    }
    plan.size =
        plan.hosts != NULL ? (int)strlen(plan.hosts) : (int)(2 + next_random(seed) % 3);
    plan.victim = (int)(next_random(seed) % (unsigned)plan.size);
    plan.ready = plan.connecting ? 1 + (int)(next_random(seed) % (unsigned)plan.size)
                                 : plan.size;
    plan.delay_ns = (int64_t)(next_random(seed) %
                              (plan.connecting ? LATEST_CONNECTING_NS : LATEST_NS));
    return plan;
}

/* The socket file of a rank's card must be gone. */
static bool
left_a_file(const world_shared *shared, int rank)
{
    const char *at = (const char *)shared->cards[rank];
    char        path[64];

    for (size_t i = 0; i + sizeof(path) < SMP_CARD_BYTES; i++) {
        if (memcmp(at + i, "/dev/shm/", 9) == 0) {
            snprintf(path, sizeof(path), "%s", at + i);
            return access(path, F_OK) == 0;
        }
    }
    return true; /* there is a path on every card */
}

/* Waits until enough are ready, then for the moment. */
static void
kill_one(const kill_plan *plan, world_shared *shared)
{
    int64_t moment;

    while (atomic_load(&shared->scratch[READY]) < plan->ready) {
        sched_yield();
    }
    moment = smp_clock_ns() + plan->delay_ns;
    while (smp_clock_ns() < moment) {
        sched_yield();
    }
    atomic_store(&shared->scratch[KILLED_AT], smp_clock_ns());
    kill(shared->pids[plan->victim], SIGKILL);
}

/* True: something went wrong.  *slowest_ns: until the last survivor knew it. */
static bool
kill_by_plan(const kill_plan *plan, int64_t *slowest_ns)
{
    world_shared *shared = world_share(plan->size);
    bool          wrong = false;

    fflush(NULL);
    for (int r = 0; r < plan->size; r++) {
        pid_t pid = fork();

        if (pid == 0) {
            be_rank(plan, shared, r);
            exit(0); /* exit: the leak check runs */
        }
        shared->pids[r] = pid;
    }
    kill_one(plan, shared);
    *slowest_ns = 0;
    for (int r = 0; r < plan->size; r++) {
        int64_t noticed;
        int     how;

        waitpid(shared->pids[r], &how, 0);
        if (r == plan->victim ? !WIFSIGNALED(how)
                              : !WIFEXITED(how) || WEXITSTATUS(how) != 0) {
            fprintf(stderr, "rank %d ended with status %#x\n", r, (unsigned)how);
            wrong = true;
        }
        noticed = atomic_load(&shared->scratch[NOTICED_AT + r]);
        if (r != plan->victim && noticed != 0) {
            noticed -= atomic_load(&shared->scratch[KILLED_AT]);
            *slowest_ns = noticed > *slowest_ns ? noticed : *slowest_ns;
        }
    }
    for (int r = 0; r < plan->size; r++) { /* the survivors remove the victim's */
        if (left_a_file(shared, r)) {
            fprintf(stderr, "rank %d left a file\n", r);
            wrong = true;
        }
    }
    munmap(shared, sizeof(*shared));
    return wrong;
}

static int
compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a;
    int64_t y = *(const int64_t *)b;

    return (x > y) - (x < y);
}

static int64_t
number_from(const char *name, int64_t otherwise)
{
    const char *text = getenv(name);

    return text != NULL ? atoll(text) : otherwise;
}

/* Not allocated: ranks are forked. */
static int64_t times[MOST_KILLS];

/* Whether the median is within the limit, if there is one; says so in a row, as
 * tests/promises.py. */
static bool
keeps(int64_t limit_ns, int counted)
{
    bool kept;

    qsort(times, (size_t)counted, sizeof(*times), compare);
    kept = limit_ns == 0 || times[counted / 2] <= limit_ns;
    printf("%-50s%7s%11s%10s%10s\n", "promise", "rounds", "median, ms", "worst",
           "limit");
    printf("%-50s%7d%11.1f%10.1f%10.0f  %s\n", "rank killed, core: all others name it",
           counted, (double)times[counted / 2] / SMP_NS_PER_MS,
           (double)times[counted - 1] / SMP_NS_PER_MS, (double)limit_ns / SMP_NS_PER_MS,
           limit_ns == 0 ? "not judged"
           : kept        ? "kept"
                         : "NOT KEPT");
    return kept;
}

int
main(void)
{
    int64_t     kills = number_from("SMP_TEST_KILLS", DEFAULT_KILLS);
    uint64_t    seed = (uint64_t)number_from("SMP_TEST_SEED", 4711) | 1;
    const char *network = getenv("SMP_TEST_NETWORK");
    int64_t     deadline_ms = number_from("SMP_TEST_DEADLINE_MS", 0);
    int         failed = 0;
    int         counted = 0;

    snprintf(transports, sizeof(transports), "shm,%s",
             network != NULL ? network : "tcp");
    kills = kills < 1 ? 1 : kills > MOST_KILLS ? MOST_KILLS : kills;
    for (int64_t i = 0; i < kills; i++) {
        kill_plan plan = make_plan(&seed);
        int64_t   took;
        bool      wrong = kill_by_plan(&plan, &took);

        if (!plan.connecting) {
            times[counted++] = took;
        }
        if (wrong) {
            printf("FAILED kill %lld: rank %d of %d, hosts %s, %.3f ms after %d %s; "
                   "%.3f ms\n",
                   (long long)i, plan.victim, plan.size,
                   plan.hosts != NULL ? plan.hosts : "a", (double)plan.delay_ns / 1e6,
                   plan.ready, plan.connecting ? "began to connect" : "were connected",
                   (double)took / 1e6);
        }
        failed += wrong;
    }
    printf("%lld kills, %d failed\n", (long long)kills, failed);
    if (counted > 0) {
        failed += !keeps(deadline_ms * SMP_NS_PER_MS, counted);
    }
    return failed != 0;
}
