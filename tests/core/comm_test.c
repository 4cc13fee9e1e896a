/* The list of tests for transports, over those that need no launcher: ranks as
 * processes and as threads. */
#define _GNU_SOURCE
#include "comm_list.h"

int
main(int argc, char **argv)
{
    static const char *const transports[] = {"shm", "tcp"};
    static const int         sizes[] = {2, 4};
    int                      failed = 0;
    int                      ran = 0;

    for (size_t i = 0; i < COMM_LIST_COUNT * 2 * 2; i++) {
        const world_test *test = &comm_list[i / 4];
        const char       *transport = transports[i / 2 % 2];
        int               size = sizes[i % 2];
        int               processes;
        int               threads;

        if (argc > 1 && strstr(test->name, argv[1]) == NULL) {
            continue;
        }
        processes = world_run_processes(test, transport, size);
        threads = world_run_threads(test, transport, size);
        if (processes != 0 || threads != 0) {
            printf("FAILED %s, %s, %d ranks, %s\n", test->name, transport, size,
                   processes != 0 ? "processes" : "threads");
        }
        failed += (processes != 0) + (threads != 0);
        ran += 2;
    }
    printf("%d passed, %d failed\n", ran - failed, failed);
    return failed != 0 || ran == 0;
}
