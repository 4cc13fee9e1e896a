/* Packing a row of items onto devices, each device full before the next one begins.
 *
 * Ownership  All arrays are the caller's.
 * Threads    Any.
 */
#ifndef SMP_PARTITION_PACK_H
#define SMP_PARTITION_PACK_H

#include <stdint.h>

/* Cuts `items` items into consecutive segments and gives each a number of devices, so
 * that the greatest load of a device is small.  Item i costs prefix[i + 1] - prefix[i].
 * An item above that load is divided over several devices, capacity[i] at most, and its
 * first device may hold earlier items as well.  The first device carries `front`
 * already.  Where no capacity is reached, no other such cut has a smaller greatest
 * load.
 *
 * Returns the number of segments, at most `devices`; segment s is the items cut[s] ..
 * cut[s + 1] - 1 on seats[s] devices.  The first segment is empty where nothing fits
 * beside `front`.  items >= 1, devices >= 1, every capacity >= 1. */
int32_t smp_pack(const int64_t *prefix, const int32_t *capacity, int32_t items,
                 int64_t front, int32_t devices, int32_t *cut, int32_t *seats);

#endif
