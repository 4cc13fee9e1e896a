/* What a call moves, whether it makes sense, what is said of it, and where members
 * differ. Spec: csrc/comm/collective/checks/call.h, agreement.h,
 * csrc/comm/collective/kernels. */
#include "comm/collective/checks/call.h"

#include <stdint.h>
#include <string.h>

#include "check.h"
#include "comm/collective/checks/agreement.h"
#include "comm/collective/kernels/kind.h"
#include "comm/collective/kernels/reduce.h"
#include "comm/memory/control_block.h"

enum { MEMBERS = 3 };

static const size_t splits[MEMBERS] = {4, 0, 7};
static const size_t outs[MEMBERS] = {5, 6, 1};

static smp_call
call_of(smp_operation operation)
{
    return (smp_call){.operation = operation, .dtype = SMP_F32, .count = 10, .root = 1};
}

/* ------------------------------------------------------------------- what it moves */

TEST(the_bytes_of_a_call_are_those_of_the_tensor_that_a_member_gives)
{
    static const uint64_t even[SMP_OPERATIONS] = {
        [SMP_BARRIER] = 0,          [SMP_ALL_REDUCE] = 40, [SMP_REDUCE] = 40,
        [SMP_REDUCE_SCATTER] = 120, [SMP_ALL_GATHER] = 40, [SMP_BROADCAST] = 40,
        [SMP_GATHER] = 40,          [SMP_SCATTER] = 40,    [SMP_ALL_TO_ALL] = 120,
    };
    smp_call call;

    for (smp_operation o = 0; o < SMP_OPERATIONS; o++) {
        call = call_of(o);
        CHECK(smp_call_bytes(&call, MEMBERS, 0) == even[o]);
        CHECK(smp_call_bytes(&call, MEMBERS, 1) == (o == SMP_SCATTER ? 120 : even[o]));
    }
    call = call_of(SMP_ALL_GATHER);
    call.counts = splits;
    CHECK(smp_call_bytes(&call, MEMBERS, 2) == 28);
    call.operation = SMP_REDUCE_SCATTER;
    CHECK(smp_call_bytes(&call, MEMBERS, 2) == 44);
    call.operation = SMP_ALL_TO_ALL;
    call.dtype = SMP_F64;
    CHECK(smp_call_bytes(&call, MEMBERS, 1) == 88);
}

static void
range_is(smp_range got, size_t from, size_t to, size_t count)
{
    CHECK(got.count == count);
    CHECK(count == 0 || (got.from == from && got.to == to));
}

TEST(ranges_go_where_the_operation_says)
{
    static const struct {
        smp_operation operation;
        bool          uneven;
        int           of, from, to; /* member, sender, receiver */
        smp_range     want;
    } rows[] = {
        {SMP_ALL_REDUCE, false, 0, 2, 1, {0, 0, 10}},
        {SMP_REDUCE, false, 0, 2, 1, {0, 0, 10}},
        {SMP_REDUCE, false, 0, 1, 2, {0, 0, 0}},
        {SMP_REDUCE_SCATTER, false, 0, 1, 2, {20, 0, 10}},
        {SMP_ALL_GATHER, false, 0, 2, 1, {0, 20, 10}},
        {SMP_BROADCAST, false, 0, 1, 2, {0, 0, 10}},
        {SMP_BROADCAST, false, 0, 2, 1, {0, 0, 0}},
        {SMP_GATHER, false, 0, 2, 1, {0, 20, 10}},
        {SMP_GATHER, false, 0, 1, 2, {0, 0, 0}},
        {SMP_SCATTER, false, 0, 1, 2, {20, 0, 10}},
        {SMP_SCATTER, false, 0, 2, 1, {0, 0, 0}},
        {SMP_ALL_TO_ALL, false, 2, 2, 1, {10, 0, 10}},
        {SMP_ALL_TO_ALL, false, 1, 2, 1, {10, 20, 10}},
        {SMP_BARRIER, false, 0, 1, 2, {0, 0, 0}},
        {SMP_REDUCE_SCATTER, true, 0, 1, 2, {4, 0, 7}},
        {SMP_ALL_GATHER, true, 0, 2, 1, {0, 4, 7}},
        {SMP_ALL_TO_ALL, true, 0, 0, 2, {4, 0, 7}},
        {SMP_ALL_TO_ALL, true, 0, 2, 0, {0, 11, 1}},
    };

    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        smp_call call = call_of(rows[i].operation);

        if (rows[i].uneven) {
            call.counts = splits;
            call.out_counts = rows[i].operation == SMP_ALL_TO_ALL ? outs : NULL;
        }
        range_is(smp_call_range(&call, rows[i].of, rows[i].from, rows[i].to),
                 rows[i].want.from, rows[i].want.to, rows[i].want.count);
    }
}

