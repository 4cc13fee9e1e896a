/* Hellos, and kept parcels. */
#define _GNU_SOURCE
#include "comm/collective/inter_host/wire.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/collective/checks/agreement.h"
#include "comm/collective/checks/identity.h"
#include "comm/messaging/neighbour.h"
#include "common/clock.h"

static smp_parcel
head_of(const smp_message *message)
{
    smp_parcel head;

    memcpy(&head, message->bytes, sizeof(head));
    return head;
}

/* ---------------------------------------------------------------------- sending */

static smp_status
send(smp_wire *wire, int member, smp_parcel *head, const void *rest, size_t bytes,
     smp_block *block)
{
    size_t     nbytes = sizeof(*head) + bytes;
    uint64_t   tensor = block != NULL ? smp_block_bytes(block) : 0;
    uint8_t   *whole = malloc(nbytes);
    smp_status status;

    if (whole == NULL) {
        if (block != NULL) {
            smp_block_release(block);
        }
        return SMP_ERR_NO_MEMORY;
    }
    head->post.mark = SMP_POST_MARK;
    head->post.address = wire->channel.address;
    head->member = wire->self;
    memcpy(whole, head, sizeof(*head));
    if (bytes != 0) {
        memcpy(whole + sizeof(*head), rest, bytes);
    }
    status = smp_comm_send(wire->comm, wire->members[member].rank, whole, nbytes,
                           &block, block != NULL);
    free(whole);
    if (status == SMP_OK) {
        atomic_fetch_add_explicit(&wire->parcels, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&wire->tensor_bytes, tensor, memory_order_relaxed);
        atomic_fetch_add_explicit(&wire->other_bytes, nbytes, memory_order_relaxed);
    }
    return status;
}

static smp_status
send_hello(smp_wire *wire, int member)
{
    smp_parcel hello = {
        .kind = SMP_PARCEL_HELLO,
        .nonce = wire->channel.nonce,
        .known = wire->members[member].nonce,
        .digest = wire->digest,
        .host = (uint64_t)wire->host,
    };

    return send(wire, member, &hello, NULL, 0, NULL);
}

smp_status
smp_wire_send(smp_wire *wire, int member, smp_parcel_kind kind, uint64_t sequence,
              uint64_t tag, const void *rest, size_t bytes, smp_block *block)
{
    smp_parcel head = {
        .post.nonce = wire->members[member].nonce,
        .kind = kind,
        .sequence = sequence,
        .tag = tag,
    };

    return send(wire, member, &head, rest, bytes, block);
}

void
smp_wire_fail(smp_wire *wire, uint64_t sequence, smp_status status, const char *why)
{
    for (int m = 0; m < wire->size; m++) {
        const smp_far *far = &wire->members[m];

        /* A departed one needs no news. */
        if (!far->local && far->nonce != 0) {
            (void)smp_wire_send(wire, m, SMP_PARCEL_FAILED, sequence, status, why,
                                strlen(why) + 1, NULL);
        }
    }
}

/* -------------------------------------------------------------------- receiving */

/* A hello with news is answered. */
static smp_status
take_hello(smp_wire *wire, const smp_parcel *hello)
{
    smp_far *far = &wire->members[hello->member];
    bool     is_new = far->nonce != hello->nonce;

    far->nonce = hello->nonce;
    far->host = hello->host < (uint64_t)wire->size ? (int)hello->host : -1;
    far->greeted = hello->known == wire->channel.nonce;
    return is_new ? send_hello(wire, hello->member) : SMP_OK;
}

/* The message's sender, a member of another host, or -1. */
static int
member_at(const smp_wire *wire, int rank)
{
    for (int m = 0; m < wire->size; m++) {
        if (wire->members[m].rank == rank && !wire->members[m].local) {
            return m;
        }
    }
    return -1;
}

