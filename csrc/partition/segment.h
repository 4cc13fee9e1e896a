/* Cutting a row of items into segments of nearly equal load.
 *
 * Ownership  All arrays are the caller's.
 * Threads    Any.
 */
#ifndef SMP_PARTITION_SEGMENT_H
#define SMP_PARTITION_SEGMENT_H

#include <stdint.h>

/* Cuts `items` items into `segments` consecutive segments so that the greatest load is
 * the least possible, and returns that load.  Item i costs prefix[i + 1] - prefix[i],
 * never negative; segment s has preload[s] before any item is in it.  Segment s becomes
 * the items cut[s] .. cut[s + 1] - 1; cut has segments + 1 places.  Among the cuts with
 * that greatest load, the result has each segment near the mean of the rest.  A segment
 * is empty only if it has a preload or there are fewer items than segments without one.
 * items >= 0, segments >= 1. */
int64_t smp_segment(const int64_t *prefix, int32_t items, const int64_t *preload,
                    int32_t segments, int32_t *cut);

#endif
