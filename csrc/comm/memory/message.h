/* Messages from the inside.  smp_message_take_block and smp_message_free of
 * comm/comm.h are implemented in message.c. */
#ifndef SMP_COMM_MEMORY_MESSAGE_H
#define SMP_COMM_MEMORY_MESSAGE_H

#include <stddef.h>

#include "comm/comm.h"
#include "common/status.h"

/* A message with nbytes of uninitialized bytes and nblocks NULL blocks, all in one
 * piece of memory.  SMP_ERR_NO_MEMORY. */
smp_status smp_message_create(int source, size_t nbytes, size_t nblocks,
                              smp_message **out);

#endif
