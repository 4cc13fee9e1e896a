/* Comparing calls, and naming the two that differ. */
#include "comm/collective/agreement.h"

#include <stdio.h>

#include "comm/collective/call.h"
#include "comm/collective/group.h"

static bool
same_call(const smp_notice *a, const smp_notice *b)
{
    return a->sequence == b->sequence && a->operation == b->operation &&
           a->dtype == b->dtype && a->reduction == b->reduction &&
           a->uneven == b->uneven && a->root == b->root && a->count == b->count;
}

/* Whether all have the split sizes of member 0. */
static bool
same_counts(const smp_said *said, int n, char *text, size_t bytes)
{
    for (int m = 1; m < n; m++) {
        for (int i = 0; i < n; i++) {
            uint64_t first = said[0].counts[i];
            uint64_t its = said[m].counts[i];

            if (its != first) {
                snprintf(text, bytes,
                         "split size %d is %llu on rank %d and %llu on rank %d", i,
                         (unsigned long long)first, said[0].rank,
                         (unsigned long long)its, said[m].rank);
                return false;
            }
        }
    }
    return true;
}

/* Whether each member expects what is sent to it; *most: the longest range. */
static bool
matching_counts(const smp_said *said, int n, char *text, size_t bytes, size_t *most)
{
    *most = 0;
    for (int m = 0; m < n; m++) {
        for (int to = 0; to < n; to++) {
            uint64_t sent = said[m].counts[to];
            uint64_t expected = said[to].counts[n + m];

            if (sent != expected) {
                snprintf(text, bytes,
                         "rank %d sends %llu elements to rank %d, which expects %llu",
                         said[m].rank, (unsigned long long)sent, said[to].rank,
                         (unsigned long long)expected);
                return false;
            }
            *most = sent > *most ? sent : *most;
        }
    }
    return true;
}

bool
smp_agreement(const smp_said *said, int n, size_t *most, char *text, size_t bytes)
{
    *most = 0;
    for (int m = 1; m < n; m++) {
        if (!same_call(said[0].notice, said[m].notice)) {
            char one[96];
            char other[96];

            smp_notice_describe(said[0].notice, one, sizeof(one));
            smp_notice_describe(said[m].notice, other, sizeof(other));
            snprintf(text, bytes, "rank %d calls %s, rank %d calls %s", said[0].rank,
                     one, said[m].rank, other);
            return false;
        }
    }
    if (said[0].notice->uneven == 2) {
        return matching_counts(said, n, text, bytes, most);
    }
    return said[0].notice->uneven == 0 || same_counts(said, n, text, bytes);
}

void
smp_notice_describe(const smp_notice *notice, char *out, size_t bytes)
{
    smp_operation operation = (smp_operation)notice->operation;
    const char   *name = smp_operation_name(operation);
    const char   *dtype = smp_dtype_name((smp_dtype)notice->dtype);
    char          how[48] = "";
    char          root[32] = "";

    if (operation == SMP_BARRIER) {
        snprintf(out, bytes, "%s %llu", name, (unsigned long long)notice->sequence);
        return;
    }
    if (smp_operation_reduces(operation)) {
        snprintf(how, sizeof(how), " (%s)",
                 smp_reduction_name((smp_reduction)notice->reduction));
    }
    if (smp_operation_has_root(operation)) {
        snprintf(root, sizeof(root), " with root %d", notice->root);
    }
    if (notice->uneven != 0) {
        snprintf(out, bytes, "%s %llu%s of %s with split sizes%s", name,
                 (unsigned long long)notice->sequence, how, dtype, root);
    } else {
        snprintf(out, bytes, "%s %llu%s of %llu %s%s", name,
                 (unsigned long long)notice->sequence, how,
                 (unsigned long long)notice->count, dtype, root);
    }
}