TEST(a_window_of_a_range_ends_with_it)
{
    const smp_range range = {100, 200, 10};

    range_is(smp_range_window(range, 0, 4), 100, 200, 4);
    range_is(smp_range_window(range, 4, 4), 104, 204, 4);
    range_is(smp_range_window(range, 8, 4), 108, 208, 2);
    range_is(smp_range_window(range, 10, 4), 0, 0, 0);
    range_is(smp_range_window(range, 11, SIZE_MAX), 0, 0, 0);
}

TEST(the_longest_is_that_of_the_splits)
{
    smp_call call = call_of(SMP_ALL_GATHER);

    CHECK(smp_call_longest(&call, MEMBERS) == 10 && smp_call_lists(&call) == 0);
    call.counts = splits;
    CHECK(smp_call_longest(&call, MEMBERS) == 7 && smp_call_lists(&call) == 1);
    CHECK(smp_call_longest(&call, 1) == 4);
    call.out_counts = outs;
    CHECK(smp_call_lists(&call) == 2);
    call.operation = SMP_BARRIER;
    CHECK(smp_call_longest(&call, MEMBERS) == 0);
}

/* ---------------------------------------------------------- whether it makes sense */

static bool
makes_sense(smp_call call)
{
    smp_call copy;

    return smp_call_copy(&call, MEMBERS, &copy);
}

/* Whether a call of operation o makes sense with a change; with that and another one.
 */
#define WITH(...) (call = call_of(o), __VA_ARGS__, makes_sense(call))
#define AND(...) (__VA_ARGS__, makes_sense(call))

