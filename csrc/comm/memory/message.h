/* A message: a run of bytes and any number of blocks. */
#ifndef SMP_COMM_MEMORY_MESSAGE_H
#define SMP_COMM_MEMORY_MESSAGE_H

#include <stddef.h>
#include <stdint.h>

#include "comm/memory/block.h"
#include "common/status.h"

typedef struct smp_message {
    int                 source; /* sending rank */
    uint8_t            *bytes;  /* owned by the message; 8-byte aligned */
    size_t              nbytes;
    smp_block         **blocks; /* owned by the message; NULL where taken */
    size_t              nblocks;
    struct smp_message *next; /* the comm's own; free for the message's holder */
} smp_message;

/* A message with nbytes of uninitialized bytes and nblocks NULL blocks, all in one
 * piece of memory.  SMP_ERR_NO_MEMORY. */
smp_status smp_message_create(int source, size_t nbytes, size_t nblocks,
                              smp_message **out);

/* Moves block i out of the message; the caller releases it. */
smp_block *smp_message_take_block(smp_message *message, size_t i);

/* Frees the message and its remaining blocks.  Takes NULL. */
void smp_message_free(smp_message *message);

/* First in, first out; all zero is empty. */
typedef struct {
    smp_message *first; /* owned: linked by next */
    smp_message *last;
} smp_message_list;

void         smp_message_list_put(smp_message_list *list, smp_message *message);
smp_message *smp_message_list_get(smp_message_list *list); /* NULL: empty */

/* Frees all of them. */
void smp_message_list_clear(smp_message_list *list);

#endif
