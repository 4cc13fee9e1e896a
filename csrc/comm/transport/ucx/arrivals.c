/* A list of unfinished messages; the last one is looked at first. */
#include "comm/transport/ucx/arrivals.h"

#include <stdbool.h>
#include <stdlib.h>

#include "comm/transport/body.h"

/* A block ahead of its message's head. */
typedef struct early {
    struct early *next;
    uint64_t      index;
    smp_block    *block; /* owned */
} early;

struct smp_ucx_arrival {
    smp_ucx_arrival *next;
    uint64_t         number;
    bool             goodbye;
    smp_message     *message; /* owned; NULL: the head is not there */
    uint64_t        *sizes;   /* owned: [message->nblocks] */
    size_t           missing; /* blocks still to come */
    early           *early;   /* owned */
};

static void
arrival_free(const smp_host *host, smp_ucx_arrival *m)
{
    while (m->early != NULL) {
        early *e = m->early;

        m->early = e->next;
        host->block_release(e->block);
        free(e);
    }
    if (m->message != NULL) {
        host->message_free(m->message);
    }
    free(m->sizes);
    free(m);
}

/* The one with this number, made if missing. */
static smp_status
find(smp_ucx_arrivals *a, uint64_t number, smp_ucx_arrival **out)
{
    smp_ucx_arrival **at = &a->first;
    smp_ucx_arrival  *m;

    if (number < a->next) {
        return SMP_ERR_MALFORMED;
    }
    if (a->last != NULL && a->last->number == number) {
        *out = a->last;
        return SMP_OK;
    }
    if (a->last != NULL && a->last->number < number) {
        at = &a->last->next;
    }
    while (*at != NULL && (*at)->number < number) {
        at = &(*at)->next;
    }
    if (*at != NULL && (*at)->number == number) {
        *out = *at;
        return SMP_OK;
    }
    m = calloc(1, sizeof(*m));
    if (m == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    m->number = number;
    m->next = *at;
    if (*at == NULL) {
        a->last = m;
    }
    *at = m;
    *out = m;
    return SMP_OK;
}

/* Puts a block into its place; takes it. */
static smp_status
place(const smp_host *host, smp_ucx_arrival *m, uint64_t index, smp_block *block)
{
    if (index >= m->message->nblocks || m->message->blocks[index] != NULL ||
        host->block_bytes(block) != m->sizes[index]) {
        host->block_release(block);
        return SMP_ERR_MALFORMED;
    }
    m->message->blocks[index] = block;
    m->missing--;
    return SMP_OK;
}

static smp_status
place_early(const smp_host *host, smp_ucx_arrival *m)
{
    while (m->early != NULL) {
        early     *e = m->early;
        smp_status status = place(host, m, e->index, e->block);

        m->early = e->next;
        free(e);
        if (status != SMP_OK) {
            return status;
        }
    }
    return SMP_OK;
}

void
smp_ucx_arrivals_init(smp_ucx_arrivals *a, const smp_host *host, int rank)
{
    *a = (smp_ucx_arrivals){.host = host, .rank = rank};
}

void
smp_ucx_arrivals_fini(smp_ucx_arrivals *a)
{
    while (a->first != NULL) {
        smp_ucx_arrival *m = a->first;

        a->first = m->next;
        arrival_free(a->host, m);
    }
    a->last = NULL;
}

smp_status
smp_ucx_arrivals_head(smp_ucx_arrivals *a, uint64_t number, const void *body, size_t n,
                      uint64_t nbytes, uint64_t nblocks)
{
    smp_ucx_arrival *m;
    smp_status       status = find(a, number, &m);

    if (status != SMP_OK) {
        return status;
    }
    if (m->message != NULL || m->goodbye) {
        return SMP_ERR_MALFORMED;
    }
    status = smp_body_read(a->host, a->rank, body, n, nbytes, nblocks, &m->message);
    if (status != SMP_OK) {
        return status;
    }
    m->sizes = malloc(nblocks * sizeof(uint64_t) + 1);
    if (m->sizes == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    for (size_t i = 0; i < nblocks; i++) {
        m->sizes[i] = smp_body_size(body, i);
        m->missing += m->message->blocks[i] == NULL;
    }
    return place_early(a->host, m);
}

smp_status
smp_ucx_arrivals_block(smp_ucx_arrivals *a, uint64_t number, uint64_t index,
                       smp_block *block)
{
    smp_ucx_arrival *m;
    smp_status       status = find(a, number, &m);
    early           *e;

    if (status == SMP_OK && m->message != NULL) {
        return place(a->host, m, index, block);
    }
    e = status == SMP_OK ? malloc(sizeof(*e)) : NULL;
    if (e == NULL) {
        a->host->block_release(block);
        return status == SMP_OK ? SMP_ERR_NO_MEMORY : status;
    }
    *e = (early){.next = m->early, .index = index, .block = block};
    m->early = e;
    return SMP_OK;
}

smp_status
smp_ucx_arrivals_goodbye(smp_ucx_arrivals *a, uint64_t number)
{
    smp_ucx_arrival *m;
    smp_status       status = find(a, number, &m);

    if (status != SMP_OK) {
        return status;
    }
    if (m->message != NULL || m->goodbye || m->early != NULL) {
        return SMP_ERR_MALFORMED;
    }
    m->goodbye = true;
    return SMP_OK;
}

smp_ucx_next
smp_ucx_arrivals_next(smp_ucx_arrivals *a, smp_message **out)
{
    smp_ucx_arrival *m = a->first;
    smp_ucx_next     kind = SMP_UCX_NOTHING;

    if (m == NULL || m->number != a->next) {
        return SMP_UCX_NOTHING;
    }
    if (m->goodbye) {
        kind = SMP_UCX_GOODBYE;
    } else if (m->message != NULL && m->missing == 0) {
        kind = SMP_UCX_MESSAGE;
        *out = m->message;
        m->message = NULL;
    } else {
        return SMP_UCX_NOTHING;
    }
    a->next++;
    a->first = m->next;
    if (a->first == NULL) {
        a->last = NULL;
    }
    arrival_free(a->host, m);
    return kind;
}