TEST(a_call_that_makes_no_sense_is_not_copied)
{
    static const size_t      too_many[MEMBERS] = {1, SIZE_MAX / 8, 1};
    static const size_t      rows[MEMBERS] = {4, 2, 6};
    const smp_device_gather *gather = (const smp_device_gather *)(const void *)splits;
    const smp_device_offer  *offer = (const smp_device_offer *)(const void *)splits;
    smp_call                 call;
    smp_call                 copy;

    for (smp_operation o = 0; o < SMP_OPERATIONS; o++) {
        bool has_root = o == SMP_REDUCE || o == SMP_BROADCAST || o == SMP_GATHER ||
                        o == SMP_SCATTER;
        bool reduces =
            o == SMP_ALL_REDUCE || o == SMP_REDUCE || o == SMP_REDUCE_SCATTER;
        bool is_gather = o == SMP_ALL_GATHER;
        bool uneven = reduces ? o == SMP_REDUCE_SCATTER : is_gather;

        call = call_of(o);
        CHECK(makes_sense(call));
        CHECK(smp_operation_has_root(o) == has_root);
        CHECK(smp_operation_reduces(o) == reduces);
        CHECK(AND(call.root = MEMBERS - 1));
        CHECK(AND(call.root = MEMBERS) == !has_root);
        CHECK(AND(call.root = -1) == !has_root);
        CHECK(WITH(call.reduction = SMP_BXOR) == !reduces); /* of floats */
        CHECK(AND(call.reduction = SMP_REDUCTIONS) == !reduces);
        CHECK(WITH(call.counts = splits) == uneven);
        CHECK(!AND(call.counts = too_many));
        call.counts = splits;
        CHECK(AND(call.out_counts = outs) == (o == SMP_ALL_TO_ALL));
        CHECK(!AND(call.out_counts = too_many));
        call = call_of(o);
        call.out_counts = outs; /* without counts they are of no use */
        CHECK(smp_call_copy(&call, MEMBERS, &copy) && copy.out_counts == NULL);
        CHECK(WITH(call.hints.sparse = 1) == is_gather);
        CHECK(WITH(call.hints.assumed = 1) == is_gather);
        CHECK(WITH(call.gather = gather) == is_gather);
        CHECK(WITH(call.offer = offer) == is_gather);
        call = call_of(o);
        call.in_rows = 5;
        CHECK(smp_call_has_columns(&call));
        CHECK(makes_sense(call) == (o == SMP_REDUCE_SCATTER || o == SMP_ALL_TO_ALL));
        CHECK(!AND(call.in_rows = 3)); /* which do not divide 10 */
        call = call_of(o);
        call.out_rows = 5;
        CHECK(smp_call_has_columns(&call));
        CHECK(makes_sense(call) == (o == SMP_ALL_GATHER || o == SMP_ALL_TO_ALL));
        CHECK(!AND(call.out_rows = 3));
        CHECK(!WITH(call.dtype = SMP_DTYPES));
        CHECK(WITH(call.count = SIZE_MAX / 16 / MEMBERS));
        CHECK(!AND(call.count++));
    }
    call = call_of(SMP_ALL_TO_ALL);
    call.counts = rows;
    call.out_counts = outs;
    call.in_rows = 2;
    CHECK(makes_sense(call));
    call.out_rows = 2;
    CHECK(!makes_sense(call)); /* of outs */
    CHECK(!makes_sense((smp_call){.operation = SMP_OPERATIONS}));
    CHECK_TEXT(smp_operation_name(SMP_OPERATIONS), "unknown");
}

/* -------------------------------------------------------------- what is said of it */

static void
reads(const smp_notice *notice, const char *want)
{
    char got[120];

    smp_notice_describe(notice, got, sizeof(got));
    CHECK_TEXT(got, want);
}

static void
is_said(smp_call call, const char *want)
{
    uint64_t   counts[2 * MEMBERS];
    smp_notice notice = {0};
    smp_notice again = {0};

    smp_call_say(&call, MEMBERS, 9, &notice, counts);
    smp_call_say_again(&notice, &again);
    again.on_device = notice.on_device; /* which no call has that is said again */
    reads(&notice, want);
    reads(&again, want);
}

#define SAYS(of, words, ...)                                                           \
    call = call_of(of);                                                                \
    __VA_ARGS__;                                                                       \
    is_said(call, words)

TEST(a_notice_reads_as_the_call)
{
    const smp_device_gather *gather = (const smp_device_gather *)(const void *)splits;
    const smp_device_offer  *offer = (const smp_device_offer *)(const void *)splits;
    smp_call                 call;

    SAYS(SMP_ALL_REDUCE, "all-reduce 9 (premultiplied sum) of 10 float32",
         call.reduction = SMP_PREMUL_SUM);
    SAYS(SMP_REDUCE, "reduce 9 (avg) of 10 float32 with root 1",
         call.reduction = SMP_AVG);
    SAYS(SMP_BARRIER, "barrier 9", call.reduction = SMP_AVG);
    SAYS(SMP_SCATTER, "scatter 9 of 5 complex64 with root 1",
         call.kind = smp_kind_of(SMP_DL_COMPLEX, 64, 1));
    SAYS(SMP_ALL_TO_ALL, "all-to-all 9 of 10 float32 in columns", call.in_rows = 5);
    SAYS(SMP_ALL_TO_ALL, "all-to-all 9 of float32 with split sizes",
         call.counts = splits, call.out_counts = outs);
    SAYS(SMP_ALL_GATHER, "all-gather 9 of float32 with assumed sizes",
         call.hints.assumed = 77);
    SAYS(SMP_ALL_GATHER, "all-gather 9 of 10 float32 on a device",
         call.gather = gather);
    SAYS(SMP_ALL_GATHER, "all-gather 9 of 10 float32 on a device for the first time",
         call.offer = offer);
    SAYS(SMP_ALL_GATHER, "sparse all-reduce 8 (sum)", call.hints.sparse = 2);
}

