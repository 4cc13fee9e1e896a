/* What groups whose ranks are on several hosts must do, whatever the transport between
 * them: run by hosts_test.c over TCP, by mpi_comm.c over MPI, by ucx_comm.c over UCX.
 * Spec: csrc/comm/collective/group.h, csrc/comm/collective/inter_host/route.h. */
#ifndef SMP_TESTS_HOSTS_LIST_H
#define SMP_TESTS_HOSTS_LIST_H

#include "comm/collective/checks/call.h"
#include "comm/collective/group.h"
#include "comm/collective/group_state.h"
#include "comm/collective/inter_host/wire.h"
#include "comm/collective/queue.h"
#include "groups.h"

TEST_RANK(every_operation_gives_the_right_result, .threads = "234", ON_ALL_LAYOUTS,
          .sample = "abbc")
{
    smp_group *group = world_group(w, 9, w->size % 2 == 0);

    CHECK(!smp_group_is_on_one_host(group));
    for (int i = 0; i < COUNTS; i += 1 + i % 2) {
        all_operations(w, group, SMP_F32, counts[i], (uint64_t)i);
    }
    smp_group_destroy(group);
}

TEST_RANK(columns_are_moved_inside_one_host_only, .threads = "234", ON_TWO_HOSTS,
          .sample = "ab")
{
    float      data[64] = {0};
    smp_call   call = {.operation = SMP_ALL_GATHER,
                       .dtype = SMP_F32,
                       .count = 2,
                       .out_rows = 2,
                       .in = data,
                       .out = data};
    smp_group *group = world_group(w, 9, false);

    CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_INVALID);
    CHECK(says(group, "columns are moved inside one host"));
    call.out_rows = 0;
    call.offer =
        (const smp_device_offer *)(const void *)data; /* at which nobody looks */
    CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_INVALID);
    CHECK(says(group, "tensors of devices are gathered inside one host"));
    call.offer = NULL;
    call.gather = (const smp_device_gather *)(const void *)data;
    CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_INVALID);
    CHECK(says(group, "tensors of devices are gathered inside one host"));
    random_calls(w, &group, 1, 5, 8);
    smp_group_destroy(group);
}

/* Many rounds for tensors that otherwise go in one. */
TEST_RANK(large_tensors_go_in_rounds, .threads = "234", ON_ALL_LAYOUTS, .sample = "aba")
{
    int              ranks[WORLD_RANKS] = {0, 1, 2, 3, 4, 5, 6, 7};
    smp_group_config config = {.ranks = ranks,
                               .size = w->size,
                               .id = 1,
                               .name = "rounds",
                               .timeout_ns = WORLD_DEADLINE_NS,
                               .round_bytes = 64 << 10};
    int              failed;
    smp_group       *group;

    CHECK_OK(smp_group_create(w->comm, &config, &group, &failed));
    for (uint64_t i = 0; i < (uint64_t)world_times(2); i++) {
        all_operations(w, group, SMP_F32, 50001, i);
        all_operations(w, group, SMP_F16, 40000, 50 + i);
    }
    smp_group_destroy(group);
}

/* No step of its host says the factor of one that is alone there. */
TEST_RANK(each_member_has_its_own_factor, .threads = "234", ON_TWO_HOSTS,
          .sample = "aba")
{
    smp_call call = {.operation = SMP_REDUCE,
                     .dtype = SMP_F32,
                     .reduction = SMP_PREMUL_SUM,
                     .count = 1};
    float    in = (float)(w->rank + 1);
    float    want = 0;
    float    out;

    smp_group *group = world_group(w, 9, false);

    for (int r = 0; r < w->size; r++) {
        want += (float)((r + 1) * (r + 2));
    }
    call.in = &in;
    call.out = &out;
    for (call.root = 0; call.root < w->size; call.root++) {
        for (int times = 1; times <= 2; times++) {
            call.factor = times * (w->rank + 2);
            out = 0;
            CHECK_OK(smp_group_run(group, &call));
            CHECK(w->rank != call.root || out == (float)times * want);
        }
    }
    smp_group_destroy(group);
}

/* ------------------------------------------------------------------- bytes on the wire
 */

/* How many nodes of the tree a host has to itself: for these layouts, as drawn. */
typedef struct {
    const char *hosts;
    int         nodes[3]; /* of hosts a, b, c */
} tree_cut;

static const tree_cut cuts[] = {
    {"ab", {1, 1, 0}},       /* a + b */
    {"aabb", {1, 1, 0}},     /* (a + a) + (b + b): one sum each */
    {"abab", {2, 2, 0}},     /* (a + b) + (a + b): nothing can be added before */
    {"aabbcc", {1, 1, 1}},   /* ((aa + bb) + cc) */
    {"aaaabbbb", {1, 1, 0}}, /* four ranks on each host */
};

