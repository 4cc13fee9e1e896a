/* The ranks' messages over UCX: the header of every active message. */
#ifndef SMP_COMM_TRANSPORT_UCX_AM_H
#define SMP_COMM_TRANSPORT_UCX_AM_H

#include <stddef.h>
#include <stdint.h>

/* The number of our active messages, of our choice. */
#define SMP_UCX_AM_ID 7u

typedef enum {
    SMP_UCX_AM_HELLO = 1, /* the first one of a connection */
    SMP_UCX_AM_HEAD =
        2, /* a message of `first` bytes and `second` blocks: arrivals.h */
    SMP_UCX_AM_BLOCK = 3,   /* block `first` of a message */
    SMP_UCX_AM_GOODBYE = 4, /* the last one */

    /* Patterns behind the first hello, sent as a head and as a block. */
    SMP_UCX_AM_TRY_HEAD = 5,
    SMP_UCX_AM_TRY_BLOCK = 6
} smp_ucx_am_kind;

/* Bytes of the two patterns (common/pattern.h), with the pass and its inverted bits as
 * seeds. */
#define SMP_UCX_TRY_HEAD_BYTES ((size_t)1000)
#define SMP_UCX_TRY_BLOCK_BYTES ((size_t)65536)

typedef struct {
    uint64_t pass; /* the receiver's; see introduction.h */
    uint32_t kind; /* smp_ucx_am_kind */
    int32_t  from; /* rank */
    uint64_t
        number; /* of the message, or the goodbye, among the sender's to this rank */
    uint64_t first;
    uint64_t second;
} smp_ucx_am;

#endif