TEST(a_notice_has_the_callers_lists_addresses_and_factor)
{
    uint64_t   counts[2 * MEMBERS];
    smp_notice notice = {0};
    smp_call   call = call_of(SMP_ALL_TO_ALL);

    call.counts = splits;
    call.out_counts = outs;
    call.in = splits;
    call.out = counts;
    call.factor = 2.5;
    call.hints.key = 0xabc;
    smp_call_say(&call, MEMBERS, 9, &notice, counts);
    for (int m = 0; m < MEMBERS; m++) {
        CHECK(counts[m] == splits[m] && counts[MEMBERS + m] == outs[m]);
    }
    CHECK(notice.count == 0 && notice.uneven == 2 && notice.key == 0xabc);
    CHECK(notice.in == (uint64_t)(uintptr_t)splits);
    CHECK(notice.out == (uint64_t)(uintptr_t)counts && notice.factor == 2.5);
    call = call_of(SMP_BROADCAST);
    call.hints.key = 5;
    smp_call_say(&call, MEMBERS, 9, &notice, counts);
    CHECK(notice.root == 1 && notice.count == 10);
}

TEST(kinds_are_named_and_counted_as_their_caller_sees_them)
{
    static const struct {
        smp_kind    kind;
        smp_dtype   dtype;
        const char *name;
        size_t      bytes;
        uint64_t    of_48; /* so many in 48 of the dtype */
    } kinds[] = {
        {0, SMP_I64, "int64", 8, 48},
        {0 | 16 << 8 | 1 << 16, SMP_U8, "int16", 2, 24},
        {1 | 32 << 8 | 1 << 16, SMP_U8, "uint32", 4, 12},
        {SMP_DL_COMPLEX | 128 << 8 | 1 << 16, SMP_F64, "complex128", 16, 24},
        {SMP_DL_FLOAT | 32 << 8 | 4 << 16, SMP_F32, "float32_x4", 16, 12},
        {SMP_DL_FLOAT8_E5M2FNUZ | 8 << 8 | 1 << 16, SMP_U8, "float8_e5m2fnuz", 1, 48},
        {SMP_DL_FLOAT4_E2M1FN | 4 << 8 | 2 << 16, SMP_U8, "float4_e2m1fn_x2", 1, 48},
        {SMP_DL_INT | 4 << 8 | 1 << 16, SMP_U8, "int4", 1, 48},
        {99 | 24 << 8 | 1 << 16, SMP_U8, "type99_24", 3, 16},
        {SMP_DL_INT | 8 << 8 | 1 << 16, SMP_F32, "int8", 1, 48}, /* less than a dtype */
    };
    char name[32];

    for (size_t i = 0; i < COUNT_OF(kinds); i++) {
        smp_kind_name(kinds[i].kind, kinds[i].dtype, name, sizeof(name));
        CHECK_TEXT(name, kinds[i].name);
        CHECK(smp_kind_bytes(kinds[i].kind, kinds[i].dtype) == kinds[i].bytes);
        CHECK(smp_kind_count(kinds[i].kind, kinds[i].dtype, 48) == kinds[i].of_48);
    }
    CHECK(smp_kind_count(kinds[1].kind, SMP_DTYPES, 48) == 48);
    smp_kind_name(kinds[3].kind, SMP_F64, name, 8); /* cut off */
    CHECK_TEXT(name, "complex");
    CHECK_TEXT(smp_dtype_name(SMP_DTYPES), "unknown");
    CHECK_TEXT(smp_reduction_name(SMP_REDUCTIONS), "unknown");
}

/* --------------------------------------------------------------------- who differs */