/* Whether the member has made this group, left it, and makes the next with its id. */
static bool
is_early(const smp_wire *wire, const smp_message *message, int member)
{
    smp_parcel head;

    if (message->nbytes < sizeof(head)) {
        return false;
    }
    head = head_of(message);
    return head.kind == SMP_PARCEL_HELLO && wire->members[member].greeted &&
           wire->members[member].nonce != head.nonce;
}

/* Whether the message is that member's; a sender with another list of members may have
 * another number. */
static smp_status
check(const smp_wire *wire, const smp_message *message, int member)
{
    smp_parcel head;

    if (message->nbytes < sizeof(head)) {
        return SMP_ERR_MALFORMED;
    }
    head = head_of(message);
    if (head.kind == SMP_PARCEL_HELLO && head.digest != wire->digest) {
        return SMP_ERR_MISMATCH;
    }
    return head.kind < SMP_PARCELS && head.member == member ? SMP_OK
                                                            : SMP_ERR_MALFORMED;
}

static smp_status
take_failure(smp_far *far, const smp_message *message)
{
    smp_parcel  head = head_of(message);
    size_t      bytes;
    const char *why = (const char *)smp_parcel_rest(message, &bytes);

    if (head.tag == SMP_OK || head.tag > SMP_ERR_SYSTEM || bytes == 0 ||
        bytes > SMP_WHY_BYTES || memchr(why, '\0', bytes) == NULL) {
        return SMP_ERR_MALFORMED;
    }
    if (far->failed == SMP_OK) {
        far->failed = (smp_status)head.tag;
        far->failed_in = head.sequence;
        far->why = strdup(why);
    }
    return SMP_OK;
}

/* Other groups may look at kept parcels. */
static void
keep(smp_wire *wire, smp_message *message)
{
    smp_lock     *lock = &smp_comm_post(wire->comm)->lock;
    smp_message **at = &wire->channel.kept;

    while (*at != NULL) {
        at = &(*at)->next;
    }
    message->next = NULL;
    smp_lock_acquire(lock);
    *at = message;
    smp_lock_release(lock);
}

/* Takes it out of the kept ones. */
static smp_message *
unkeep(smp_wire *wire, smp_message **at)
{
    smp_lock    *lock = &smp_comm_post(wire->comm)->lock;
    smp_message *message = *at;

    smp_lock_acquire(lock);
    *at = message->next;
    smp_lock_release(lock);
    message->next = NULL;
    return message;
}

static void
drop_note(smp_wire *wire, int member)
{
    smp_message **at = &wire->channel.kept;

    while (*at != NULL) {
        smp_parcel head = head_of(*at);

        if (head.kind == SMP_PARCEL_NOTE && head.member == member) {
            smp_message_free(unkeep(wire, at));
        } else {
            at = &(*at)->next;
        }
    }
}

/* Takes the message. */
static smp_status
sort_in(smp_wire *wire, smp_message *message, int *member)
{
    int        source = member_at(wire, message->source);
    smp_parcel head;
    smp_status status;

    if (source < 0) { /* no member: it will not get an answer either */
        smp_message_free(message);
        return SMP_OK;
    }
    *member = source;
    if (is_early(wire, message, source)) {
        smp_post_keep(smp_comm_post(wire->comm), message);
        return SMP_OK;
    }
    status = check(wire, message, source);
    if (status != SMP_OK) {
        smp_message_free(message);
        return status;
    }
    head = head_of(message);
    switch ((smp_parcel_kind)head.kind) {
    case SMP_PARCEL_HELLO:
        status = take_hello(wire, &head);
        break;
    case SMP_PARCEL_FAILED:
        status = take_failure(&wire->members[head.member], message);
        break;
    case SMP_PARCEL_LEFT:
        wire->members[head.member].left = true;
        break;
    case SMP_PARCEL_NOTE: /* the last of a member counts */
        drop_note(wire, head.member);
        keep(wire, message);
        return SMP_OK;
    case SMP_PARCEL_CALLS:
    case SMP_PARCEL_DATA:
        keep(wire, message);
        return SMP_OK;
    case SMP_PARCELS:
        break;
    }
    smp_message_free(message);
    return status;
}

