/* Messages beside smp_comm_receive(), for the owner of an open channel: groups'
 * messages, with several threads waiting at once.
 *
 * Such a message begins with an smp_post_head.  A message without nonce waits until a
 * channel with its address is open.  One with a nonce is for that channel alone, and is
 * dropped after the channel's close.
 *
 * Ownership  put takes a message, get gives it.  A channel is its owner's memory, from
 *            open until close.
 * Threads    put: any.  The rest: the channel's owner.
 */
#ifndef SMP_COMM_MESSAGING_POST_H
#define SMP_COMM_MESSAGING_POST_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/memory/doorbell.h"
#include "comm/memory/message.h"
#include "common/lock.h"

#define SMP_POST_MARK 0x70756f7267706d73u

typedef struct {
    uint64_t mark;
    uint64_t address;
    uint64_t nonce; /* of the channel; 0: whichever is open to all */
} smp_post_head;

typedef struct smp_channel {
    uint64_t    address; /* set before open, like the nonce */
    uint64_t    nonce;   /* not 0 */
    const char *name;    /* borrowed: for errors, or NULL */

    _Atomic size_t count;    /* messages in it */
    bool           is_open;  /* to messages without a nonce; the post's own, as below */
    smp_doorbell  *doorbell; /* borrowed: rung when something comes, or NULL */
    smp_message_list messages; /* owned */
    smp_message *kept; /* taken by the owner for a later look, linked by next; the owner
                          alone changes them, under the lock */
    struct smp_channel *next;
} smp_channel;

typedef struct {
    smp_lock         lock; /* guards all below, and the channels */
    smp_channel     *channels;
    smp_message_list unexpected; /* owned: for channels yet to be opened */
} smp_post;

void smp_post_init(smp_post *post);

/* All channels are closed.  Frees the messages left. */
void smp_post_fini(smp_post *post);

/* Whether a message is for a channel. */
bool smp_post_is(const smp_message *message);

/* Takes such a message. */
void smp_post_put(smp_post *post, smp_message *message);

/* Takes back a message without nonce, found to be for the next channel with its
 * address. */
void smp_post_keep(smp_post *post, smp_message *message);

/* Opens a channel to all; unexpected messages for it are in it. */
void smp_channel_open(smp_post *post, smp_channel *channel);

/* From now on only messages with its nonce go in. */
void smp_channel_narrow(smp_post *post, smp_channel *channel);

/* The channel's name from now on: borrowed, or NULL.  No thread reads the name
 * before. */
void smp_channel_set_name(smp_post *post, smp_channel *channel, const char *name);

/* The doorbell to ring from now on; NULL: none. */
void smp_channel_set_doorbell(smp_post *post, smp_channel *channel,
                              smp_doorbell *doorbell);

/* Shows the messages in other channels before their owners' look, until `look` says
 * true: then true.  The post is locked meanwhile. */
bool smp_post_elsewhere(smp_post *post, const smp_channel *here,
                        bool (*look)(void *arg, const char *name,
                                     const smp_message *message),
                        void *arg);

/* Frees the messages left in it. */
void smp_channel_close(smp_post *post, smp_channel *channel);

/* The oldest message, or NULL. */
smp_message *smp_channel_get(smp_post *post, smp_channel *channel);

#endif
