/* Spec: csrc/common/status.h. */
#include "check.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/resource.h>

TEST(a_status_has_the_name_of_its_enum_and_a_text)
{
    CHECK(strcmp(smp_status_name(SMP_ERR_PEER_LOST), "SMP_ERR_PEER_LOST") == 0);
    CHECK(strcmp(smp_status_text(SMP_OK), "ok") == 0);
    return 0;
}

static void *
text_of_another_thread(void *unused)
{
    (void)unused;
    return (void *)(uintptr_t)smp_status_text(SMP_ERR_SYSTEM);
}

TEST(what_the_system_refused_has_its_reason_and_its_limit)
{
    struct rlimit limit;
    char          wanted[160];
    pthread_t     thread;
    void         *text;

    CHECK(strcmp(smp_status_text(SMP_ERR_SYSTEM), "the system refused") == 0);
    errno = ENOSPC;
    CHECK_STATUS(smp_status_refused(), SMP_ERR_SYSTEM);
    CHECK(errno == ENOSPC);
    CHECK(strcmp(smp_status_text(SMP_ERR_SYSTEM),
                 "the system refused: No space left on device") == 0);
    CHECK(strcmp(smp_status_text(SMP_ERR_CLOSED), "closed") == 0);

    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = 48;
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    errno = EMFILE;
    (void)smp_status_refused();
    snprintf(wanted, sizeof(wanted),
             "the system refused: Too many open files (this process may have 48: "
             "ulimit -n)");
    CHECK(strcmp(smp_status_text(SMP_ERR_SYSTEM), wanted) == 0);
    CHECK(pthread_create(&thread, NULL, text_of_another_thread, NULL) == 0);
    CHECK(pthread_join(thread, &text) == 0);
    CHECK(strcmp(text, "the system refused") == 0);
    smp_status_forget();
    CHECK(strcmp(smp_status_text(SMP_ERR_SYSTEM), "the system refused") == 0);
    return 0;
}

int
main(int argc, char **argv)
{
    static const smp_test tests[] = {
        {"a_status_has_the_name_of_its_enum_and_a_text",
         a_status_has_the_name_of_its_enum_and_a_text},
        {"what_the_system_refused_has_its_reason_and_its_limit",
         what_the_system_refused_has_its_reason_and_its_limit},
    };
    return run_tests(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
