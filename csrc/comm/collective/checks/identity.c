/* Digests and nonces. */
#define _GNU_SOURCE
#include "comm/collective/checks/identity.h"

#include <sys/random.h>
#include <unistd.h>

#include "common/clock.h"

#define FNV_OFFSET 14695981039346656037u
#define FNV_PRIME 1099511628211u

/* FNV-1a over the members. */
uint64_t
smp_members_digest(const int *ranks, int size)
{
    uint64_t hash = FNV_OFFSET;

    for (int i = 0; i < size; i++) {
        hash = (hash ^ (uint64_t)(unsigned)ranks[i]) * FNV_PRIME;
    }
    return hash;
}

uint64_t
smp_new_nonce(const void *here)
{
    uint64_t nonce;

    if (getrandom(&nonce, sizeof(nonce), GRND_NONBLOCK) != (ssize_t)sizeof(nonce)) {
        nonce = (uint64_t)smp_clock_ns() * FNV_PRIME ^ (uint64_t)(uintptr_t)here ^
                (uint64_t)getpid() << 40;
    }
    return nonce | 1;
}
