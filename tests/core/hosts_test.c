/* Groups whose ranks are on several hosts: some pairs see each other by TCP alone.  A
 * sanitizer sees every other layout. */
#define _GNU_SOURCE
#include "hosts_list.h"

int
main(int argc, char **argv)
{
    const char *only = argc > 1 ? argv[1] : NULL;
    const int   step = WORLD_SANITIZED ? 2 : 1;
    int         failed = 0;
    int         ran = 0;

    run_hosts_list("shm,tcp", false, step, only, &ran, &failed);
    run_hosts_list("shm,tcp", true, step, only, &ran, &failed);
    printf("%d passed, %d failed\n", ran - failed, failed);
    return failed != 0 || ran == 0;
}
