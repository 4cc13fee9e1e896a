/* A sample of hosts_test.c, which the gate has no time for: each operation and each way
 * to fail between hosts once. */
#define _GNU_SOURCE
#include "hosts_list.h"

int
main(int argc, char **argv)
{
    int failed = 0;
    int ran = 0;

    run_hosts_sample("shm,tcp", argc > 1 ? argv[1] : NULL, &ran, &failed);
    printf("%d passed, %d failed\n", ran - failed, failed);
    return failed != 0 || ran == 0;
}
