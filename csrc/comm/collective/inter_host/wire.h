/* Parcels between members of a group on different hosts, through their comm.
 *
 * They meet by a hello from each to each, with a random nonce.  From then on a parcel
 * goes to the nonce of its receiver, so no group takes an earlier group's.  Parcels are
 * kept until taken.
 *
 * Ownership  A wire borrows its comm.  A taken parcel is its taker's, given back by
 *            smp_message_free().
 * Threads    one at a time; parcels are received by the comm's progress thread.
 */
#ifndef SMP_COMM_COLLECTIVE_INTER_HOST_WIRE_H
#define SMP_COMM_COLLECTIVE_INTER_HOST_WIRE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/collective/checks/call.h"
#include "comm/collective/checks/rank_list.h"
#include "comm/messaging/comm.h"
#include "comm/messaging/post.h"
#include "common/deadline.h"
#include "common/status.h"

typedef enum {
    SMP_PARCEL_HELLO,
    SMP_PARCEL_CALLS, /* the calls of a host's members */
    SMP_PARCEL_NOTE,  /* a host's members yet to come */
    SMP_PARCEL_DATA,
    SMP_PARCEL_FAILED, /* its sender gives up: status, and why in words */
    SMP_PARCEL_LEFT,   /* its sender has destroyed the group */
    SMP_PARCELS
} smp_parcel_kind;

/* The beginning of every parcel. */
typedef struct {
    smp_post_head post;
    uint32_t      kind;
    int32_t       member;   /* its sender */
    uint64_t      sequence; /* of the operation */
    uint64_t      tag;      /* DATA: its number; FAILED: the status */
    uint64_t      nonce;    /* HELLO: the sender's, */
    uint64_t      known;    /* ... the receiver's, if it has come, or 0, */
    uint64_t      digest;   /* ... of the list of members, */
    uint64_t      host;     /* ... and the lowest member on the sender's host */
} smp_parcel;

/* A member as known here. */
typedef struct {
    int        rank;  /* of the comm */
    bool       local; /* it is on this host, and gets no parcels */
    bool       greeted;
    bool       left;
    uint64_t   nonce; /* 0: no hello has come */
    int        host;  /* the lowest member on its host */
    smp_status failed;
    uint64_t   failed_in; /* the operation of its giving up */
    char      *why;       /* owned; NULL: it has not said */
} smp_far;

typedef struct {
    smp_comm        *comm; /* borrowed */
    int              size;
    int              self;
    int              host; /* the lowest member on this host */
    uint64_t         digest;
    smp_far         *members;      /* owned: [size] */
    smp_channel      channel;      /* keeps parcels in the order of their arrival */
    _Atomic uint64_t tensor_bytes; /* sent, as in smp_group_use, like the two below */
    _Atomic uint64_t other_bytes;
    _Atomic uint64_t parcels;
} smp_wire;

/* Sends the hellos.  ranks[size] of a connected comm, this one's is ranks[self];
 * local[m]: it is on this host; `name` is borrowed, for errors.  SMP_ERR_NO_MEMORY;
 * errors of smp_comm_send() with *failed, a rank. */
smp_status smp_wire_init(smp_wire *wire, smp_comm *comm, const int *ranks,
                         const bool *local, int size, int self, uint64_t id,
                         const char *name, int *failed);

/* Waits for the others' hellos, on a doorbell of its own until fini. SMP_ERR_TIMED_OUT,
 * SMP_ERR_PEER_LOST, SMP_ERR_CLOSED, SMP_ERR_MISMATCH (another list of members),
 * SMP_ERR_UNREACHABLE (it does not see the same hosts), SMP_ERR_INTERRUPTED, all with
 * *failed. */
smp_status smp_wire_meet(smp_wire *wire, smp_doorbell *doorbell,
                         const smp_deadline *deadline, int *failed);

/* Adds the members of other hosts missing at a meeting. */
void smp_wire_absent(const smp_wire *wire, smp_rank_list *absent);

/* Tells the others of this member's leave.  Takes an all-zero one. */
void smp_wire_fini(smp_wire *wire);

/* Sends a parcel to a member of another host: a copy of `rest` behind the head, and a
 * block, taken, or NULL.  SMP_ERR_PEER_LOST, SMP_ERR_CLOSED, SMP_ERR_NO_MEMORY. */
smp_status smp_wire_send(smp_wire *wire, int member, smp_parcel_kind kind,
                         uint64_t sequence, uint64_t tag, const void *rest,
                         size_t bytes, smp_block *block);

/* Tells all other hosts' members of this one's giving up. */
void smp_wire_fail(smp_wire *wire, uint64_t sequence, smp_status status,
                   const char *why);

/* Sorts in the arrived parcels.  SMP_ERR_MALFORMED, SMP_ERR_NO_MEMORY: *member is the
 * sender. */
smp_status smp_wire_receive(smp_wire *wire, int *member);

/* Whether a parcel has come and is not sorted in. */
static inline bool
smp_wire_stirs(const smp_wire *wire)
{
    return atomic_load(&wire->channel.count) != 0;
}

/* Takes the first parcel of this kind, sender, operation and tag; NULL: none has
 * come. */
smp_message *smp_wire_take(smp_wire *wire, smp_parcel_kind kind, int member,
                           uint64_t sequence, uint64_t tag);

/* The same, without taking it. */
const smp_message *smp_wire_find(const smp_wire *wire, smp_parcel_kind kind, int member,
                                 uint64_t sequence, uint64_t tag);

/* The call of a member of another host in another group, from parcels not yet taken by
 * this rank: the group's name and the call, in words.  False: none is known. */
bool smp_wire_elsewhere(const smp_wire *wire, int member, char *name, size_t name_bytes,
                        char *call, size_t call_bytes);

/* The bytes behind the head. */
static inline const uint8_t *
smp_parcel_rest(const smp_message *message, size_t *bytes)
{
    *bytes = message->nbytes - sizeof(smp_parcel);
    return message->bytes + sizeof(smp_parcel);
}

#endif
