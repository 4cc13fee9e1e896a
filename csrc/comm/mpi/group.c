/* Making the communicator waits for the other ranks without limit, so it is done by a
 * thread of its own, which is left behind when the time is over. */
#define _GNU_SOURCE
#include "comm/mpi/group.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAGIC 0x49504d53u
#define VERSION 1u
#define TAG 0x534d /* keeps groups apart that are made at the same time */

#define NS_PER_S 1000000000LL

/* What the thread works on: its own when it is left behind. */
typedef struct {
    MPI_Comm comm;
    int      result;
    int      size;
    int      ranks[];
} making;

static void *
make_comm(void *arg)
{
    making   *m = arg;
    MPI_Group world = MPI_GROUP_NULL;
    MPI_Group group = MPI_GROUP_NULL;

    m->result = MPI_Comm_group(MPI_COMM_WORLD, &world);
    if (m->result == MPI_SUCCESS) {
        m->result = MPI_Group_incl(world, m->size, m->ranks, &group);
        MPI_Group_free(&world);
    }
    if (m->result == MPI_SUCCESS) {
        m->result = MPI_Comm_create_group(MPI_COMM_WORLD, group, TAG, &m->comm);
        MPI_Group_free(&group);
    }
    if (m->result == MPI_SUCCESS) {
        m->result = MPI_Comm_set_errhandler(m->comm, MPI_ERRORS_RETURN);
    }
    return NULL;
}

/* pthread's deadlines count from 1970. */
static struct timespec
from_now(int64_t wait_ns)
{
    struct timespec until;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)(wait_ns / NS_PER_S);
    until.tv_nsec += (long)(wait_ns % NS_PER_S);
    if (until.tv_nsec >= NS_PER_S) {
        until.tv_sec++;
        until.tv_nsec -= NS_PER_S;
    }
    return until;
}

void
smp_mpi_card_fill(smp_mpi_card *card)
{
    *card = (smp_mpi_card){.magic = MAGIC, .version = VERSION};
    MPI_Comm_rank(MPI_COMM_WORLD, &card->world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &card->world_size);
}

bool
smp_mpi_world_ranks(const smp_mpi_card *own, int rank, int size,
                    const void *const *cards, const size_t *card_bytes, int *ranks)
{
    for (int r = 0; r < size; r++) {
        smp_mpi_card card = *own;

        if (r != rank) {
            if (cards[r] == NULL || card_bytes[r] != sizeof(card)) {
                return false;
            }
            memcpy(&card, cards[r], sizeof(card));
        }
        if (card.magic != MAGIC || card.version != VERSION ||
            card.world_size != own->world_size || card.world_rank < 0 ||
            card.world_rank >= card.world_size) {
            return false;
        }
        ranks[r] = card.world_rank;
        for (int other = 0; other < r; other++) {
            if (ranks[other] == ranks[r]) {
                return false;
            }
        }
    }
    return true;
}

smp_status
smp_mpi_make_comm(const int *ranks, int size, int64_t wait_ns, MPI_Comm *out)
{
    struct timespec until = from_now(wait_ns > 0 ? wait_ns : 0);
    making         *m = calloc(1, sizeof(*m) + (size_t)size * sizeof(int));
    smp_status      status = SMP_OK;
    pthread_t       thread;

    if (m == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    m->size = size;
    memcpy(m->ranks, ranks, (size_t)size * sizeof(int));
    if (pthread_create(&thread, NULL, make_comm, m) != 0) {
        free(m);
        return SMP_ERR_NO_THREAD;
    }
    if (pthread_timedjoin_np(thread, NULL, &until) != 0) {
        pthread_detach(thread);
        return SMP_ERR_TIMED_OUT; /* the thread still uses m */
    }
    if (m->result == MPI_SUCCESS) {
        *out = m->comm;
    } else {
        status = SMP_ERR_SYSTEM;
    }
    free(m);
    return status;
}
