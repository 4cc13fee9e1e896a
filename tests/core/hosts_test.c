/* Groups whose ranks are on several hosts: some pairs see each other by TCP alone.  As
 * threads, which the thread sanitizer alone is for, on every other layout. */
#define _GNU_SOURCE
#include "hosts_list.h"

int
main(int argc, char **argv)
{
    world_plan plan = {.transports = "shm,tcp", .by = WORLD_LAYOUTS_ALONE};

    run_worlds_as(argc, argv, &plan, false);
    plan.step = WORLD_SANITIZED ? 2 : 1;
    run_worlds_as(argc, argv, &plan, true);
    return tests_are_over();
}
