/* Optimal contiguous segmentation.
 *
 * The recursion (3) of the paper costs segments * items^2.  The same optimum comes from
 * a search for the least load that all items fit under, with segments filled from the
 * left: costs are integers, so the search ends at it exactly, after about 40 fillings
 * of segments * log(items) steps.  [paper C.4]
 */
#include "partition/segment.h"

#include <stdbool.h>

/* The greatest end of a segment from `start` with at most `room`. */
static int32_t
reach(const int64_t *prefix, int32_t items, int32_t start, int64_t room)
{
    int64_t limit = prefix[start] + room;
    int32_t low = start;
    int32_t high = items;

    while (low < high) {
        int32_t middle = high - (high - low) / 2;

        if (prefix[middle] <= limit) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

/* The least start of a segment up to `end` with at most `room`. */
static int32_t
reach_back(const int64_t *prefix, int32_t end, int64_t room)
{
    int64_t limit = prefix[end] - room;
    int32_t low = 0;
    int32_t high = end;

    while (low < high) {
        int32_t middle = low + (high - low) / 2;

        if (prefix[middle] >= limit) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

static bool
fits(const int64_t *prefix, int32_t items, const int64_t *preload, int32_t segments,
     int64_t bound)
{
    int32_t at = 0;

    for (int32_t s = 0; s < segments && at < items; s++) {
        at = reach(prefix, items, at, bound - preload[s]);
    }
    return at == items;
}

/* The least fitting bound. */
static int64_t
least_bound(const int64_t *prefix, int32_t items, const int64_t *preload,
            int32_t segments)
{
    int64_t total = prefix[items] - prefix[0];
    int64_t low = 0;
    int64_t high;

    for (int32_t s = 0; s < segments; s++) {
        low = preload[s] > low ? preload[s] : low;
    }
    high = low + total;
    for (int32_t i = 0; i < items; i++) {
        int64_t cost = prefix[i + 1] - prefix[i];

        low = cost > low ? cost : low;
    }
    low = (total + segments - 1) / segments > low ? (total + segments - 1) / segments
                                                  : low;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;

        if (fits(prefix, items, preload, segments, middle)) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/* The first end in [low, high] with a segment from `start` nearest to `wanted`. */
static int32_t
nearest(const int64_t *prefix, int32_t start, int32_t low, int32_t high, int64_t wanted)
{
    int64_t goal = prefix[start] + wanted;
    int32_t first = low;
    int32_t last = high;

    while (first < last) { /* the first end at or beyond the goal, or high */
        int32_t middle = first + (last - first) / 2;

        if (prefix[middle] >= goal) {
            last = middle;
        } else {
            first = middle + 1;
        }
    }
    int64_t sum = prefix[first];

    if (first > low && goal - prefix[first - 1] <= prefix[first] - goal) {
        sum = prefix[first - 1];
    }
    while (first > low && prefix[first - 1] == sum) {
        first--;
    }
    return first;
}

int64_t
smp_segment(const int64_t *prefix, int32_t items, const int64_t *preload,
            int32_t segments, int32_t *cut)
{
    int64_t bound = least_bound(prefix, items, preload, segments);
    int64_t left = prefix[items] - prefix[0]; /* load not yet in a finished segment */
    int32_t must = 0;                         /* segments never to stay empty */

    for (int32_t s = 0; s < segments; s++) {
        left += preload[s];
        must += preload[s] == 0;
    }
    bool may_be_empty = items < must;

    /* Filled from the right, segment s could start here at the earliest. */
    cut[segments] = items;
    for (int32_t s = segments - 1, after = 0; s > 0; s--) {
        after += !may_be_empty && preload[s] == 0;
        cut[s] = reach_back(prefix, cut[s + 1], bound - preload[s]);
        cut[s] = cut[s] < items - after ? cut[s] : items - after;
    }
    cut[0] = 0;
    must = may_be_empty ? 0 : must;
    for (int32_t s = 0; s < segments - 1; s++) {
        int32_t own = !may_be_empty && preload[s] == 0;
        int32_t low = cut[s] + own > cut[s + 1] ? cut[s] + own : cut[s + 1];
        int32_t high = reach(prefix, items, cut[s], bound - preload[s]);

        must -= own;
        high = high < items - must ? high : items - must;
        cut[s + 1] =
            nearest(prefix, cut[s], low, high, left / (segments - s) - preload[s]);
        left -= preload[s] + prefix[cut[s + 1]] - prefix[cut[s]];
    }
    return bound;
}
