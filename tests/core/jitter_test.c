/* Random delays are off unless the environment asks for them. */
#define _GNU_SOURCE
#include "common/jitter.h"

#include <errno.h>
#include <stdlib.h>

#include "check.h"

TEST(without_the_variable_nothing_is_delayed)
{
    unsetenv("SMP_JITTER");
    smp_jitter_init();

    CHECK(!smp_jitter_on);
}

TEST(an_empty_variable_is_none)
{
    setenv("SMP_JITTER", "", 1);
    smp_jitter_init();

    CHECK(!smp_jitter_on);
}

TEST(a_number_turns_it_on_and_a_later_look_off_again)
{
    setenv("SMP_JITTER", "17", 1);
    smp_jitter_init();
    CHECK(smp_jitter_on);

    unsetenv("SMP_JITTER");
    smp_jitter_init();
    CHECK(!smp_jitter_on);
}

/* It stands between system calls and the look at their errno. */
TEST(a_delay_leaves_errno_alone)
{
    setenv("SMP_JITTER", "17", 1);
    smp_jitter_init();
    for (int i = 0; i < 64; i++) {
        errno = ENOENT;
        smp_jitter();
        CHECK(errno == ENOENT);
    }
}

RUN_TESTS
