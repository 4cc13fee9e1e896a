/* The common state of this folder's files: the transport, and its reached ranks.
 *
 * Status  UCX has run over TCP and shared memory, on no InfiniBand or RoCE yet.
 */
#ifndef SMP_COMM_TRANSPORT_UCX_STATE_H
#define SMP_COMM_TRANSPORT_UCX_STATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/transport/connecting/lifeline.h"
#include "comm/transport/connecting/meet.h"
#include "comm/transport/transport.h"
#include "comm/transport/ucx/arrivals.h"
#include "comm/transport/ucx/ucp_abi.h"
#include "common/lock.h"
#include "common/status.h"

typedef struct smp_ucx          smp_ucx;
typedef struct smp_ucx_peer     smp_ucx_peer;
typedef struct smp_ucx_outgoing smp_ucx_outgoing; /* of transfer.c */

/* A transfer's place among those under way; its first member. */
typedef struct smp_ucx_link {
    struct smp_ucx_link *next;
    struct smp_ucx_link *previous;
} smp_ucx_link;

struct smp_ucx_peer {
    smp_ucx  *self; /* borrowed */
    int       rank;
    int       fd; /* owned: the lifeline */
    smp_watch watch;
    ucp_ep   *ep;         /* owned; NULL: closed */
    bool      closing;    /* UCX is closing it */
    uint64_t  their_pass; /* in our messages */
    uint64_t  our_pass;   /* in its messages */
    bool      heard;      /* its hello has come */
    bool      tried_head; /* its patterns have come, and are right */
    bool      tried_block;
    bool      told;   /* all has been said to it */
    bool      agreed; /* it has heard ours, and said so */
    bool      met;    /* both */

    const char *distrust; /* the failure of a trial; NULL: none */

    /* The progress thread's, once connected. */
    uint64_t         sent;         /* messages */
    bool             gone;         /* nothing more comes or goes */
    bool             ended;        /* the lifeline's other end is closed */
    smp_status       fault;        /* from UCX or its messages; SMP_OK: none */
    bool             said_goodbye; /* it is queued */
    bool             goodbye_came;
    bool             arrived; /* the other side has all up to the goodbye */
    smp_ucx_arrivals arrivals;
};

struct smp_ucx {
    const smp_host *host;  /* borrowed */
    const smp_ucp  *ucp;   /* the library's */
    bool            only;  /* comm_interface names the usable devices */
    bool            named; /* comm_transports asks for it */
    bool            has_warned;
    char            secret[SMP_LIFELINE_SECRET];
    smp_tcp_door    door;
    ucp_context    *context; /* owned; NULL: no rank is wanted */
    ucp_worker     *worker;  /* owned */
    int             efd;     /* the worker's; -1 */
    smp_watch       watch;
    int             npeers;

    /* The progress thread's. */
    smp_ucx_link *sending;  /* owned: outgoing ones under way */
    smp_ucx_link *fetching; /* owned: incoming ones */
    bool          news;     /* a peer's flags have changed */

    _Atomic bool   awake;  /* the progress thread looks at the queue: no kick needed */
    _Atomic size_t queued; /* messages in queue */
    smp_lock       lock;   /* guards the queue */
    smp_ucx_outgoing *queue; /* owned: oldest first, not yet given to UCX */
    smp_ucx_outgoing *queue_last;

    smp_ucx_peer *peers[]; /* owned: [size]; NULL: not reached */
};

#endif
