/* Comparing calls, and naming two different ones. */
#include "comm/collective/checks/agreement.h"

#include <stdio.h>
#include <string.h>

#include "comm/collective/checks/call.h"
#include "comm/collective/kernels/kind.h"

static uint64_t
assumed(const smp_notice *notice)
{
    return notice->operation == SMP_ALL_GATHER ? notice->assumed : 0;
}

static uint32_t
key(const smp_notice *notice)
{
    return smp_operation_has_root((smp_operation)notice->operation) ? 0 : notice->key;
}

static bool
same_call(const smp_notice *a, const smp_notice *b)
{
    return a->sequence == b->sequence && a->operation == b->operation &&
           a->dtype == b->dtype && a->kind == b->kind && a->reduction == b->reduction &&
           a->uneven == b->uneven && a->root == b->root && /* or their keys */
           a->count == b->count && a->on_device == b->on_device &&
           a->sparse == b->sparse && a->columns == b->columns &&
           assumed(a) == assumed(b);
}

/* Whether all gather for the same with assumed sizes, and these differ. */
static bool
sizes_unlike(const smp_said *said, int n, smp_refusal *refusal)
{
    int other = 0;

    for (int m = 0; m < n; m++) {
        if (assumed(said[m].notice) == 0 ||
            said[m].notice->sequence != said[0].notice->sequence ||
            key(said[m].notice) != key(said[0].notice)) {
            return false;
        }
        if (other == 0 && assumed(said[m].notice) != assumed(said[0].notice)) {
            other = m;
        }
    }
    if (other != 0) {
        refusal->status = SMP_ERR_SIZES;
        snprintf(refusal->text, sizeof(refusal->text),
                 "all-gather %llu: rank %d and rank %d assume other sizes",
                 (unsigned long long)said[0].notice->sequence, said[0].name,
                 said[other].name);
    }
    return other != 0;
}

/* The count in the caller's elements. */
static unsigned long long
elements(const smp_notice *notice, uint64_t count)
{
    return (unsigned long long)smp_kind_count(notice->kind, (smp_dtype)notice->dtype,
                                              count);
}

/* Whether all have the split sizes of member 0. */
static bool
same_counts(const smp_said *said, int n, smp_refusal *refusal)
{
    for (int m = 1; m < n; m++) {
        for (int i = 0; i < n; i++) {
            uint64_t first = said[0].counts[i];
            uint64_t its = said[m].counts[i];

            if (its != first) {
                char call[96];

                smp_notice_describe(said[0].notice, call, sizeof(call));
                snprintf(refusal->text, sizeof(refusal->text),
                         "%s: split size %d is %llu on rank %d and %llu on rank %d",
                         call, i, elements(said[0].notice, first), said[0].name,
                         elements(said[0].notice, its), said[m].name);
                return false;
            }
        }
    }
    return true;
}

/* Whether each member expects the counts of its senders; *most: the longest range. */
static bool
matching_counts(const smp_said *said, int n, smp_refusal *refusal, size_t *most)
{
    *most = 0;
    for (int m = 0; m < n; m++) {
        for (int to = 0; to < n; to++) {
            uint64_t sent = said[m].counts[to];
            uint64_t expected = said[to].counts[n + m];

            if (sent != expected) {
                char call[96];

                smp_notice_describe(said[0].notice, call, sizeof(call));
                snprintf(refusal->text, sizeof(refusal->text),
                         "%s: rank %d sends %llu elements to rank %d, which expects "
                         "%llu",
                         call, said[m].name, elements(said[m].notice, sent),
                         said[to].name, elements(said[m].notice, expected));
                return false;
            }
            *most = sent > *most ? sent : *most;
        }
    }
    return true;
}

/* As smp_notice_describe(), with the key, if the `other` has another one.  Returns the
 * key; 0: it has none, or the same. */
static uint32_t
describe_beside(const smp_notice *notice, const smp_notice *other, char *out,
                size_t bytes)
{
    size_t length;

    smp_notice_describe(notice, out, bytes);
    length = strlen(out);
    if (key(notice) == 0 || key(notice) == key(other)) {
        return 0;
    }
    snprintf(out + length, bytes - length, SMP_WITH_KEY "%08x", (unsigned)key(notice));
    return key(notice);
}

/* The first member with another call than member 0, if possible one with another key:
 * it is in another module.  0: there is none. */
static int
other_call(const smp_said *said, int n)
{
    int other = 0;

    for (int m = 1; m < n; m++) {
        if (!same_call(said[0].notice, said[m].notice) &&
            (other == 0 || (key(said[other].notice) == key(said[0].notice) &&
                            key(said[m].notice) != key(said[0].notice)))) {
            other = m;
        }
    }
    return other;
}

bool
smp_agreement(const smp_said *said, int n, size_t *most, smp_refusal *refusal)
{
    int m = other_call(said, n);

    *most = 0;
    *refusal = (smp_refusal){.status = SMP_ERR_MISMATCH};
    if (sizes_unlike(said, n, refusal)) {
        return false;
    }
    if (m != 0) {
        char one[120];
        char other[120];

        refusal->keys[0] =
            describe_beside(said[0].notice, said[m].notice, one, sizeof(one));
        refusal->keys[1] =
            describe_beside(said[m].notice, said[0].notice, other, sizeof(other));
        snprintf(refusal->text, sizeof(refusal->text),
                 "rank %d calls %s, rank %d calls %s", said[0].name, one, said[m].name,
                 other);
        return false;
    }
    if (said[0].notice->uneven == 2) {
        return matching_counts(said, n, refusal, most);
    }
    return said[0].notice->uneven == 0 || same_counts(said, n, refusal);
}

void
smp_notice_describe(const smp_notice *notice, char *out, size_t bytes)
{
    smp_operation operation = (smp_operation)notice->operation;
    const char   *name = smp_operation_name(operation);
    char          dtype[32];
    char          how[48] = "";
    char          root[32] = "";
    const char   *where = notice->on_device == SMP_NOTICE_MEETS
                              ? " on a device for the first time"
                          : notice->on_device != 0 ? " on a device"
                          : notice->columns != 0   ? " in columns"
                                                   : "";

    if (operation == SMP_BARRIER) {
        snprintf(out, bytes, "%s %llu", name, (unsigned long long)notice->sequence);
        return;
    }
    if (notice->sparse != 0) {
        uint64_t first = notice->sequence - notice->sparse + 1;

        snprintf(out, bytes, "sparse all-reduce %llu (sum)", (unsigned long long)first);
        return;
    }
    smp_kind_name(notice->kind, (smp_dtype)notice->dtype, dtype, sizeof(dtype));
    if (smp_operation_reduces(operation)) {
        snprintf(how, sizeof(how), " (%s)",
                 smp_reduction_name((smp_reduction)notice->reduction));
    }
    if (smp_operation_has_root(operation)) {
        snprintf(root, sizeof(root), " with root %d", notice->root);
    }
    if (notice->uneven != 0 || assumed(notice) != 0) {
        snprintf(out, bytes, "%s %llu%s of %s with %s sizes%s%s", name,
                 (unsigned long long)notice->sequence, how, dtype,
                 assumed(notice) != 0 ? "assumed" : "split", root, where);
    } else {
        snprintf(out, bytes, "%s %llu%s of %llu %s%s%s", name,
                 (unsigned long long)notice->sequence, how,
                 elements(notice, notice->count), dtype, root, where);
    }
}
