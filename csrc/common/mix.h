/* A number derived from two others. */
#ifndef SMP_COMMON_MIX_H
#define SMP_COMMON_MIX_H

#include <stdint.h>

/* splitmix64's mixing [Steele, Lea, Flood 2014] of a and b: 63 bits. */
static inline uint64_t
smp_mix(uint64_t a, uint64_t b)
{
    uint64_t h = a + 0x9E3779B97F4A7C15u * (b + 1);

    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
    h ^= h >> 31;
    return h & 0x7FFFFFFFFFFFFFFFu;
}

#endif
