/* An epoch barrier over the steps of an operation: among ranks of one host, none begins
 * step s + 1 before all have posted step s.
 *
 * A member fills its slot of a step, posts it, and looks at the others' slots once all
 * have posted.  It posts the next step only after its reads of this one; so two slots
 * are enough for any reads: a slot is filled again two steps later, when all have
 * posted the step between.
 *
 * Threads  one at a time.
 * Errors   A member tells the others of its giving up (smp_epoch_barrier_fail), and
 *          none goes on from there.
 */
#ifndef SMP_COMM_COLLECTIVE_INTRA_HOST_EPOCH_BARRIER_H
#define SMP_COMM_COLLECTIVE_INTRA_HOST_EPOCH_BARRIER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "comm/collective/checks/rank_list.h"
#include "comm/collective/intra_host/reading.h"
#include "comm/memory/control_block.h"
#include "comm/memory/segment.h"
#include "comm/memory/user.h"
#include "comm/messaging/comm.h"
#include "common/deadline.h"
#include "common/status.h"

typedef struct {
    int                rank; /* of the comm */
    pid_t              pid;
    smp_segment       *segment; /* owned: one reference */
    smp_control_block *control; /* in the segment */
    uint64_t           arena;   /* address of the segment's arena in its own memory */
    uint64_t           nonce;   /* of its meeting */
    bool               greeted; /* while members meet: it has come */
} smp_member;

typedef struct {
    smp_comm   *comm; /* borrowed */
    int         size;
    int         self;
    smp_member *members; /* owned: [size] */
    uint64_t    id;
    uint64_t    nonce; /* others read it here, to try whether they can */
    uint64_t step; /* the last one posted by this member; the first is random, so that a
                      control block of another meeting is never taken for this one's */
    int      awaited;    /* all before this member have posted it */
    bool     spins;      /* a waiter may keep its core */
    bool     reads;      /* members read each other's memory */
    uint32_t generation; /* smp_fork_generation() */
} smp_epoch_barrier;

/* Meets the other members; ranks[size] of a connected comm, at most SMP_GROUP_MEMBERS,
 * each once and this one among them, the same on all members.  `id` is not 0, and
 * unlike the id of any other present meeting of a member.  Members read each other's
 * memory if all can, as `reading` says.  SMP_ERR_UNREACHABLE: *failed is a rank of
 * another host; SMP_ERR_NO_MEMORY; SMP_ERR_LIMIT: this rank is in SMP_CONTROL_BLOCKS
 * groups; SMP_ERR_TIMED_OUT: all missing ones are added to `absent`, if not NULL;
 * SMP_ERR_INTERRUPTED, SMP_ERR_PEER_LOST, SMP_ERR_CLOSED, SMP_ERR_MISMATCH (another
 * list of members): with *failed. */
smp_status smp_epoch_barrier_init(smp_epoch_barrier *barrier, smp_comm *comm,
                                  const int *ranks, int size, uint64_t id,
                                  smp_reading reading, const smp_deadline *deadline,
                                  int *failed, smp_rank_list *absent);

/* The cause of a meeting's failure with this status and *failed: a member may leave or
 * give up because another rank is lost.  Writes a text, too. */
smp_status smp_epoch_barrier_blame(const smp_comm *comm, smp_status status, int *failed,
                                   char *why, size_t bytes);

/* Waits up to a second for members still reading this one's control block. */
void smp_epoch_barrier_fini(smp_epoch_barrier *barrier);

/* The slot of a member in step `step`; other members': once all have posted it. */
static inline smp_slot *
smp_epoch_barrier_slot(const smp_epoch_barrier *barrier, int member, uint64_t step)
{
    return &barrier->members[member].control->slots[step & 1];
}

/* Begins the next step: its own slot is filled. */
void smp_epoch_barrier_post(smp_epoch_barrier *barrier);

/* Whether `member` has posted the present step. */
static inline bool
smp_epoch_barrier_posted(const smp_epoch_barrier *barrier, int member)
{
    const smp_slot *slot = smp_epoch_barrier_slot(barrier, member, barrier->step);

    return atomic_load_explicit(&slot->notice.step, memory_order_acquire) ==
           barrier->step;
}

/* Whether all have. */
static inline bool
smp_epoch_barrier_arrived(smp_epoch_barrier *barrier)
{
    while (barrier->awaited < barrier->size) {
        if (!smp_epoch_barrier_posted(barrier, barrier->awaited)) {
            return false;
        }
        barrier->awaited++;
    }
    return true;
}

/* Waits until all have posted, a missing one is in trouble (below), or until_ns.
 */
void smp_epoch_barrier_wait(smp_epoch_barrier *barrier, int64_t until_ns);

/* The same for a few microseconds, if a waiter may keep its core: without the clock. */
bool smp_epoch_barrier_look(smp_epoch_barrier *barrier);

/* The control block of another group with an unfinished operation of the member, first
 * one with the member asleep.  Else of a given-up one; or NULL.
 */
const smp_control_block *smp_epoch_barrier_elsewhere(const smp_epoch_barrier *barrier,
                                                     int                      member);

/* Whether a missing one will never come; *member is the first dead one, or the first.
 * SMP_OK: none.  SMP_ERR_PEER_LOST; SMP_ERR_CLOSED: it has ended or left the group; any
 * other: it gave up with this status. */
smp_status smp_epoch_barrier_trouble(const smp_epoch_barrier *barrier, int *member);

/* This member reads nothing more of the present step. */
void smp_epoch_barrier_read(smp_epoch_barrier *barrier);

/* Tells the others of this member's giving up, and why. */
void smp_epoch_barrier_fail(smp_epoch_barrier *barrier, smp_status status,
                            const char *why);

/* Whether one of the others has done so: *member is the first.  Its status; SMP_OK:
 * none has. */
smp_status smp_epoch_barrier_given_up(const smp_epoch_barrier *barrier, int *member);

/* Whether all have posted the present step, for a member after giving up: a later
 * poster sees the giving up. */
bool smp_epoch_barrier_all_here(const smp_epoch_barrier *barrier);

/* After a failure in an operation with use of each other's memory, begun by all: waits
 * for members perhaps still using this one's, until they post `last` or give up too;
 * for a second at most. */
void smp_epoch_barrier_retreat(const smp_epoch_barrier *barrier, uint64_t last);

/* The other members; their entries are owned with the array [size], and the own entry
 * is empty.  NULL: no memory. */
smp_user *smp_epoch_barrier_users(const smp_epoch_barrier *barrier);

/* A member's text at its giving up, cut off at `bytes`; false: it has not given up. */
bool smp_epoch_barrier_why(const smp_epoch_barrier *barrier, int member, char *out,
                           size_t bytes);

/* Whether these bytes of a member's memory are in its arena, mapped by all members. */
bool smp_epoch_barrier_in_arena(const smp_epoch_barrier *barrier, int member,
                                uint64_t address, size_t bytes);

/* The address in this process of bytes of a member's memory, if in that member's arena
 * or this process's own; else NULL. */
uint8_t *smp_epoch_barrier_mapped(const smp_epoch_barrier *barrier, int member,
                                  uint64_t address, size_t bytes);

/* Copies from a member's unmapped memory; bytes 0: nothing.  SMP_ERR_PEER_LOST,
 * SMP_ERR_CLOSED: it has none any more; SMP_ERR_SYSTEM: the address cannot be read. */
smp_status smp_epoch_barrier_copy(const smp_epoch_barrier *barrier, int member,
                                  void *to, uint64_t from, size_t bytes);

#endif
