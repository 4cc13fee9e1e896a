/* Messages of one sender put together from parts, which may arrive in any order.
 *
 * A message has a number, a head with its body (comm/transport/body.h) and its larger
 * blocks, each of which arrives by itself.  Messages come out in the order of their
 * numbers, and a goodbye in its turn.
 *
 * Ownership  What is put in belongs to the arrivals; what next() gives, to the caller.
 * Threads    one at a time.
 * Errors     SMP_ERR_NO_MEMORY; SMP_ERR_MALFORMED: parts that do not fit one another.
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
    uint64_t         next;  /* number of the message that comes out next */
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

/* What comes next, if all of it is there. */
smp_ucx_next smp_ucx_arrivals_next(smp_ucx_arrivals *a, smp_message **out);

#endif