smp_status
smp_wire_receive(smp_wire *wire, int *member)
{
    smp_status   status = SMP_OK;
    smp_message *message;

    while (status == SMP_OK && (message = smp_channel_get(smp_comm_post(wire->comm),
                                                          &wire->channel)) != NULL) {
        status = sort_in(wire, message, member);
    }
    return status;
}

static bool
is_wanted(const smp_message *message, smp_parcel_kind kind, int member,
          uint64_t sequence, uint64_t tag)
{
    smp_parcel head = head_of(message);

    return head.kind == kind && head.member == member && head.sequence == sequence &&
           head.tag == tag;
}

const smp_message *
smp_wire_find(const smp_wire *wire, smp_parcel_kind kind, int member, uint64_t sequence,
              uint64_t tag)
{
    const smp_message *message = wire->channel.kept;

    while (message != NULL && !is_wanted(message, kind, member, sequence, tag)) {
        message = message->next;
    }
    return message;
}

smp_message *
smp_wire_take(smp_wire *wire, smp_parcel_kind kind, int member, uint64_t sequence,
              uint64_t tag)
{
    smp_message **at = &wire->channel.kept;

    while (*at != NULL && !is_wanted(*at, kind, member, sequence, tag)) {
        at = &(*at)->next;
    }
    return *at != NULL ? unkeep(wire, at) : NULL;
}

/* The rank sought by smp_wire_elsewhere(), and the place of the result. */
typedef struct {
    int    rank;
    char  *name;
    size_t name_bytes;
    char  *call;
    size_t call_bytes;
} elsewhere;

/* A node leader's parcel begins with its own call. */
static bool
is_call_of(void *arg, const char *name, const smp_message *message)
{
    const elsewhere *e = arg;
    smp_notice       notice;
    size_t           bytes;

    if (message->source != e->rank || message->nbytes < sizeof(smp_parcel) ||
        head_of(message).kind != SMP_PARCEL_CALLS) {
        return false;
    }
    (void)smp_parcel_rest(message, &bytes);
    if (bytes < sizeof(notice)) {
        return false;
    }
    memcpy(&notice, smp_parcel_rest(message, &bytes), sizeof(notice));
    snprintf(e->name, e->name_bytes, "%s", name);
    smp_notice_describe(&notice, e->call, e->call_bytes);
    return true;
}

bool
smp_wire_elsewhere(const smp_wire *wire, int member, char *name, size_t name_bytes,
                   char *call, size_t call_bytes)
{
    elsewhere e = {wire->members[member].rank, name, name_bytes, call, call_bytes};

    return smp_post_elsewhere(smp_comm_post(wire->comm), &wire->channel, is_call_of,
                              &e);
}

/* ---------------------------------------------------------------------- meeting */

