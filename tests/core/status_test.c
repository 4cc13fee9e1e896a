/* Spec: csrc/common/status.h. */
#include "check.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/resource.h>

TEST(a_status_has_the_name_of_its_enum_and_a_text)
{
    CHECK_TEXT(smp_status_name(SMP_ERR_PEER_LOST), "SMP_ERR_PEER_LOST");
    CHECK_TEXT(smp_status_text(SMP_OK), "ok");
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

    CHECK_TEXT(smp_status_text(SMP_ERR_SYSTEM), "the system refused");
    errno = ENOSPC;
    CHECK_STATUS(smp_status_refused(), SMP_ERR_SYSTEM);
    CHECK(errno == ENOSPC);
    CHECK_TEXT(smp_status_text(SMP_ERR_SYSTEM),
               "the system refused: No space left on device");
    CHECK_TEXT(smp_status_text(SMP_ERR_CLOSED), "closed");

    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = 48;
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    errno = EMFILE;
    (void)smp_status_refused();
    snprintf(wanted, sizeof(wanted),
             "the system refused: Too many open files (this process may have 48: "
             "ulimit -n)");
    CHECK_TEXT(smp_status_text(SMP_ERR_SYSTEM), wanted);
    CHECK(pthread_create(&thread, NULL, text_of_another_thread, NULL) == 0);
    CHECK(pthread_join(thread, &text) == 0);
    CHECK_TEXT(text, "the system refused");
    smp_status_forget();
    CHECK_TEXT(smp_status_text(SMP_ERR_SYSTEM), "the system refused");
}

RUN_TESTS
