/* Two ranks of this process, made step by step: each may have another idea of the job,
 * of the cards and of the time that it has. */
#ifndef SMP_TESTS_PAIR_H
#define SMP_TESTS_PAIR_H

#include "world.h"

typedef struct {
    smp_comm   *comm;
    const void *cards[2];
    size_t      bytes[2];
    int         timeout_ms;
    int         failed;
    smp_status  status;
    pthread_t   thread;
} meeter;

static inline void *
meet_main(void *arg)
{
    meeter *m = arg;

    m->status = smp_comm_connect(m->comm, m->cards, m->bytes,
                                 PATIENCE_MS(m->timeout_ms), &m->failed);
    return NULL;
}

static inline void
meet_in_thread(meeter *m)
{
    CHECK(pthread_create(&m->thread, NULL, meet_main, m) == 0);
}

static inline void
meet_pair(meeter m[2])
{
    meet_in_thread(&m[0]);
    meet_in_thread(&m[1]);
    pthread_join(m[0].thread, NULL);
    pthread_join(m[1].thread, NULL);
}

static inline void
exchange_cards(meeter m[2])
{
    for (int i = 0; i < 4; i++) {
        m[i / 2].cards[i % 2] = smp_comm_card(m[i % 2].comm, &m[i / 2].bytes[i % 2]);
    }
}

static inline void
create_pair(meeter m[2], const smp_comm_config *as, const char *job_of_1,
            int timeout_ms)
{
    smp_comm_config config = *as;

    for (int r = 0; r < 2; r++) {
        m[r] = (meeter){.timeout_ms = timeout_ms, .failed = -1};
        config.rank = r;
        snprintf(config.job, sizeof(config.job), "%s", r == 0 ? as->job : job_of_1);
        CHECK_OK(smp_comm_create(&config, &m[r].comm));
    }
    exchange_cards(m);
}

static inline void
make_pair(meeter m[2], const smp_comm_config *config)
{
    create_pair(m, config, config->job, 60000);
    meet_pair(m);
    CHECK_OK(m[0].status);
    CHECK_OK(m[1].status);
}

static inline void
drop_pair(meeter m[2])
{
    smp_comm_destroy(m[0].comm);
    smp_comm_destroy(m[1].comm);
}

#endif
