/* The list of tests for transports, over those that are always registered: ranks as
 * processes and as threads.  UCX, which needs a library, has ucx_comm.c. */
#define _GNU_SOURCE
#include "comm/transport/transport.h"
#include "comm_list.h"

static int failed;
static int ran;

static void
run(const world_test *test, const char *transport, int size, bool as_threads)
{
    if (!world_learns(as_threads, true)) {
        return;
    }
    ran++;
    if ((as_threads ? world_run_threads : world_run_processes)(test, transport, size) !=
        0) {
        failed++;
        printf("FAILED %s, %s, %d ranks, %s\n", test->name, transport, size,
               as_threads ? "threads" : "processes");
    }
}

int
main(int argc, char **argv)
{
    const smp_transport *transports[SMP_TRANSPORTS];
    int                  ntransports = smp_transport_all(transports);

    for (size_t i = 0; i < COMM_LIST_COUNT; i++) {
        for (int t = 0; t < ntransports; t++) {
            for (int size = 2; size <= 4; size += 2) {
                if (transports[t] != &smp_transport_ucx &&
                    (argc == 1 || strstr(comm_list[i].name, argv[1]) != NULL)) {
                    run(&comm_list[i], transports[t]->name, size, false);
                    run(&comm_list[i], transports[t]->name, size, true);
                }
            }
        }
    }
    printf("%d passed, %d failed\n", ran - failed, failed);
    return failed != 0 || ran == 0;
}
