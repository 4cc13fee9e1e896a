/* A pattern sent over a path before the first message, as a test.
 *
 * Every eight bytes depend on a seed and on their place, so wrong, moved, missing and
 * stale bytes differ.
 *
 * Threads  any.
 */
#ifndef SMP_COMMON_PATTERN_H
#define SMP_COMMON_PATTERN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Writes the first `bytes` bytes of the pattern of `seed`. */
void smp_pattern_write(void *to, size_t bytes, uint64_t seed);

/* Whether `from` has them. */
bool smp_pattern_is(const void *from, size_t bytes, uint64_t seed);

#endif
