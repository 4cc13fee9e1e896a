/* The order of collectives, as each rank of a TP_GROUP knows it. */
#include "check.h"
#include "server/lineup.h"
#include "server/schedule.h"

#define ON SMP_LINEUP_GOES_ON

static smp_key
key_of(const char *path, uint64_t call, uint32_t number)
{
    smp_key key = smp_key_of(path);

    key.call = call;
    key.number = number;
    return key;
}

TEST(tp_rank_0_issues_at_once_and_the_others_in_its_order)
{
    const smp_key a = key_of("a", 1, 0);
    const smp_key b = key_of("b", 2, 0);
    smp_lineup   *first;
    smp_lineup   *second;

    CHECK_OK(smp_lineup_create(0, &first));
    CHECK_OK(smp_lineup_create(1, &second));
    for (int step = 0; step < 2; step++) {
        smp_lineup_begin(first);
        smp_lineup_begin(second);
        CHECK(smp_lineup_may_issue(first, &b) && smp_lineup_may_issue(first, &a));
        CHECK(!smp_lineup_may_issue(second, &a) && !smp_lineup_may_issue(second, &b));
        CHECK_OK(smp_lineup_issue(first, &b));
        CHECK_OK(smp_lineup_hear(second, &b));
        CHECK_OK(smp_lineup_issue(first, &a));
        CHECK_OK(smp_lineup_hear(second, &a));
        CHECK(!smp_lineup_may_issue(second, &a) && smp_lineup_may_issue(second, &b));
        CHECK_OK(smp_lineup_issue(second, &b));
        CHECK(smp_lineup_may_issue(second, &a) && !smp_lineup_may_issue(second, &b));
        CHECK_OK(smp_lineup_issue(second, &a));
        CHECK(!smp_lineup_may_issue(second, &a));
    }
    smp_lineup_destroy(first);
    smp_lineup_destroy(second);
    smp_lineup_destroy(NULL);
}

TEST(keys_differ_by_call_number_and_path)
{
    const smp_key keys[] = {key_of("a", 1, 0), key_of("a", 1, 1), key_of("a", 2, 0),
                            key_of("b", 1, 0)};

    for (size_t i = 0; i < 4; i++) {
        for (size_t j = 0; j < 4; j++) {
            CHECK(smp_key_equal(&keys[i], &keys[j]) == (i == j));
        }
    }
}

TEST(a_long_list_keeps_its_order)
{
    enum { KEYS = 1000 };
    smp_lineup *lineup;

    CHECK_OK(smp_lineup_create(1, &lineup));
    smp_lineup_begin(lineup);
    for (uint64_t i = 0; i < KEYS; i++) {
        const smp_key key = key_of("a", i, 0);

        CHECK_OK(smp_lineup_hear(lineup, &key));
    }
    for (uint64_t i = 0; i < KEYS; i++) {
        const smp_key key = key_of("a", i, 0);

        CHECK(smp_lineup_may_issue(lineup, &key));
        CHECK_OK(smp_lineup_issue(lineup, &key));
    }
    smp_lineup_destroy(lineup);
}

TEST(a_key_says_module_microbatch_phase_and_call)
{
    char    path[3 * SMP_KEY_PATH];
    char    said[2 * SMP_KEY_PATH];
    char    cut[8];
    smp_key key = smp_key_of("net.0");

    key.microbatch = 3;
    key.phase = SMP_BACKWARD;
    key.time = 1;
    key.number = 2;
    CHECK(smp_key_write(&key, said, sizeof(said)) == strlen(said));
    CHECK_TEXT(said, "module 'net.0' (microbatch 3, backward, call 1, collective 2)");
    CHECK(smp_key_write(&key, cut, sizeof(cut)) == 7 && strcmp(cut, "module ") == 0);

    memset(path, 'x', sizeof(path));
    memcpy(path + sizeof(path) - 6, ".last", 6);
    key = smp_key_of(path);
    CHECK(memcmp(key.path, "...xx", 5) == 0);
    CHECK_TEXT(key.path + sizeof(key.path) - 6, ".last");
    path[SMP_KEY_PATH - 1] = '\0'; /* the longest that is whole */
    key = smp_key_of(path);
    CHECK_TEXT(key.path, path);
}

/* What rank `self` of 3 finds when tp_rank 0 has issued `keys` and the ranks have ended
 * with so many. */
static bool
finds(int self, int keys, const uint64_t ended[3], const smp_key *wanted,
      smp_lineup_gap *gap)
{
    smp_lineup *lineup;
    bool        found;

    if (smp_lineup_create(self, &lineup) != SMP_OK) {
        return false;
    }
    smp_lineup_begin(lineup);
    for (int i = 0; i < keys; i++) {
        const smp_key key = key_of("a", (uint64_t)i, 0);

        (void)smp_lineup_hear(lineup, &key);
        if (self != 0 && ended[self] == ON && ended[0] != ON) {
            (void)smp_lineup_issue(lineup, &key);
        }
    }
    found = smp_lineup_find_gap(lineup, ended, 3, wanted, gap);
    smp_lineup_destroy(lineup);
    return found;
}

TEST(who_ends_with_too_few_is_found)
{
    const smp_key  b = key_of("b", 9, 0);
    smp_lineup_gap gap;

    CHECK(!finds(0, 2, (uint64_t[]){2, 2, 2}, NULL, &gap));
    CHECK(!finds(0, 2, (uint64_t[]){ON, 2, 2}, NULL, &gap));
    CHECK(!finds(0, 2, (uint64_t[]){ON, ON, ON}, &b, &gap));
    CHECK(finds(0, 2, (uint64_t[]){ON, ON, 1}, NULL, &gap));
    CHECK(gap.caller == 0 && gap.other == 2 && gap.key.call == 1);
    CHECK(finds(1, 2, (uint64_t[]){2, 0, ON}, NULL, &gap)); /* itself */
    CHECK(gap.caller == 0 && gap.other == 1 && gap.key.call == 0);
    CHECK(finds(1, 2, (uint64_t[]){2, ON, 2}, &b, &gap)); /* it wants one more */
    CHECK(gap.caller == 1 && gap.other == 0 && gap.key.call == 9);
    CHECK(!finds(1, 2, (uint64_t[]){ON, ON, ON}, &b, &gap));
}

RUN_TESTS
