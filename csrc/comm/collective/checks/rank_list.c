/* Numbers in order, three or more in a row as a range. */
#include "comm/collective/checks/rank_list.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int
compare(const void *a, const void *b)
{
    int one = *(const int *)a;
    int other = *(const int *)b;

    return (one > other) - (one < other);
}

/* The last of the range from `first`. */
static int
end_of_range(const smp_rank_list *list, int first)
{
    int last = first;

    while (last + 1 < list->n && list->names[last + 1] == list->names[last] + 1) {
        last++;
    }
    return last >= first + 2 ? last : first;
}

void
smp_rank_list_say(smp_rank_list *list, char *out, size_t bytes)
{
    size_t used = 0;
    int    last;

    out[0] = '\0';
    if (list->n > 1) {
        qsort(list->names, (size_t)list->n, sizeof(int), compare);
    }
    for (int first = 0; first < list->n; first = last + 1) {
        const char *before = first != 0 ? ", " : list->n == 1 ? "rank " : "ranks ";
        char        item[48];
        size_t      more;
        int         n;

        last = end_of_range(list, first);
        n = last == first
                ? snprintf(item, sizeof(item), "%s%d", before, list->names[first])
                : snprintf(item, sizeof(item), "%s%d to %d", before, list->names[first],
                           list->names[last]);
        more = last + 1 < list->n ? strlen(", ...") : 0;
        if (n < 0 || used + (size_t)n + more >= bytes) {
            snprintf(out + used, bytes - used, "%s...", before);
            return;
        }
        memcpy(out + used, item, (size_t)n + 1);
        used += (size_t)n;
    }
}
