/* Rounds of probes, and the sums of their answers. */
#include "server/detection.h"

#include <stdlib.h>

#define MOST_PAUSE_NS (10 * SMP_NS_PER_S)

struct smp_detection {
    smp_grid  grid;
    bool      in_sequence;
    uint64_t  round;    /* the last one asked about; 0: none in this step */
    int       answers;  /* to it */
    bool      again;    /* the round before found no message under way, */
    uint64_t  total;    /* ... and so many sent by all ranks so far */
    int64_t   next_ns;  /* when to ask again */
    int64_t   pause_ns; /* until then */
    smp_still of[];     /* by rank of the comm: the answers */
};

static int
size_of(const smp_detection *detection)
{
    return detection->grid.pipelines * detection->grid.pp_size;
}

smp_status
smp_detection_create(const smp_grid *grid, bool in_sequence, smp_detection **out)
{
    const size_t   size = (size_t)grid->pipelines * (size_t)grid->pp_size;
    smp_detection *detection =
        calloc(1, sizeof(*detection) + size * sizeof(detection->of[0]));

    if (detection == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    detection->grid = *grid;
    detection->in_sequence = in_sequence;
    smp_detection_begin(detection);
    *out = detection;
    return SMP_OK;
}

void
smp_detection_destroy(smp_detection *detection)
{
    free(detection);
}

void
smp_detection_begin(smp_detection *detection)
{
    detection->next_ns = 0;
    detection->pause_ns = SMP_DETECTION_IDLE_NS;
    detection->round = 0;
    detection->answers = 0;
    detection->again = false;
}

uint64_t
smp_detection_ask(smp_detection *detection)
{
    detection->answers = 0;
    return ++detection->round;
}

void
smp_detection_hear(smp_detection *detection, int rank, uint64_t round,
                   const smp_still *still)
{
    if (round == detection->round) {
        detection->of[rank] = *still;
        detection->answers++;
        detection->next_ns = 0;
        detection->pause_ns = SMP_DETECTION_IDLE_NS;
    }
}

bool
smp_detection_is_answered(const smp_detection *detection)
{
    return detection->round != 0 && detection->answers >= size_of(detection) - 1;
}

/* The number of collectives issued by all ranks with this pp_rank.  In a sequence a
 * TP_GROUP is not all of these: any rank's collective is issued by the others later, or
 * the sequence shows a difference. */
static uint64_t
issued_by_all(const smp_detection *detection, int rank)
{
    const smp_grid *grid = &detection->grid;
    const int       pp_rank = smp_grid_pp_rank_of(grid, rank);
    uint64_t        least = UINT64_MAX;

    if (detection->in_sequence) {
        return detection->of[rank].issued;
    }
    for (int p = 0; p < grid->pipelines; p++) {
        const uint64_t issued = detection->of[smp_grid_rank(grid, p, pp_rank)].issued;

        least = issued < least ? issued : least;
    }
    return least;
}

/* Whether a collective issued by all is not over yet on a rank. */
static bool
a_collective_is_under_way(const smp_detection *detection)
{
    for (int rank = 0; rank < size_of(detection); rank++) {
        if (detection->of[rank].over < issued_by_all(detection, rank)) {
            return true;
        }
    }
    return false;
}

smp_detection_verdict
smp_detection_judge(smp_detection *detection, const smp_still *own)
{
    uint64_t sent = 0;
    uint64_t received = 0;

    if (!smp_detection_is_answered(detection)) {
        return SMP_DETECTION_UNKNOWN;
    }
    detection->of[0] = *own;
    for (int rank = 0; rank < size_of(detection); rank++) {
        sent += detection->of[rank].sent;
        received += detection->of[rank].received;
    }
    if (sent != received || a_collective_is_under_way(detection)) {
        detection->again = false;
        detection->answers = 0; /* asks when it has been idle for long again */
        return SMP_DETECTION_UNKNOWN;
    }
    if (detection->again && detection->total == sent) {
        return SMP_DETECTION_DEADLOCK;
    }
    detection->again = true;
    detection->total = sent;
    return SMP_DETECTION_AGAIN;
}

bool
smp_detection_idle(smp_detection *detection, int64_t now_ns)
{
    detection->again = false;
    if (now_ns < detection->next_ns) {
        return false;
    }
    detection->next_ns = now_ns + detection->pause_ns;
    detection->pause_ns = detection->pause_ns < MOST_PAUSE_NS
                              ? 2 * detection->pause_ns + SMP_DETECTION_IDLE_NS
                              : MOST_PAUSE_NS;
    return true;
}

const smp_still *
smp_detection_answers(const smp_detection *detection)
{
    return detection->of;
}