#define SIZES_UNLIKE "assume other sizes"

/* What members 0 and 1 are told if the last member's notice is another one; NULL: they
 * agree. */
static void
differ(const smp_notice *usual, const smp_notice *other, const char *words)
{
    smp_said    said[MEMBERS];
    smp_refusal refusal;
    const char *text = refusal.text;
    size_t      most;

    for (int m = 0; m < MEMBERS; m++) {
        said[m] = (smp_said){.name = 10 + m, .notice = m == 2 ? other : usual};
    }
    if (smp_agreement(said, MEMBERS, &most, &refusal) != (words == NULL)) {
        fprintf(stderr, "'%s'\n", text);
        check_fail();
    }
    CHECK(words == NULL ||
          (strstr(text, words) != NULL && strstr(text, "rank 10 ") != NULL &&
           strstr(text, "rank 12 ") != NULL &&
           refusal.status == (strstr(text, SIZES_UNLIKE) != NULL ? SMP_ERR_SIZES
                                                                 : SMP_ERR_MISMATCH)));
    CHECK(words == NULL || (refusal.keys[0] == 0 && refusal.keys[1] == other->key));
}

#define DIFFER(words, ...)                                                             \
    other = usual;                                                                     \
    __VA_ARGS__;                                                                       \
    differ(&usual, &other, words)

TEST(members_agree_only_in_all_that_counts)
{
    smp_notice usual = {.sequence = 3, .operation = SMP_ALL_TO_ALL, .count = 8};
    smp_notice other = usual;

    differ(&usual, &other, NULL);
    other.in = other.out = 77; /* are each one's own */
    other.factor = 1.5;
    differ(&usual, &other, NULL);
    DIFFER("rank 12 calls all-to-all 4 of 8 uint8", other.sequence++);
    DIFFER("of 8 uint8 in columns", other.columns = 1);
    DIFFER("on a device", other.on_device = SMP_NOTICE_GATHERS);
    DIFFER("with key 000000ab", other.key = 0xab);
    DIFFER("of 8 int8", other.kind = smp_kind_of(SMP_DL_INT, 8, 1));
    usual.operation = other.operation = SMP_ALL_GATHER;
    DIFFER("sparse all-reduce 3", other.sparse = 1);
    DIFFER("with assumed sizes", other.assumed = 5);
    usual.assumed = 6; /* all do */
    differ(&usual, &other, "all-gather 3: rank 10 and rank 12 " SIZES_UNLIKE);
    other.count = 9; /* whatever else differs */
    differ(&usual, &other, SIZES_UNLIKE);
    other.sequence++; /* but that */
    differ(&usual, &other, "rank 12 calls all-gather 4");
}

/* It is in another module: what the others differ in may come of that. */
TEST(a_member_with_another_key_is_named_first)
{
    smp_notice  notices[MEMBERS];
    smp_said    said[MEMBERS];
    smp_refusal refusal;
    const char *text = refusal.text;
    size_t      most;

    for (int m = 0; m < MEMBERS; m++) {
        notices[m] = (smp_notice){.sequence = 3,
                                  .operation = SMP_ALL_GATHER,
                                  .assumed = 6 + (uint64_t)m,
                                  .key = m == 2 ? 0xab : 0};
        said[m] = (smp_said){.name = 10 + m, .notice = &notices[m]};
    }
    CHECK(!smp_agreement(said, MEMBERS, &most, &refusal));
    CHECK(strstr(text, "rank 12 ") != NULL && refusal.keys[1] == 0xab);
}