static uint64_t
ranks_of(const char *hosts, char host)
{
    uint64_t n = 0;

    for (; *hosts != '\0'; hosts++) {
        n += *hosts == host;
    }
    return n;
}

/* What the ranks of a host have sent of tensors in one operation. */
static uint64_t
sent_by_host(world *w, smp_group *group, smp_operation operation, size_t count,
             uint64_t *parcels)
{
    smp_group_use  before;
    smp_group_use  after;
    reference_call r;
    uint64_t       sum = 0;

    *parcels = 0;
    for (uint64_t seed = 0;; seed++) { /* one that makes member 0 the root */
        if (!reference_make(&r, group, operation, SMP_F32, count, false, seed)) {
            abort();
        }
        if (r.call.root == 0) {
            break;
        }
        reference_free(&r);
    }
    smp_group_count(group, &before);
    if (smp_group_run(group, &r.call) != SMP_OK) {
        abort();
    }
    smp_group_count(group, &after);
    if (after.operations != before.operations + 1 ||
        after.bytes - before.bytes != smp_call_bytes(&r.call, w->size, w->rank) ||
        after.other_bytes - before.other_bytes <
            (after.parcels - before.parcels) * sizeof(smp_parcel)) {
        abort();
    }
    reference_free(&r);
    atomic_store(&w->shared->scratch[w->rank],
                 (int64_t)(after.tensor_bytes - before.tensor_bytes));
    atomic_store(&w->shared->scratch[16 + w->rank],
                 (int64_t)(after.parcels - before.parcels));
    w->barrier(w);
    for (int r2 = 0; r2 < w->size; r2++) {
        if (w->test->hosts[r2] == w->test->hosts[w->rank]) {
            sum += (uint64_t)atomic_load(&w->shared->scratch[r2]);
            *parcels += (uint64_t)atomic_load(&w->shared->scratch[16 + r2]);
        }
    }
    w->barrier(w);
    return sum;
}

/* The least that a host must send, if it sends to each other host what that needs: T
 * nodes of the tree, N bytes of a tensor, H hosts, S the part of the tensor whose sums
 * this host makes (S = N * ranks here / ranks).
 *
 *   all-gather      ranks here * N, to each other host
 *   reduce-scatter  T terms of what is not for this host
 *   all-reduce      the same, and S to each other host
 *   broadcast       N to each other host, from the root's
 *   reduce          T * N, to the root's host */
TEST_RANK(each_byte_goes_over_the_wire_once, .threads = "234",
          .layouts = {"ab", "aabb", "abab", "aabbcc", "aaaabbbb"}, .sample = "abab")
{
    enum { COUNT = 65536 }; /* of 4 bytes: divides by all that occurs but 6 */
    const char *hosts = w->test->hosts;
    char        here = hosts[w->rank];
    uint64_t    n = (uint64_t)w->size;
    uint64_t    mine = ranks_of(hosts, here);
    uint64_t    nhosts = hosts[w->size - 1] == 'c' ? 3 : 2;
    uint64_t    bytes = (w->size == 6 ? 98304 : COUNT) * 4;
    bool        is_root = here == hosts[0];
    uint64_t    nodes = 0;
    uint64_t    sent[SMP_OPERATIONS];
    uint64_t    least[SMP_OPERATIONS] = {0};
    uint64_t    parcels[SMP_OPERATIONS];
    smp_group  *group;

    for (size_t i = 0; i < COUNT_OF(cuts); i++) {
        if (strcmp(cuts[i].hosts, hosts) == 0) {
            nodes = (uint64_t)cuts[i].nodes[here - 'a'];
        }
    }
    CHECK(nodes != 0);
    group = world_group(w, 1, false);
    for (smp_operation o = 0; o < SMP_OPERATIONS; o++) {
        sent[o] = sent_by_host(w, group, o, (size_t)bytes / 4, &parcels[o]);
    }
    least[SMP_ALL_GATHER] = mine * bytes * (nhosts - 1);
    least[SMP_REDUCE_SCATTER] = nodes * (n - mine) * bytes;
    least[SMP_ALL_REDUCE] =
        nodes * bytes * (n - mine) / n + (nhosts - 1) * bytes * mine / n;
    least[SMP_BROADCAST] = is_root ? bytes * (nhosts - 1) : 0;
    least[SMP_REDUCE] = is_root ? 0 : nodes * bytes;
    least[SMP_GATHER] = is_root ? 0 : mine * bytes;
    least[SMP_SCATTER] = is_root ? (n - mine) * bytes : 0;
    least[SMP_ALL_TO_ALL] = mine * (n - mine) * bytes;
    for (smp_operation o = 0; o < SMP_OPERATIONS; o++) {
        if (getenv("SMP_TEST_TABLE") != NULL &&
            (w->rank == 0 || hosts[w->rank - 1] != here)) {
            fprintf(stderr,
                    "%s host %c: %-14s %9llu bytes, least %9llu, %llu parcels\n", hosts,
                    here, smp_operation_name(o), (unsigned long long)sent[o],
                    (unsigned long long)least[o], (unsigned long long)parcels[o]);
        }
        CHECK(sent[o] == least[o]);
    }
    smp_group_destroy(group);
}

