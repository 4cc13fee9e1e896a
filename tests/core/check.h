/* The smallest test runner: TEST(name) { ... return 0; } and one list in main. */
#ifndef SMP_TESTS_CHECK_H
#define SMP_TESTS_CHECK_H

#ifdef NDEBUG
#    error "tests need their assertions"
#endif

#include <stdio.h>
#include <string.h>

#include "common/status.h"

#define TEST(name) static int name(void)

#define CHECK(condition)                                                               \
    do {                                                                               \
        if (!(condition)) {                                                            \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);  \
            return 1;                                                                  \
        }                                                                              \
    } while (0)

#define CHECK_STATUS(call, want)                                                       \
    do {                                                                               \
        smp_status got_ = (call);                                                      \
        if (got_ != (want)) {                                                          \
            fprintf(stderr, "%s:%d: %s: want %s, got %s\n", __FILE__, __LINE__, #call, \
                    smp_status_name(want), smp_status_name(got_));                     \
            return 1;                                                                  \
        }                                                                              \
    } while (0)

/* So long from now, for what takes a smp_deadline (common/deadline.h). */
#define PATIENCE_MS(ms)                                                                \
    (&(smp_deadline){.at_ns = smp_clock_deadline((ms)*SMP_NS_PER_MS)})

typedef struct {
    const char *name;
    int (*run)(void);
} smp_test;

/* An entry of main()'s list. */
#define LISTED_TEST(name)                                                              \
    {                                                                                  \
#        name, name                                                                    \
    }

/* Runs the tests whose name contains argv[1] (all without one).  The exit status of
 * the program: 0 when all passed. */
static inline int
run_tests(const smp_test *tests, size_t ntests, int argc, char **argv)
{
    int failed = 0;
    int ran = 0;

    for (size_t i = 0; i < ntests; i++) {
        if (argc > 1 && strstr(tests[i].name, argv[1]) == NULL) {
            continue;
        }
        ran++;
        if (tests[i].run() != 0) {
            failed++;
            printf("FAILED %s\n", tests[i].name);
        }
    }
    printf("%d passed, %d failed\n", ran - failed, failed);
    return failed != 0 || ran == 0;
}

#endif
