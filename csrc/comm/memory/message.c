/* A message: the public struct, its table of blocks and its bytes in one allocation. */
#include "comm/memory/message.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

smp_status
smp_message_create(int source, size_t nbytes, size_t nblocks, smp_message **out)
{
    smp_message *message;
    size_t       table;

    if (nbytes > SIZE_MAX / 4 || nblocks > SIZE_MAX / 4 / sizeof(smp_block *)) {
        return SMP_ERR_NO_MEMORY;
    }
    table = nblocks * sizeof(smp_block *);
    message = malloc(sizeof(*message) + table + nbytes);
    if (message == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    message->source = source;
    message->next = NULL;
    message->blocks = (smp_block **)(message + 1);
    memset(message->blocks, 0, table);
    message->nblocks = nblocks;
    message->bytes = (uint8_t *)(message->blocks + nblocks);
    message->nbytes = nbytes;
    *out = message;
    return SMP_OK;
}

smp_block *
smp_message_take_block(smp_message *message, size_t i)
{
    smp_block *block = message->blocks[i];

    message->blocks[i] = NULL;
    return block;
}

void
smp_message_free(smp_message *message)
{
    if (message == NULL) {
        return;
    }
    for (size_t i = 0; i < message->nblocks; i++) {
        smp_block_release(message->blocks[i]);
    }
    free(message);
}

void
smp_message_list_put(smp_message_list *list, smp_message *message)
{
    message->next = NULL;
    if (list->first == NULL) {
        list->first = message;
    } else {
        list->last->next = message;
    }
    list->last = message;
}

smp_message *
smp_message_list_get(smp_message_list *list)
{
    smp_message *message = list->first;

    if (message != NULL) {
        list->first = message->next;
        message->next = NULL;
    }
    return message;
}

void
smp_message_list_clear(smp_message_list *list)
{
    smp_message *message;

    while ((message = smp_message_list_get(list)) != NULL) {
        smp_message_free(message);
    }
}
