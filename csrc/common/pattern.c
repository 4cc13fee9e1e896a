/* Splitmix64 over the places. */
#include "common/pattern.h"

#include <string.h>

static uint64_t
word_at(uint64_t seed, uint64_t place)
{
    uint64_t x = seed + (place + 1) * 0x9e3779b97f4a7c15u;

    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

void
smp_pattern_write(void *to, size_t bytes, uint64_t seed)
{
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
        uint64_t word = word_at(seed, at / sizeof(word));
        size_t   left = bytes - at;

        memcpy((uint8_t *)to + at, &word, left < sizeof(word) ? left : sizeof(word));
    }
}

bool
smp_pattern_is(const void *from, size_t bytes, uint64_t seed)
{
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
        uint64_t word = word_at(seed, at / sizeof(word));
        size_t   left = bytes - at;

        if (memcmp((const uint8_t *)from + at, &word,
                   left < sizeof(word) ? left : sizeof(word)) != 0) {
            return false;
        }
    }
    return true;
}
