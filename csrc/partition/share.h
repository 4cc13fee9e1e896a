/* Sharing devices among segments in proportion to cost.
 *
 * Ownership  All arrays are the caller's.
 * Threads    Any.
 */
#ifndef SMP_PARTITION_SHARE_H
#define SMP_PARTITION_SHARE_H

#include <stdint.h>

/* Gives `devices` devices to `segments` segments: seats[s] of them to segment s, at
 * most capacity[s], and none where the cost is 0.  Returns how many are left over
 * because no segment can use them.  cost[s] * (devices + 1) must fit into an int64_t.
 */
int32_t smp_share_devices(const int64_t *cost, const int32_t *capacity,
                          int32_t segments, int32_t devices, int32_t *seats);

/* The same for `devices` more, beside the segments' own in seats[]. */
int32_t smp_share_more(const int64_t *cost, const int32_t *capacity, int32_t segments,
                       int32_t devices, int32_t *seats);

#endif
