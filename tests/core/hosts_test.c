/* Groups whose ranks are on several hosts: some pairs see each other by TCP alone.  As
 * threads, which the thread sanitizer alone is for, on every other layout. */
#define _GNU_SOURCE
#include "hosts_list.h"

int
main(int argc, char **argv)
{
    const char *only = argc > 1 ? argv[1] : NULL;
    int         failed = 0;
    int         ran = 0;

    run_hosts_list("shm,tcp", false, 1, only, &ran, &failed);
    run_hosts_list("shm,tcp", true, WORLD_SANITIZED ? 2 : 1, only, &ran, &failed);
    printf("%d passed, %d failed\n", ran - failed, failed);
    return failed != 0 || ran == 0;
}
