/* Numbers of calls: each its own, and the same however the calls of a program mix. */
#include "check.h"
#include "server/calls.h"

enum { MODULES = 40, TIMES = 5 };

/* Calls the modules from `first` on, each once, round and round. */
static void
call_all(smp_calls *calls, uint64_t first, uint32_t before)
{
    for (uint64_t i = 0; i < MODULES; i++) {
        uint32_t got;

        CHECK_OK(smp_calls_count(calls, (first + i) % MODULES, &got));
        CHECK(got == before);
    }
}

TEST(each_module_is_counted_by_itself)
{
    smp_calls calls = {0};

    for (uint32_t time = 0; time < TIMES; time++) {
        call_all(&calls, 7 * time, time);
    }
    smp_calls_fini(&calls);
    call_all(&calls, 0, 0); /* as new */
    smp_calls_fini(&calls);
}

TEST(a_number_says_caller_module_time_and_phase)
{
    enum { CALLERS = 4, ALL = CALLERS * MODULES * TIMES * SMP_PHASES };
    static uint64_t numbers[ALL + 2 * CALLERS];
    size_t          n = 0;

    for (int32_t mb = 0; mb < CALLERS; mb++) {
        const uint64_t root = smp_call_of_root(mb);

        numbers[n++] = root;
        numbers[n++] = smp_call_of_backward(root);
        for (uint64_t module = 0; module < MODULES; module++) {
            for (uint32_t time = 0; time < TIMES; time++) {
                for (int phase = 0; phase < SMP_PHASES; phase++) {
                    numbers[n] = smp_call_of(root, module, time, (smp_phase)phase);
                    CHECK(numbers[n] ==
                          smp_call_of(root, module, time, (smp_phase)phase));
                    n++;
                }
            }
        }
    }
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < i; j++) {
            CHECK(numbers[i] != numbers[j]);
        }
    }
}

RUN_TESTS
