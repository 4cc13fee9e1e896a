/* A sample of hosts_test.c, which the gate has no time for: each operation and each way
 * to fail between hosts once. */
#define _GNU_SOURCE
#include "hosts_list.h"

RUN_WORLDS(.transports = "shm,tcp", .by = WORLD_SAMPLE)