TEST(split_sizes_that_differ_are_named_with_both_members)
{
    uint64_t counts[MEMBERS][2 * MEMBERS] = {
        {2, 4, 6, 2, 1, 8}, {1, 5, 7, 4, 5, 9}, {8, 9, 3, 6, 7, 3}};
    smp_notice  notice = {.sequence = 3,
                          .operation = SMP_ALL_TO_ALL,
                          .dtype = SMP_F32,
                          .uneven = 2,
                          .kind = smp_kind_of(SMP_DL_COMPLEX, 64, 1)};
    smp_said    said[MEMBERS];
    smp_refusal refusal;
    const char *text = refusal.text;
    size_t      most = 0;

    for (int m = 0; m < MEMBERS; m++) {
        said[m] = (smp_said){.name = 10 + m, .notice = &notice, .counts = counts[m]};
    }
    CHECK(smp_agreement(said, MEMBERS, &most, &refusal) && most == 9);
    counts[2][MEMBERS + 1] = 10; /* of which member 1 sends 7 */
    counts[1][2] = 6;
    CHECK(!smp_agreement(said, MEMBERS, &most, &refusal));
    CHECK_TEXT(text, "all-to-all 3 of complex64 with split sizes: rank 11 sends 3 "
                     "elements to rank 12, which expects 5");
    notice.operation = SMP_ALL_GATHER;
    notice.uneven = 1;
    for (int m = 0; m < MEMBERS; m++) {
        memcpy(counts[m], counts[0], sizeof(counts[0]));
    }
    CHECK(smp_agreement(said, MEMBERS, &most, &refusal));
    counts[2][1] = 12;
    CHECK(!smp_agreement(said, MEMBERS, &most, &refusal));
    CHECK_TEXT(text, "all-gather 3 of complex64 with split sizes: split size 1 is 2 on "
                     "rank 10 and 6 on rank 12");
}

/* ---------------------------------------------------------------- where it is said */

/* Of those that were forgotten the first comes first, after all that nobody had. */
TEST(control_blocks_are_taken_blank_and_given_back)
{
    static smp_control_block controls[SMP_CONTROL_BLOCKS];
    smp_control_block       *all[SMP_CONTROL_BLOCKS];
    smp_control_block       *control;

    for (int i = 0; i < SMP_CONTROL_BLOCKS; i++) {
        all[i] = smp_control_block_take(controls);
        CHECK(all[i] != NULL);
        atomic_store(&all[i]->id, (uint64_t)i + 1);
    }
    CHECK(smp_control_block_take(controls) == NULL);
    CHECK(smp_control_block_find(controls, 5) == all[4]);
    control = all[7];
    atomic_store(&control->read, 3);
    atomic_store(&control->failed, 3);
    atomic_store(&control->holds, 1);
    atomic_store(&control->waits, 3);
    atomic_store(&control->doorbell.asleep, 1);
    for (int i = 0; i < 2; i++) {
        atomic_store(&control->slots[i].notice.step, 3);
        control->slots[i].notice.sequence = 3;
    }
    memset(control->slots[0].data, 3, SMP_SLOT_BYTES);
    smp_control_block_forget(control);
    all[2]->forgotten_ns = control->forgotten_ns + 1;
    atomic_store(&all[2]->id, 0);
    atomic_store(&all[2]->taken, SMP_CONTROL_FORGOTTEN);
    smp_control_block_give_back(all[9]);
    smp_control_block_leave(all[3]);
    for (uint64_t i = 0; i < 10; i++) {
        CHECK((smp_control_block_find(controls, i + 1) == NULL) ==
              (i == 2 || i == 3 || i == 7 || i == 9));
    }
    CHECK(smp_control_block_take(controls) == all[9]);
    CHECK(smp_control_block_take(controls) == control);
    CHECK(smp_control_block_take(controls) == all[2]);
    CHECK(smp_control_block_take(controls) == NULL); /* one is never used again */
    CHECK(control->read == 0 && control->failed == 0 && control->holds == 0);
    CHECK(control->waits == 0);
    CHECK(atomic_load(&control->doorbell.asleep) == 0);
    for (int i = 0; i < 2; i++) {
        CHECK(control->slots[i].notice.step == 0);
        CHECK(control->slots[i].notice.sequence == 0);
    }
    for (size_t i = 0; i < SMP_GROUP_MEMBERS * sizeof(uint64_t); i++) {
        CHECK(control->slots[0].data[i] == 0);
    }
}

RUN_TESTS
