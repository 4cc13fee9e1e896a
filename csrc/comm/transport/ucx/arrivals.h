/* Messages of one sender put together from parts in any order of arrival.
 *
 * A message has a number, a head with its body (comm/transport/body.h) and its larger
 * blocks, each arriving by itself.  Messages come out in the order of their numbers,
 * and a goodbye in its turn.
 *
 * Ownership  Parts put in belong to the arrivals; messages from next(), to the caller.
 * Threads    one at a time.
 * Errors     SMP_ERR_NO_MEMORY; SMP_ERR_MALFORMED: parts do not fit one another.
 */
#ifndef SMP_COMM_TRANSPORT_UCX_ARRIVALS_H
#define SMP_COMM_TRANSPORT_UCX_ARRIVALS_H

#include <stddef.h>
#include <stdint.h>

#include "comm/transport/transport.h"
#include "common/status.h"

typedef struct smp_ucx_arrival smp_ucx_arrival;

typedef struct {
    const smp_host  *host;  /* borrowed */
    int              rank;  /* the sender */
    uint64_t         next;  /* number of the next message to come out */
    smp_ucx_arrival *first; /* owned: by their numbers */
    smp_ucx_arrival *last;
} smp_ucx_arrivals;

typedef enum { SMP_UCX_NOTHING, SMP_UCX_MESSAGE, SMP_UCX_GOODBYE } smp_ucx_next;

void smp_ucx_arrivals_init(smp_ucx_arrivals *a, const smp_host *host, int rank);
void smp_ucx_arrivals_fini(smp_ucx_arrivals *a);

/* The body is borrowed. */
smp_status smp_ucx_arrivals_head(smp_ucx_arrivals *a, uint64_t number, const void *body,
                                 size_t n, uint64_t nbytes, uint64_t nblocks);

/* Block `index` of a message; taken, whatever it returns. */
smp_status smp_ucx_arrivals_block(smp_ucx_arrivals *a, uint64_t number, uint64_t index,
                                  smp_block *block);

smp_status smp_ucx_arrivals_goodbye(smp_ucx_arrivals *a, uint64_t number);

/* The next message, if complete. */
smp_ucx_next smp_ucx_arrivals_next(smp_ucx_arrivals *a, smp_message **out);

#endif
