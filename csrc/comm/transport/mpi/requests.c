/* Messages on their way over MPI, and MPI's requests for them. */
#include "comm/transport/mpi/requests.h"

#include <stdlib.h>

smp_mpi_transfer *
smp_mpi_new_outgoing(int dest, size_t bytes, size_t nblocks)
{
    smp_mpi_transfer *t = calloc(1, sizeof(*t));

    if (t == NULL) {
        return NULL;
    }
    t->rank = dest;
    t->head_bytes = bytes;
    t->head = malloc(bytes);
    t->blocks = calloc(nblocks + 1, sizeof(smp_block *));
    if (t->head == NULL || t->blocks == NULL) {
        free(t->head);
        free(t->blocks);
        free(t);
        return NULL;
    }
    return t;
}

void
smp_mpi_transfer_free(const smp_host *host, smp_mpi_transfer *t)
{
    for (size_t i = 0; i < t->nblocks; i++) {
        host->block_release(t->blocks[i]);
    }
    host->message_free(t->message);
    free(t->blocks);
    free(t->head);
    free(t);
}

void
smp_mpi_put_last(smp_mpi_transfers *list, smp_mpi_transfer *t)
{
    t->next = NULL;
    if (list->first == NULL) {
        list->first = t;
    } else {
        list->last->next = t;
    }
    list->last = t;
}

smp_mpi_transfer *
smp_mpi_take_first(smp_mpi_transfers *list)
{
    smp_mpi_transfer *t = list->first;

    if (t != NULL) {
        list->first = t->next;
        t->next = NULL;
    }
    return t;
}

void
smp_mpi_transfers_free(const smp_host *host, smp_mpi_transfers *list)
{
    smp_mpi_transfer *t;

    while ((t = smp_mpi_take_first(list)) != NULL) {
        smp_mpi_transfer_free(host, t);
    }
}

void
smp_mpi_free_idle(const smp_host *host, smp_mpi_transfers *list)
{
    smp_mpi_transfer *t;

    while ((t = smp_mpi_take_first(list)) != NULL) {
        if (t->pending == 0) {
            smp_mpi_transfer_free(host, t);
        }
    }
}

bool
smp_mpi_make_room(smp_mpi_requests *all, size_t more)
{
    size_t             room = 2 * (all->n + more);
    MPI_Request       *under_way;
    smp_mpi_transfer **owners;

    if (all->n + more <= all->room) {
        return true;
    }
    under_way = realloc(all->under_way, room * sizeof(MPI_Request));
    if (under_way == NULL) {
        return false;
    }
    all->under_way = under_way;
    owners = realloc(all->owners, room * sizeof(smp_mpi_transfer *));
    if (owners == NULL) {
        return false;
    }
    all->owners = owners;
    all->room = room;
    return true;
}

/* MPI has answered to the next request. */
static bool
count_started(smp_mpi_requests *all, smp_mpi_transfer *t, int result)
{
    if (result != MPI_SUCCESS) {
        return false;
    }
    all->owners[all->n++] = t;
    t->pending++;
    return true;
}

bool
smp_mpi_start(smp_mpi_requests *all, MPI_Comm comm, smp_mpi_transfer *t, void *data,
              size_t bytes, int tag)
{
    MPI_Request *request = &all->under_way[all->n];

    return count_started(
        all, t,
        t->incoming
            ? MPI_Irecv(data, (int)bytes, MPI_BYTE, t->rank, tag, comm, request)
            : MPI_Isend(data, (int)bytes, MPI_BYTE, t->rank, tag, comm, request));
}

bool
smp_mpi_start_matched(smp_mpi_requests *all, MPI_Message *message, smp_mpi_transfer *t)
{
    return count_started(all, t,
                         MPI_Imrecv(t->head, (int)t->head_bytes, MPI_BYTE, message,
                                    &all->under_way[all->n]));
}

size_t
smp_mpi_test(smp_mpi_requests *all, smp_mpi_transfer *owners[SMP_MPI_TESTED],
             bool failed[SMP_MPI_TESTED])
{
    int        indices[SMP_MPI_TESTED];
    MPI_Status statuses[SMP_MPI_TESTED];
    size_t     first = all->tested < all->n ? all->tested : 0;
    size_t     n = all->n - first;
    int        count = 0;
    int        result;

    if (n == 0) {
        return 0;
    }
    n = n < SMP_MPI_TESTED ? n : SMP_MPI_TESTED;
    all->tested = first + n;
    for (size_t i = 0; i < n; i++) {
        statuses[i].MPI_ERROR = MPI_SUCCESS;
    }
    result = MPI_Testsome((int)n, all->under_way + first, &count, indices, statuses);
    if (count == MPI_UNDEFINED || count == 0) {
        return 0;
    }
    for (int i = 0; i < count; i++) {
        size_t at = first + (size_t)indices[i];

        owners[i] = all->owners[at];
        failed[i] = result == MPI_ERR_IN_STATUS && statuses[i].MPI_ERROR != MPI_SUCCESS;
        all->owners[at] = NULL;
    }
    for (size_t i = first; i < first + n && i < all->n;) {
        if (all->owners[i] == NULL) { /* its place is for the last one */
            all->n--;
            all->owners[i] = all->owners[all->n];
            all->under_way[i] = all->under_way[all->n];
        } else {
            i++;
        }
    }
    return (size_t)count;
}

void
smp_mpi_requests_fini(smp_mpi_requests *all)
{
    free(all->under_way);
    free(all->owners);
}
