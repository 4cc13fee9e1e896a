/* The list of tests for transports, over UCX, and what is particular to UCX: ucx_comm
 * [name].  Spec: csrc/comm/ucx. */
#define _GNU_SOURCE
#include "comm/ucx/devices.h"
#include "comm/ucx/library.h"
#include "comm_list.h"
#include "deaths.h"
#include "partings.h"

/* --------------------------------------------------------------------- the library */

/* Whether libucp is refused at `path`, with the text in the reason; in a process that
 * has none yet. */
static int
refused_at(const char *path, const char *reason)
{
    pid_t pid = fork();
    int   how;

    if (pid == 0) {
        const smp_ucp *ucp;

        setenv("SMP_UCX_LIBRARY", path, 1);
        if (smp_ucx_library(&ucp) != SMP_ERR_SYSTEM ||
            strstr(smp_ucx_trouble(), reason) == NULL) {
            fprintf(stderr, "%s: %s\n", path, smp_ucx_trouble());
            _exit(1);
        }
        _exit(0);
    }
    CHECK(waitpid(pid, &how, 0) == pid && WIFEXITED(how) && WEXITSTATUS(how) == 0);
    return 0;
}

TEST(a_library_that_is_missing_or_no_ucx_is_refused_with_the_reason)
{
    CHECK(refused_at("/nowhere/libucp.so.0", "/nowhere/libucp.so.0: cannot open") == 0);
    CHECK(refused_at("libm.so.6", "no function ucp_get_version") == 0);
    return 0;
}

TEST(without_being_named_it_serves_only_devices_that_tcp_does_not)
{
    smp_comm_config config = {.size = 2, .pool_bytes = 1 << 20, .job = "job"};
    smp_comm       *comm;
    const void     *card;
    size_t          bytes;

    CHECK_STATUS(smp_comm_create(&config, &comm), SMP_OK);
    card = smp_comm_card(comm, &bytes);
    CHECK((smp_card_find(card, "ucx", &bytes) != NULL) == smp_ucx_fast_devices());
    CHECK(smp_card_find(card, "tcp", &bytes) != NULL);
    smp_comm_destroy(comm);
    config.transports = "ucx";
    CHECK_STATUS(smp_comm_create(&config, &comm), SMP_OK);
    CHECK(smp_card_find(smp_comm_card(comm, &bytes), "ucx", &bytes) != NULL);
    smp_comm_destroy(comm);
    return 0;
}

/* ---------------------------------------------------------------------------- main */

/* Those that end ranks run as processes only. */
static const world_test partings[] = {
    LISTED(a_killed_peer_is_named_to_all_others, 1 << 20),
    LISTED(a_killed_peer_is_noticed_although_its_child_lives, 0),
    LISTED(a_forked_child_can_do_nothing_and_breaks_nothing, 0),
    LISTED(a_stopped_peer_is_not_lost, 0),
    LISTED(what_a_leaving_peer_said_arrives_although_it_is_talked_to, 0),
};

#define PARTINGS (sizeof(partings) / sizeof(partings[0]))

static int ran;
static int failed;

static void
run_listed(const world_test *test, int size, bool as_threads, const char *only)
{
    if (only != NULL && strstr(test->name, only) == NULL) {
        return;
    }
    ran++;
    if ((as_threads ? world_run_threads : world_run_processes)(test, "ucx", size) !=
        0) {
        failed++;
        printf("FAILED %s, ucx, %d ranks, %s\n", test->name, size,
               as_threads ? "threads" : "processes");
    }
}

#define LISTED_TEST(name)                                                              \
    {                                                                                  \
#        name, name                                                                    \
    }

int
main(int argc, char **argv)
{
    static const smp_test tests[] = {
        LISTED_TEST(a_library_that_is_missing_or_no_ucx_is_refused_with_the_reason),
        LISTED_TEST(without_being_named_it_serves_only_devices_that_tcp_does_not),
    };
    const char *only = argc > 1 ? argv[1] : NULL;

    /* This process forks, and loads UCX only after that. */
    for (size_t i = 0; i < PARTINGS; i++) {
        run_listed(&partings[i], i == 0 ? 3 : 2, false, only);
    }
    for (size_t i = 0; i < 2 * COMM_LIST_COUNT; i++) {
        run_listed(&comm_list[i / 2], i % 2 ? 4 : 2, false, only);
    }
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
        if (only == NULL || strstr(tests[i].name, only) != NULL) {
            ran++;
            failed += tests[i].run() != 0;
        }
    }
    for (size_t i = 0; i < 2 * COMM_LIST_COUNT; i++) {
        run_listed(&comm_list[i / 2], i % 2 ? 4 : 2, true, only);
    }
    printf("%d passed, %d failed\n", ran - failed, failed);
    return failed != 0 || ran == 0;
}
