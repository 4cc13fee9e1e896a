/* The alternative where highest averages leave several segments of some size without a
 * device: all of them would sit with the parent, on a device with a multiple of the
 * mean.
 *
 * As in segment.c the least bound is searched for; whether one suffices shows by
 * filling device after device.
 */
#include "partition/pack.h"

#include <stddef.h>

static int64_t
divide_up(int64_t cost, int64_t by)
{
    return (cost + by - 1) / by;
}

/* Fills devices up to `bound`; returns the segments, or 0 if more than `devices` are
 * needed.  cut and seats may be NULL: only try. */
static int32_t
fill(const int64_t *prefix, const int32_t *capacity, int32_t items, int64_t front,
     int32_t devices, int64_t bound, int32_t *cut, int32_t *seats)
{
    int64_t load = front; /* of the last device in use */
    int64_t used = 1;
    int32_t segments = 0;
    int64_t first_used = 0; /* devices before those of this segment */

    if (cut != NULL) {
        cut[0] = 0;
    }
    for (int32_t i = 0; i < items; i++) {
        int64_t cost = prefix[i + 1] - prefix[i];
        int64_t needed = divide_up(load + cost, bound);

        if (load + cost <= bound) {
            load += cost;
            continue;
        }
        if (cost > bound && load < bound && needed <= capacity[i]) {
            used += needed - 1; /* divided, from this device on */
            load = bound;
        } else { /* a new segment, on a new device */
            needed = divide_up(cost, bound);
            if (needed > capacity[i]) {
                return 0;
            }
            if (cut != NULL) {
                seats[segments] = (int32_t)(used - first_used);
                cut[segments + 1] = i;
            }
            segments++;
            first_used = used;
            used += needed;
            load = needed > 1 ? bound : cost;
        }
        if (used > devices) {
            return 0;
        }
    }
    if (cut != NULL) {
        seats[segments] = (int32_t)(used - first_used);
        cut[segments + 1] = items;
    }
    return segments + 1;
}

int32_t
smp_pack(const int64_t *prefix, const int32_t *capacity, int32_t items, int64_t front,
         int32_t devices, int32_t *cut, int32_t *seats)
{
    int64_t total = front + prefix[items] - prefix[0];
    int64_t low = front > 1 ? front : 1;
    int64_t high = total > 1 ? total : 1;

    while (low < high) {
        int64_t middle = low + (high - low) / 2;

        if (fill(prefix, capacity, items, front, devices, middle, NULL, NULL) > 0) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return fill(prefix, capacity, items, front, devices, low, cut, seats);
}