/* ------------------------------------------------------------------------ trouble */

/* The last rank does not come.  Its host tells the other one, which would else have to
 * blame all of it; all other ranks, whomever they wait for, name that rank alone. */
TEST_RANK(a_time_out_names_the_rank_that_is_missing_on_another_host, .threads = "234",
          .layouts = {"ab", "abb", "aabb", "abab"}, .sample = "abb")
{
    smp_call    call = {.operation = SMP_ALL_REDUCE, .dtype = SMP_F32, .count = 1};
    float       x = 1;
    int         last = w->size - 1;
    char        missing[40];
    char        other[64];
    const char *error;
    smp_group  *group;

    call.in = call.out = &x;
    group = world_group(w, 3, false);
    CHECK_OK(smp_group_run(group, &call));
    if (w->rank != last) {
        call.hints.timeout_ns = 1 * SMP_NS_PER_S;
        CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_TIMED_OUT);
        error = smp_group_error(group);
        snprintf(missing, sizeof(missing), "s without rank %d", last);
        snprintf(other, sizeof(other), "%s,", missing);
        CHECK(says(group, "group 'test': all-reduce 2 (sum) of 1 float32: "));
        CHECK(says(group, missing));
        CHECK(strstr(error, other) == NULL);
        CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_TIMED_OUT);
    }
    w->barrier(w);
    if (w->rank == last) {
        CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_TIMED_OUT);
        CHECK(says(group, "gave up: all-reduce 2"));
    }
    w->barrier(w);
    smp_group_destroy(group);
}

/* Rank 1, on the second host, does not come; who waits for it hears that rank 2, on the
 * third, has given up, and waits no more. */
TEST_RANK(who_waits_for_one_host_hears_that_another_gave_up, .threads = "234",
          .layouts = {"abc"}, .sample = "abc")
{
    smp_call   call = {.operation = SMP_BARRIER};
    smp_group *group = world_group(w, 3, false);

    call.hints.timeout_ns = w->rank == 2 ? 20 * SMP_NS_PER_MS : 0;
    if (w->rank != 1) {
        CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_TIMED_OUT);
        CHECK(says(group, w->rank == 0 ? "rank 2 gave up: barrier 1: timed out after "
                                       : "barrier 1: timed out after "));
    }
    w->barrier(w);
    if (w->rank == 1) { /* the others' calls are there or on their way, but no more */
        smp_status status = smp_group_run(group, &call);

        CHECK(status == SMP_OK || status == SMP_ERR_TIMED_OUT);
        CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_TIMED_OUT);
        CHECK(says(group, "gave up: barrier 1: "));
    }
    w->barrier(w);
    smp_group_destroy(group);
}

/* A parcel that rank 1 sends to rank 0 before it calls what both call. */
typedef struct {
    smp_parcel_kind kind;
    uint64_t        tag;
    const void     *rest;
    size_t          bytes;
    size_t          block; /* bytes; 0: none */
} nonsense;

static inline void
hear_nonsense(world *w, const nonsense *said)
{
    float      data[4] = {0};
    smp_call   call = {.operation = SMP_BROADCAST,
                       .dtype = SMP_F32,
                       .root = 1,
                       .count = 4,
                       .in = data,
                       .out = data};
    smp_block *block = NULL;
    smp_group *group = world_group(w, 3, false);

    w->barrier(w); /* nobody meets any more */
    if (w->rank == 0) {
        CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_MALFORMED);
        CHECK(says(group, "what rank 1 sent makes no sense"));
        CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_MALFORMED);
    } else {
        CHECK(said->block == 0 ||
              smp_comm_block(w->comm, 0, said->block, &block) == SMP_OK);
        CHECK_OK(smp_wire_send(&group->wire, 0, said->kind, 1, said->tag, said->rest,
                               said->bytes, block));
        (void)smp_group_run(group, &call); /* it may end before rank 0 gives up */
    }
    w->barrier(w);
    smp_group_destroy(group);
}