smp_status
smp_wire_init(smp_wire *wire, smp_comm *comm, const int *ranks, const bool *local,
              int size, int self, uint64_t id, const char *name, int *failed)
{
    smp_status status = SMP_OK;

    *wire = (smp_wire){
        .comm = comm,
        .size = size,
        .self = self,
        .digest = smp_members_digest(ranks, size),
        .members = calloc((size_t)size, sizeof(smp_far)),
        .channel = {.address = id, .nonce = smp_new_nonce(wire), .name = name},
    };
    if (wire->members == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    for (int m = size; m-- > 0;) {
        wire->members[m] = (smp_far){.rank = ranks[m], .local = local[m]};
        wire->host = local[m] ? m : wire->host;
    }
    smp_channel_open(smp_comm_post(comm), &wire->channel);
    for (int m = 0; m < size && status == SMP_OK; m++) {
        wire->members[m].host = wire->host;
        if (!local[m]) {
            status = send_hello(wire, m);
            *failed = ranks[m];
        }
    }
    if (status != SMP_OK) {
        smp_wire_fini(wire);
    }
    return status;
}

/* A member ended without a greeting, or -1. */
static int
find_gone(const smp_wire *wire)
{
    for (int m = 0; m < wire->size; m++) {
        const smp_far *far = &wire->members[m];

        if (!far->local && !far->greeted && smp_comm_gone(wire->comm, far->rank)) {
            return m;
        }
    }
    return -1;
}

/* SMP_OK: all have greeted; SMP_ERR_TIMED_OUT: not yet.  *failed is one of them. */
static smp_status
look_for_hellos(smp_wire *wire, int *failed)
{
    /* Before the look at arrivals: an ended one's messages are there by then. */
    int        gone = find_gone(wire);
    int        member = wire->self;
    smp_status status = smp_wire_receive(wire, &member);

    if (status != SMP_OK) {
        *failed = wire->members[member].rank;
        return status;
    }
    if (gone >= 0 && !wire->members[gone].greeted) {
        *failed = wire->members[gone].rank;
        return smp_comm_left(wire->comm, *failed) ? SMP_ERR_CLOSED : SMP_ERR_PEER_LOST;
    }
    for (int m = 0; m < wire->size; m++) {
        const smp_far *far = &wire->members[m];

        /* A member may have greeted, made the group, and left it. */
        if (far->failed != SMP_OK && far->failed_in == 0) {
            *failed = far->rank;
            return far->failed;
        }
        if (far->left && !far->greeted) {
            *failed = far->rank;
            return SMP_ERR_CLOSED;
        }
        if (!far->local && !far->greeted) {
            *failed = far->rank;
            status = SMP_ERR_TIMED_OUT;
        }
    }
    return status;
}

void
smp_wire_absent(const smp_wire *wire, smp_rank_list *absent)
{
    for (int m = 0; m < wire->size; m++) {
        const smp_far *far = &wire->members[m];

        if (!far->local && !far->greeted) {
            smp_rank_list_add(absent, smp_comm_name(wire->comm, far->rank));
        }
    }
}

/* Whether all members see the same hosts. */
static smp_status
check_hosts(const smp_wire *wire, int *failed)
{
    for (int m = 0; m < wire->size; m++) {
        const smp_far *far = &wire->members[m];
        bool           here = far->host == wire->host;

        if (far->host < 0 || far->local != here ||
            wire->members[far->host].host != far->host) {
            *failed = far->rank;
            return SMP_ERR_UNREACHABLE;
        }
    }
    return SMP_OK;
}

smp_status
smp_wire_meet(smp_wire *wire, smp_doorbell *doorbell, const smp_deadline *deadline,
              int *failed)
{
    smp_status status;
    smp_status left;

    smp_channel_set_doorbell(smp_comm_post(wire->comm), &wire->channel, doorbell);
    while ((status = look_for_hellos(wire, failed)) == SMP_ERR_TIMED_OUT) {
        int64_t now = smp_clock_ns();

        left = smp_deadline_left(deadline, now);
        if (left != SMP_OK) {
            return left;
        }
        smp_doorbell_lie_down(doorbell);
        if (!smp_wire_stirs(wire)) { /* a dead member does not ring */
            smp_doorbell_sleep(doorbell, now + SMP_DEADLINE_LOOK_NS);
        }
        smp_doorbell_get_up(doorbell);
    }
    if (status != SMP_OK) {
        return status;
    }
    smp_channel_narrow(smp_comm_post(wire->comm), &wire->channel);
    return check_hosts(wire, failed);
}

void
smp_wire_fini(smp_wire *wire)
{
    if (wire->members == NULL) {
        return;
    }
    for (int m = 0; m < wire->size; m++) {
        smp_far *far = &wire->members[m];

        if (!far->local && far->nonce != 0 && !far->left) {
            (void)smp_wire_send(wire, m, SMP_PARCEL_LEFT, 0, 0, NULL, 0, NULL);
        }
        free(far->why);
    }
    smp_channel_close(smp_comm_post(wire->comm), &wire->channel);
    while (wire->channel.kept != NULL) { /* no other reader now */
        smp_message *message = wire->channel.kept;

        wire->channel.kept = message->next;
        smp_message_free(message);
    }
    free(wire->members);
    wire->members = NULL;
}
