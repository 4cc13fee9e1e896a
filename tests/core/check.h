/* The smallest test runner: TEST(name) { ... } adds itself to the list that run_tests()
 * runs, in the order of the file.  A CHECK that does not hold ends its test, however
 * deep in the functions that the test calls. */
#ifndef SMP_TESTS_CHECK_H
#define SMP_TESTS_CHECK_H

#ifdef NDEBUG
#    error "tests need their assertions"
#endif

#include <execinfo.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/status.h"

#define COUNT_OF(list) (sizeof(list) / sizeof((list)[0]))

/* ---------------------------------------------------------------------- checks */

/* Where a CHECK that does not hold goes: back into the thread and process that it was
 * reached from.  Another process that a test forked, or thread that it made, ends. */
typedef struct {
    jmp_buf back;
    long    process;
} check_point;

static _Thread_local check_point *check_back;

/* The row of a table that a test has come to, for whoever reads of its failure. */
static _Thread_local const char *check_row;

_Noreturn static inline void
check_fail(void)
{
    void *callers[8]; /* for addr2line */

    if (check_row != NULL) {
        fprintf(stderr, "row: %s\n", check_row);
    }
    backtrace_symbols_fd(callers, backtrace(callers, 8), STDERR_FILENO);
    fflush(NULL);
    if (check_back == NULL || check_back->process != getpid()) {
        _exit(1);
    }
    longjmp(check_back->back, 1);
}

/* Whether run(arg) came to a CHECK that does not hold. */
static inline bool
check_fails(void (*run)(void *arg), void *arg)
{
    check_point *outer = check_back;
    check_point  here = {.process = getpid()};
    bool         failed = true;

    check_back = &here;
    check_row = NULL;
    if (setjmp(here.back) == 0) {
        run(arg);
        failed = false;
    }
    check_back = outer;
    return failed;
}

#define CHECK(condition)                                                               \
    do {                                                                               \
        if (!(condition)) {                                                            \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);  \
            check_fail();                                                              \
        }                                                                              \
    } while (0)

#define CHECK_STATUS(call, want)                                                       \
    do {                                                                               \
        smp_status got_ = (call);                                                      \
        if (got_ != (want)) {                                                          \
            fprintf(stderr, "%s:%d: %s: want %s, got %s\n", __FILE__, __LINE__, #call, \
                    smp_status_name(want), smp_status_name(got_));                     \
            check_fail();                                                              \
        }                                                                              \
    } while (0)

#define CHECK_OK(call) CHECK_STATUS(call, SMP_OK)

#define CHECK_TEXT(text, want)                                                         \
    do {                                                                               \
        const char *text_ = (text);                                                    \
        if (strcmp(text_, (want)) != 0) {                                              \
            fprintf(stderr, "%s:%d: want \"%s\", got \"%s\"\n", __FILE__, __LINE__,    \
                    want, text_);                                                      \
            check_fail();                                                              \
        }                                                                              \
    } while (0)

#define CHECK_HAS(text, part)                                                          \
    do {                                                                               \
        const char *text_ = (text);                                                    \
        const char *part_ = (part);                                                    \
        if (strstr(text_, part_) == NULL) {                                            \
            fprintf(stderr, "%s:%d: \"%s\" lacks \"%s\"\n", __FILE__, __LINE__, text_, \
                    part_);                                                            \
            check_fail();                                                              \
        }                                                                              \
    } while (0)

/* So long from now, for what takes a smp_deadline (common/deadline.h). */
#define PATIENCE_MS(ms)                                                                \
    (&(smp_deadline){.at_ns = smp_clock_deadline((ms)*SMP_NS_PER_MS)})

/* -------------------------------------------------------------------- the list */

typedef struct smp_test {
    const char *name;
    void (*run)(void);
    struct smp_test *next;
} smp_test;

static smp_test *check_list;

static inline void
check_enlist(smp_test *test)
{
    static smp_test **last = &check_list;

    *last = test;
    last = &test->next;
}

#define TEST(test)                                                                     \
    static void                              test(void);                               \
    __attribute__((constructor)) static void list_##test(void)                         \
    {                                                                                  \
        static smp_test entry = {#test, test, NULL};                                   \
                                                                                       \
        check_enlist(&entry);                                                          \
    }                                                                                  \
    static void test(void)

/* Those whose name contains this are run. */
static const char *check_only = "";
static int         check_ran;
static int         check_failed;

static inline bool
check_chosen(const char *name)
{
    return strstr(name, check_only) != NULL;
}

static inline void
check_run_plainly(void *test)
{
    ((const smp_test *)test)->run();
}

/* A test that takes longer hangs. */
#define CHECK_SECONDS 300

/* Runs the tests whose name contains argv[1] (all without one). */
static inline void
run_tests(int argc, char **argv)
{
    check_only = argc > 1 ? argv[1] : "";
    for (smp_test *test = check_list; test != NULL; test = test->next) {
        if (check_chosen(test->name)) {
            check_ran++;
            alarm(CHECK_SECONDS);
            if (check_fails(check_run_plainly, test)) {
                check_failed++;
                printf("FAILED %s\n", test->name);
            }
            alarm(0);
        }
    }
}

/* The exit status of the program: 0 when all passed. */
static inline int
tests_are_over(void)
{
    printf("%d passed, %d failed\n", check_ran - check_failed, check_failed);
    return check_failed != 0 || check_ran == 0;
}

/* The program that does just that. */
#define RUN_TESTS                                                                      \
    int main(int argc, char **argv)                                                    \
    {                                                                                  \
        run_tests(argc, argv);                                                         \
        return tests_are_over();                                                       \
    }

#endif
