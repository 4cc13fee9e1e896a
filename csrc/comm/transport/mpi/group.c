/* Lifelines first: making the communicator must not wait for a dead rank.
 *
 * Making the communicator waits for the other ranks without limit, so it is done by a
 * thread of its own, left behind after the time-out. */
#define _GNU_SOURCE
#include "comm/transport/mpi/group.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/transport/connecting/lifeline.h"

#define MAGIC 0x49504d53u
#define VERSION 2u

/* MPI promises tags up to this. */
#define TAGS 32767u

/* The thread's data: its own after it is left behind. */
typedef struct {
    MPI_Comm comm;
    int      result;
    int      tag;
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
        m->result = MPI_Comm_create_group(MPI_COMM_WORLD, group, m->tag, &m->comm);
        MPI_Group_free(&group);
    }
    if (m->result == MPI_SUCCESS) {
        m->result = MPI_Comm_set_errhandler(m->comm, MPI_ERRORS_RETURN);
    }
    return NULL;
}

/* Keeps two jobs apart: some ranks may make one while others still make another
 * (FNV-1a). */
static int
tag_of(const char *job)
{
    uint32_t hash = 2166136261u;

    for (; *job != '\0'; job++) {
        hash = (hash ^ (uint8_t)*job) * 16777619u;
    }
    return (int)(hash % TAGS);
}

/* pthread's deadlines count from 1970. */
static struct timespec
from_now(int64_t wait_ns)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return smp_timespec(now.tv_sec * SMP_NS_PER_S + now.tv_nsec + wait_ns);
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
smp_mpi_meet(smp_tcp_door *door, const char *job, int rank, int size,
             const void *const *cards, const bool *wanted, const smp_deadline *deadline,
             smp_tcp_take *take, void *arg, bool *met, int *failed)
{
    char         secret[SMP_LIFELINE_SECRET];
    smp_tcp_self me = {.rank = rank, .size = size, .job = secret};
    const void **doors = calloc((size_t)size, sizeof(*doors));
    size_t      *bytes = calloc((size_t)size, sizeof(*bytes));
    smp_status   status = SMP_ERR_NO_MEMORY;

    if (doors == NULL || bytes == NULL) {
        goto out;
    }
    smp_lifeline_secret(job, "mpi", secret);
    for (int r = 0; r < size; r++) {
        if (cards[r] != NULL) {
            doors[r] = (const uint8_t *)cards[r] + offsetof(smp_mpi_card, door);
            bytes[r] = sizeof(smp_tcp_card);
        }
    }
    status = smp_tcp_connect(door, &me, doors, bytes, wanted, deadline, take, arg, met,
                             failed);
    for (int r = 0; r < size && status == SMP_OK; r++) {
        if (wanted[r] && !met[r]) {
            *failed = r;
            status = SMP_ERR_UNREACHABLE;
        }
    }

out:
    smp_tcp_door_close(door);
    free(doors);
    free(bytes);
    return status;
}

/* The rank to name while the communicator is made; -1: none.  A rank may have given up
 * because of a dead one.  So a dead one comes first, and the other only when it has
 * `given_up` for a look already. */
static int
missing(const int *fds, int size, int *given_up)
{
    int before = *given_up;

    for (int r = 0; r < size; r++) {
        char what;

        if (fds[r] < 0 || r == before) {
            continue;
        }
        switch (smp_lifeline_hear(fds[r], &what)) {
        case SMP_LIFELINE_QUIET:
            break;
        case SMP_LIFELINE_SAID:
            *given_up = r;
            break;
        case SMP_LIFELINE_HUNG_UP:
            return r;
        }
    }
    return before;
}

smp_status
smp_mpi_make_comm(const char *job, const int *ranks, int size, const int *fds,
                  const smp_deadline *deadline, MPI_Comm *out, int *failed)
{
    making    *m = calloc(1, sizeof(*m) + (size_t)size * sizeof(int));
    smp_status status = SMP_OK;
    int        given_up = -1;
    pthread_t  thread;

    if (m == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    m->tag = tag_of(job);
    m->size = size;
    memcpy(m->ranks, ranks, (size_t)size * sizeof(int));
    if (pthread_create(&thread, NULL, make_comm, m) != 0) {
        free(m);
        return SMP_ERR_NO_THREAD;
    }
    for (;;) {
        struct timespec until = from_now(SMP_DEADLINE_LOOK_NS);

        if (pthread_timedjoin_np(thread, NULL, &until) == 0) {
            break;
        }
        status = smp_deadline_left(deadline, smp_clock_ns());
        if (status == SMP_OK) {
            int who = missing(fds, size, &given_up);

            if (who >= 0) {
                *failed = who;
                status = SMP_ERR_PEER_LOST;
            }
        }
        if (status != SMP_OK) {
            pthread_detach(thread);
            return status; /* the thread still uses m */
        }
    }
    if (m->result == MPI_SUCCESS) {
        *out = m->comm;
    } else {
        status = SMP_ERR_SYSTEM;
    }
    free(m);
    return status;
}
