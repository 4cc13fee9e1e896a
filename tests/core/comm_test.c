/* The list of tests for transports, over shared memory: ranks as processes and as
 * threads. */
#define _GNU_SOURCE
#include "comm_list.h"

int
main(int argc, char **argv)
{
    static const int sizes[] = {2, 4};
    int              failed = 0;
    int              ran = 0;

    for (size_t i = 0; i < COMM_LIST_COUNT; i++) {
        if (argc > 1 && strstr(comm_list[i].name, argv[1]) == NULL) {
            continue;
        }
        for (size_t j = 0; j < 2; j++) {
            int processes = world_run_processes(&comm_list[i], "shm", sizes[j]);
            int threads = world_run_threads(&comm_list[i], "shm", sizes[j]);

            if (processes != 0 || threads != 0) {
                printf("FAILED %s, %d ranks, %s\n", comm_list[i].name, sizes[j],
                       processes != 0 ? "processes" : "threads");
            }
            failed += (processes != 0) + (threads != 0);
            ran += 2;
        }
    }
    printf("%d passed, %d failed\n", ran - failed, failed);
    return failed != 0 || ran == 0;
}
