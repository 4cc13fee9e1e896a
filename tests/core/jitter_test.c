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
    return 0;
}

TEST(an_empty_variable_is_none)
{
    setenv("SMP_JITTER", "", 1);
    smp_jitter_init();

    CHECK(!smp_jitter_on);
    return 0;
}

TEST(a_number_turns_it_on_and_a_later_look_off_again)
{
    setenv("SMP_JITTER", "17", 1);
    smp_jitter_init();
    CHECK(smp_jitter_on);

    unsetenv("SMP_JITTER");
    smp_jitter_init();
    CHECK(!smp_jitter_on);
    return 0;
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
    return 0;
}

int
main(int argc, char **argv)
{
    static const smp_test tests[] = {
        {"without_the_variable_nothing_is_delayed",
         without_the_variable_nothing_is_delayed},
        {"an_empty_variable_is_none", an_empty_variable_is_none},
        {"a_number_turns_it_on_and_a_later_look_off_again",
         a_number_turns_it_on_and_a_later_look_off_again},
        {"a_delay_leaves_errno_alone", a_delay_leaves_errno_alone},
    };

    return run_tests(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
