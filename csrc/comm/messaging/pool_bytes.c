/* The size limit of a comm's pool. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include "comm/messaging/comm.h"

/* The pool's default limit: this part of the machine's memory, and this for an unknown
 * memory. */
#define POOL_MEMORY_SHARE 4
#define DEFAULT_POOL_BYTES ((size_t)256 << 20)

/* All pools of a comm take at most this part of a limited address space: the process
 * has several comms, and more to map. */
#define POOL_ADDRESS_SHARE 8
#define LEAST_POOL_BYTES ((size_t)1 << 20)

/* The bytes this process may still map (ulimit -v); SIZE_MAX: no limit. */
static size_t
address_space_left(void)
{
    struct rlimit limit;
    char          statm[64]; /* begins with the number of mapped pages */
    FILE         *file;
    size_t        mapped = 0;

    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
        return SIZE_MAX;
    }
    file = fopen("/proc/self/statm", "re");
    if (file != NULL) {
        if (fgets(statm, sizeof(statm), file) != NULL) {
            mapped = strtoull(statm, NULL, 10) * (size_t)sysconf(_SC_PAGESIZE);
        }
        fclose(file);
    }
    return mapped < limit.rlim_cur ? (size_t)limit.rlim_cur - mapped : 0;
}

static size_t
default_pool_bytes(int ranks)
{
    long   pages = sysconf(_SC_PHYS_PAGES);
    long   page = sysconf(_SC_PAGESIZE);
    size_t room = address_space_left() / POOL_ADDRESS_SHARE / (size_t)ranks;
    size_t bytes = DEFAULT_POOL_BYTES;

    if (pages > 0 && page > 0) {
        bytes = (size_t)pages * (size_t)page / POOL_MEMORY_SHARE;
    }
    if (room < LEAST_POOL_BYTES) {
        room = LEAST_POOL_BYTES;
    }
    return bytes < room ? bytes : room;
}

size_t
smp_comm_pool_bytes(const smp_comm_config *config)
{
    return config->pool_bytes != 0 ? config->pool_bytes
                                   : default_pool_bytes(config->size);
}
