/* Messages with a tensor of a device, as the codec of values sends and reads them. */
#ifndef SMP_TESTS_DEVICE_MESSAGES_H
#define SMP_TESTS_DEVICE_MESSAGES_H

#include "device_user.h"

typedef struct {
    uint64_t seed;
    uint64_t bytes;
    uint64_t on_device;
} letter;

/* x is written, sent and written again, all on the user's stream.  A tensor that the
 * port does not take is announced without its bytes. */
static inline void
send_x(world *w, user *u, int dest, uint64_t seed, size_t bytes, bool *taken)
{
    letter     l = {seed, bytes, 0};
    smp_block *block;

    launch(u, fill_kernel, u->x, bytes, seed);
    block = smp_device_put(u->port, dest, ordinal, u->x, bytes, u->stream);
    launch(u, fill_kernel, u->x, bytes, seed + 1000000);
    l.on_device = block != NULL;
    if (taken != NULL) {
        *taken = block != NULL;
    }
    CHECK_OK(
        smp_comm_send(w->comm, dest, &l, sizeof(l), &block, block == NULL ? 0 : 1));
}

static inline void
receive(world *w, smp_message **message, letter *l)
{
    CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, message));
    CHECK((*message)->nbytes == sizeof(*l));
    memcpy(l, (*message)->bytes, sizeof(*l));
    CHECK((*message)->nblocks == l->on_device);
}

/* The bytes of a message go to y, which is in use before and after; they are looked at
 * on the user's stream.  SMP_OK, or what get() says. */
static inline smp_status
read_y(user *u, smp_message *message, const letter *l, char why[SMP_DRIVER_TEXT])
{
    smp_status status = SMP_OK;

    if (l->on_device) {
        launch(u, fill_kernel, u->y, l->bytes, 7);
        status =
            smp_device_get(u->port, message->source, smp_message_take_block(message, 0),
                           u->y, u->stream, why);
        if (status == SMP_OK) {
            launch(u, check_kernel, u->y, l->bytes, l->seed);
            launch(u, fill_kernel, u->y, l->bytes, 8);
        }
    } else {
        smp_device_meet(u->port, message->source, ordinal);
    }
    smp_message_free(message);
    return status;
}

static inline void
receive_y(world *w, user *u)
{
    char         why[SMP_DRIVER_TEXT];
    smp_message *message;
    letter       l;

    receive(w, &message, &l);
    CHECK_OK(read_y(u, message, &l, why));
}

/* Both ranks have opened each other's pools after three tensors. */
static inline void
shake_hands(world *w, user *u)
{
    if (w->rank == 0) {
        send_x(w, u, 1, 1, 100, NULL);
        receive_y(w, u);
        send_x(w, u, 1, 2, 100, NULL);
    } else {
        receive_y(w, u);
        send_x(w, u, 0, 3, 100, NULL);
        receive_y(w, u);
    }
}

static inline void
expect_empty(user *u)
{
    int64_t        until = smp_clock_ns() + WORLD_DEADLINE_NS;
    smp_device_use use;

    do {
        CHECK(smp_clock_ns() < until);
        sched_yield();
        smp_device_sweep(u->port);
        smp_device_measure(u->port, &use);
    } while (use.in_use != 0);
}

#endif
