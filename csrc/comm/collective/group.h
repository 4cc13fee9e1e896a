/* Operations that a group of ranks does together.
 *
 * Every member of a group calls the same operations in the same order.  An operation
 * begins with all members showing each other what they call; one that calls something
 * else makes it SMP_ERR_MISMATCH on all, before any result is written, and the group
 * goes on.  Sums follow one binary tree over the members' order
 * (comm/collective/reduce.h), so all members get the same bits, in every run, by
 * whatever way.
 *
 * Inside a host, small tensors go through the members' shelves in shared memory; large
 * ones are read from each other's memory where the system allows that, else they too go
 * through the shelves, piece by piece.  Members on several hosts send each other
 * messages of their comm (comm/collective/route.h), and sums keep their bits.
 *
 * Buffers    `in` and `out` are the caller's and borrowed until the operation is over;
 *            others read them until then, and no longer.  They are aligned to their
 *            elements.
 * Ownership  A group borrows its comm: destroy it first.
 * Threads    A group: one at a time.  Different groups: at the same time.
 * Errors     After SMP_ERR_MISMATCH, SMP_ERR_INVALID the group is as before.  After any
 *            other it is broken: each later call returns the same.  smp_group_error()
 *            says it in words, with the names of the group, the operation and the
 *            ranks.
 */
#ifndef SMP_COMM_COLLECTIVE_GROUP_H
#define SMP_COMM_COLLECTIVE_GROUP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/collective/reduce.h"
#include "comm/comm.h"
#include "common/status.h"

typedef struct smp_group smp_group;

typedef struct {
    const int *ranks; /* of the comm, in the order of the group; borrowed */
    int        size;  /* at most SMP_SHELF_MEMBERS */
    uint64_t   id;    /* the same on all members, unlike that of any other group that
                         one of them is in now; not 0 */
    const char *name; /* for errors: borrowed, its first 63 bytes are kept */
    int64_t     timeout_ns; /* for one operation, and for the meeting; < 0: no limit */
    bool        only_shelves;    /* do not read each other's memory */
    bool (*gives_up)(void *arg); /* or NULL; asked while members meet, every
                                    SMP_PATIENCE_NS or more often, by the caller's
                                    thread; true: SMP_ERR_INTERRUPTED */
    void  *gives_up_arg;         /* borrowed during create */
    size_t round_bytes; /* between hosts: of tensors on the way at a time; 0: 32
                        MiB; the same on all */
} smp_group_config;

/* n is the size of the group, m a member; counts are of elements. */
typedef enum {
    SMP_BARRIER,        /* nothing but waiting for all */
    SMP_ALL_REDUCE,     /* in: count.  out: count */
    SMP_REDUCE,         /* in: count.  out: count, at the root */
    SMP_REDUCE_SCATTER, /* in: n * count, out: count; or in: counts[0 .. n), out:
                           counts[m] */
    SMP_ALL_GATHER,     /* in: count, out: n * count; or in: counts[m], out: counts[0 ..
                           n) */
    SMP_BROADCAST,  /* in: count, at the root.  out: count; at the root may be NULL */
    SMP_GATHER,     /* in: count.  out: n * count, at the root */
    SMP_SCATTER,    /* in: n * count, at the root.  out: count */
    SMP_ALL_TO_ALL, /* in: n * count, out: n * count; or in: counts[0 .. n), out:
                       out_counts[0 .. n) */
    SMP_OPERATIONS
} smp_operation;

/* What one member calls.  What an operation does not use is ignored.  out may be in, or
 * the part of in (or in the part of out) that belongs to this member; not for
 * SMP_ALL_TO_ALL. */
typedef struct {
    smp_operation operation;
    smp_dtype     dtype;
    smp_reduction reduction;
    int           root;   /* a member, not a rank */
    size_t        count;  /* where counts is NULL */
    const size_t *counts; /* uneven: one for each member; borrowed like the buffers */
    const size_t *out_counts; /* SMP_ALL_TO_ALL with counts */
    double        factor;     /* SMP_PREMUL_SUM: of this member's `in` */
    const void   *in;
    void         *out;
    int64_t       timeout_ns; /* 0: the group's; < 0: no limit */
} smp_call;

/* Meets the other members, all of which must call it.  SMP_ERR_INVALID;
 * SMP_ERR_UNREACHABLE: *failed is a rank that sees other hosts than this one;
 * SMP_ERR_NO_MEMORY: also when this rank is in SMP_SHELVES groups; with *failed:
 * SMP_ERR_TIMED_OUT, SMP_ERR_INTERRUPTED, SMP_ERR_PEER_LOST, SMP_ERR_CLOSED, and
 * SMP_ERR_MISMATCH when its list of ranks is another. */
smp_status smp_group_create(smp_comm *comm, const smp_group_config *config,
                            smp_group **out, int *failed);

/* No operation is under way.  Waits (at most a second) for members that still read
 * results of the last.  Takes NULL. */
void smp_group_destroy(smp_group *group);

/* Begins an operation; the one before is over.  `call` itself is copied. */
smp_status smp_group_start(smp_group *group, const smp_call *call);

/* Moves the operation on, for at most about a millisecond, and never waits.  *over: the
 * buffers are the caller's again.  An error ends the operation too. */
smp_status smp_group_progress(smp_group *group, bool *over);

/* The same, but waits while others are missing, until_ns (smp_clock_ns) at the latest;
 * that time is not the operation's, and its passing is no error. */
smp_status smp_group_wait(smp_group *group, int64_t until_ns, bool *over);

/* start, and wait until it is over. */
smp_status smp_group_run(smp_group *group, const smp_call *call);

/* The last error, for people: the group's, until its next call that fails. */
const char *smp_group_error(const smp_group *group);

int      smp_group_size(const smp_group *group);
int      smp_group_member(const smp_group *group);   /* this one's number */
uint64_t smp_group_sequence(const smp_group *group); /* operations begun */

/* Whether large tensors are read from each other's memory. */
bool smp_group_reads_memory(const smp_group *group);

/* Whether all members share memory. */
bool smp_group_is_on_one_host(const smp_group *group);

/* What this member has done so far. */
typedef struct {
    uint64_t operations; /* begun */
    uint64_t bytes; /* of the tensors that it gave to them: `in`, or what it gets */
    uint64_t tensor_bytes; /* sent to other hosts: of tensors, and of terms of sums, */
    uint64_t other_bytes;  /* ... and beside them */
    uint64_t parcels;
} smp_group_use;

/* Any thread. */
void smp_group_count(const smp_group *group, smp_group_use *out);

/* "all-reduce"; static storage. */
const char *smp_operation_name(smp_operation operation);

#endif
