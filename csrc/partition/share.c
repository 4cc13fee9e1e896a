/* Highest averages (D'Hondt): each device goes to the segment with the largest
 * cost / (devices it has + 1).  Adding a device never takes one away from a segment,
 * so a bigger cluster gives a refined partition, not a different one.
 *
 * Algorithm 3 as printed differs: it divides by a counter shared by all segments, and
 * costs of 0.8 and 0.2 on 8 devices give 5 and 3 there, 7 and 1 here.  [paper C.4]
 */
#include "partition/share.h"

/* The next device's segment, the first one on a tie; -1: none. */
static int32_t
next_segment(const int64_t *cost, const int32_t *capacity, int32_t segments,
             const int32_t *seats)
{
    int32_t best = -1;

    for (int32_t s = 0; s < segments; s++) {
        if (cost[s] == 0 || seats[s] >= capacity[s]) {
            continue;
        }
        if (best < 0 || cost[s] * (seats[best] + 1) > cost[best] * (seats[s] + 1)) {
            best = s;
        }
    }
    return best;
}

int32_t
smp_share_devices(const int64_t *cost, const int32_t *capacity, int32_t segments,
                  int32_t devices, int32_t *seats)
{
    for (int32_t s = 0; s < segments; s++) {
        seats[s] = 0;
    }
    if (segments == 1 && cost[0] > 0) {
        seats[0] = devices < capacity[0] ? devices : capacity[0];
        return devices - seats[0];
    }
    return smp_share_more(cost, capacity, segments, devices, seats);
}

int32_t
smp_share_more(const int64_t *cost, const int32_t *capacity, int32_t segments,
               int32_t devices, int32_t *seats)
{
    for (; devices > 0; devices--) {
        int32_t best = next_segment(cost, capacity, segments, seats);

        if (best < 0) {
            break;
        }
        seats[best]++;
    }
    return devices;
}