TEST_RANK(what_no_rank_of_another_host_sends_ends_the_group, .threads = "234",
          .layouts = {"ab"}, .sample = "ab")
{
    /* A call with three lists of split sizes; the data of round 0. */
    static const struct {
        smp_notice notice;
        uint64_t   counts[6];
    } call = {.notice = {.sequence = 1, .operation = SMP_BROADCAST, .uneven = 3}};
    static const nonsense all[] = {
        {SMP_PARCEL_CALLS, 0, "abc", 3, 0},
        {SMP_PARCEL_CALLS, 0, &call, sizeof(call), 0},
        {SMP_PARCEL_CALLS, 0, &call, 64 + 8, 0},
        {SMP_PARCEL_DATA, 1, NULL, 0, 12},
        {SMP_PARCEL_DATA, 1, NULL, 0, 0},
        {SMP_PARCEL_DATA, 1, "eight by", 8, 16},
        {SMP_PARCEL_FAILED, SMP_OK, "why", 4, 0},
        {SMP_PARCEL_FAILED, 9999, "why", 4, 0},
        {SMP_PARCEL_FAILED, SMP_ERR_TIMED_OUT, "why", 3, 0},
        {SMP_PARCEL_FAILED, SMP_ERR_TIMED_OUT, NULL, 0, 0},
        {SMP_PARCELS, 0, NULL, 0, 0},
    };

    for (size_t i = 0; i < COUNT_OF(all); i++) {
        hear_nonsense(w, &all[i]);
    }
}

/* Rank 0 calls a, then b; the last one, on another host, calls b, then a. */
TEST_RANK(groups_entered_in_another_order_are_named_across_hosts, .threads = "234",
          .layouts = {"ab", "aab"}, .sample = "aab")
{
    int              ranks[] = {0, w->size - 1};
    smp_group_config config = {.ranks = ranks,
                               .size = 2,
                               .id = 1,
                               .name = "a",
                               .timeout_ns = WORLD_DEADLINE_NS};
    smp_call         call = {.operation = SMP_BARRIER};
    char             other[96];
    bool             over = false;
    int              failed;
    smp_message     *message;
    smp_group       *a;
    smp_group       *b;

    if (w->rank != 0 && w->rank != w->size - 1) {
        w->barrier(w);
        return;
    }
    CHECK_OK(smp_group_create(w->comm, &config, &a, &failed));
    config.id = 2;
    config.name = "b";
    CHECK_OK(smp_group_create(w->comm, &config, &b, &failed));
    if (w->rank == 0) { /* its call in b comes before this message */
        CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message));
        smp_message_free(message);
        call.hints.timeout_ns = SMP_NS_PER_MS;
        CHECK_STATUS(smp_group_run(a, &call), SMP_ERR_TIMED_OUT);
        snprintf(other, sizeof(other),
                 "without rank %d; rank %d waits in group 'b' for barrier 1",
                 w->size - 1, w->size - 1);
        CHECK(says(a, "group 'a': barrier 1: timed out"));
        CHECK(says(a, other));
        call.hints.timeout_ns = 0;
        CHECK_OK(smp_group_run(b, &call));
    } else {
        CHECK_OK(smp_group_start(b, &call));
        CHECK_OK(smp_group_wait(b, 0, &over));
        CHECK(!over);
        CHECK_OK(smp_comm_send(w->comm, 0, "b", 1, NULL, 0));
        CHECK_OK(smp_group_wait(b, SMP_NEVER, &over));
        CHECK_OK(smp_group_run(a, &call)); /* rank 0 has called it */
        CHECK_STATUS(smp_group_run(a, &call), SMP_ERR_TIMED_OUT);
        CHECK(says(a, "rank 0 gave up: barrier 1: timed out"));
    }
    smp_group_destroy(a);
    smp_group_destroy(b);
    w->barrier(w);
}

TEST_RANK(hosts_that_list_other_ranks_are_told, .layouts = {"ab", "aabb"},
          .sample = "aabb")
{
    int              ranks[WORLD_RANKS];
    int              n = 0;
    smp_group_config config = {
        .ranks = ranks, .id = 3, .name = "test", .timeout_ns = WORLD_DEADLINE_NS};
    int        failed = -1;
    smp_group *group;

    /* All ranks of host a list all; those of other hosts list them from the last. */
    for (int r = 0; r < w->size; r++) {
        ranks[n++] = w->test->hosts[w->rank] == 'a' ? r : w->size - 1 - r;
    }
    config.size = n;
    CHECK_STATUS(smp_group_create(w->comm, &config, &group, &failed), SMP_ERR_MISMATCH);
    CHECK(w->test->hosts[failed] != w->test->hosts[w->rank]);
    w->barrier(w);
    group = world_group(w, 4, false);
    random_calls(w, &group, 1, 5, 1);
    smp_group_destroy(group);
}

#endif
