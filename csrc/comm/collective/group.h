/* Operations of a group of ranks.
 *
 * Every member of a group calls the same operations in the same order.  An operation
 * begins with all members showing each other their calls; a different call makes it
 * SMP_ERR_MISMATCH (or SMP_ERR_SIZES) on all, before any result is written.  The group
 * goes on.  Sums follow one binary tree over the members' order
 * (comm/collective/kernels/reduce.h), so all members get the same bits, in every run,
 * by whatever way.
 *
 * Inside a host, small tensors go through the members' control blocks in shared memory.
 * Large ones are read from each other's memory if the system allows this, else they too
 * go through the slots, piece by piece.  Members on several hosts send each other
 * messages of their comm (comm/collective/inter_host/route.h), and sums keep their
 * bits.
 *
 * Buffers    `in` and `out` are the caller's and borrowed until the operation is over;
 *            other members read them until then, and no longer.  They are aligned to
 *            their elements.
 * Ownership  A group borrows its comm: destroy it first.
 * Threads    A group: one at a time.  Different groups: at the same time.
 * Errors     After SMP_ERR_MISMATCH, SMP_ERR_SIZES, SMP_ERR_INVALID the group is as
 *            before.  After any other it has ended: each later call returns the same.
 *            smp_group_error() has the text, with the names of the group, the operation
 *            and the ranks (smp_comm_name()), and for a later call also the group's
 * end.
 */
#ifndef SMP_COMM_COLLECTIVE_GROUP_H
#define SMP_COMM_COLLECTIVE_GROUP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/collective/checks/call.h"
#include "comm/collective/intra_host/reading.h"
#include "comm/device/exchange.h"
#include "comm/messaging/comm.h"
#include "common/status.h"

typedef struct smp_group smp_group;

typedef struct {
    const int *ranks; /* of the comm, in the order of the group; borrowed */
    int        size;  /* at most SMP_GROUP_MEMBERS */
    uint64_t id; /* the same on all members, unlike the id of any other present group of
                    a member; not 0 */
    const char *name;       /* for errors: borrowed, its first 63 bytes are kept */
    int64_t     timeout_ns; /* for one operation, and for the meeting; < 0: no limit */
    smp_reading reading;    /* of each other's memory; all members decide */
    bool (*gives_up)(void *arg); /* or NULL; asked while members meet, every
                                    SMP_DEADLINE_LOOK_NS or more often, by the caller's
                                    thread; true: SMP_ERR_INTERRUPTED */
    void  *gives_up_arg;         /* borrowed during create */
    size_t round_bytes; /* between hosts: of tensors on the way at a time; 0: 32
                        MiB; the same on all */
    char *why; /* [SMP_GROUP_TEXT], or NULL; borrowed during create, for the text of its
                  failure */
} smp_group_config;

/* Meets the other members: all must call it.  SMP_ERR_INVALID; SMP_ERR_UNREACHABLE:
 * *failed is a rank with another view of the hosts than this one; SMP_ERR_NO_MEMORY;
 * SMP_ERR_LIMIT: this rank is in SMP_CONTROL_BLOCKS groups; with *failed:
 * SMP_ERR_TIMED_OUT, SMP_ERR_INTERRUPTED, SMP_ERR_PEER_LOST, SMP_ERR_CLOSED, and
 * SMP_ERR_MISMATCH for another list of ranks. */
smp_status smp_group_create(smp_comm *comm, const smp_group_config *config,
                            smp_group **out, int *failed);

/* No operation is under way.  Waits (at most a second) for members still reading
 * results of the last.  Takes NULL. */
void smp_group_destroy(smp_group *group);

/* Begins an operation; the one before is over.  `call` itself is copied. */
smp_status smp_group_start(smp_group *group, const smp_call *call);

/* Moves the operation on, and waits while others are missing, until_ns (smp_clock_ns)
 * at the latest.  This limit is not the operation's, and its passing is no error.
 * *over: the buffers are the caller's again.  An error ends the operation too. */
smp_status smp_group_wait(smp_group *group, int64_t until_ns, bool *over);

/* start, and wait until it is over. */
smp_status smp_group_run(smp_group *group, const smp_call *call);

/* For how long the operation under way has waited for others; 0: it has not. */
int64_t smp_group_waited_ns(const smp_group *group);

/* The wait of the operation under way, for people: "group 'a': barrier 3 waits for rank
 * 1".  With a `next` call, so many `after` it: the operation ahead of that call. */
void smp_group_describe(const smp_group *group, const smp_call *next, uint64_t after,
                        char *out, size_t bytes);

/* The last error, for people: the group's, until its next failed call. */
const char *smp_group_error(const smp_group *group);

/* After SMP_ERR_MISMATCH: the keys of its two named calls, where these differ; 0: it
 * has none. */
void smp_group_keys(const smp_group *group, uint32_t keys[2]);

/* Before the first operation: the group's name from now on in errors and for other
 * members; the first 63 bytes are kept. */
void smp_group_rename(smp_group *group, const char *name);

int      smp_group_size(const smp_group *group);
int      smp_group_member(const smp_group *group);   /* this one's number */
uint64_t smp_group_sequence(const smp_group *group); /* operations begun */

/* Whether large tensors are read from each other's memory. */
bool smp_group_reads_memory(const smp_group *group);

/* The exchange for tensors of devices, once an operation with an offer is over; NULL:
 * not yet, or (*why is not "") never, for a member's reason.  The same on all
 * members. */
smp_exchange *smp_group_exchange(const smp_group *group, const char **why);

/* Waits (for a second at most) for copies of devices; no operation is under way.
 * False: they do not end, and use the tensors for as long as the process lives. */
bool smp_group_rest(const smp_group *group);

/* Whether all members share memory. */
bool smp_group_is_on_one_host(const smp_group *group);

/* This member's counts so far. */
typedef struct {
    uint64_t operations;        /* begun */
    uint64_t bytes;             /* of its tensors in them: `in`, or its result */
    uint64_t device_operations; /* those of them between devices */
    uint64_t device_bytes;
    uint64_t device_reads; /* those of them with tensors read where they lie */
    uint64_t tensor_bytes; /* sent to other hosts: of tensors, and of terms of sums, */
    uint64_t other_bytes;  /* ... and beside them */
    uint64_t parcels;
} smp_group_use;

/* Any thread. */
void smp_group_count(const smp_group *group, smp_group_use *out);

#endif
