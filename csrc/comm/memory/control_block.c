/* The control blocks of a segment: taken by their owner, found by the others. */
#include "comm/memory/control_block.h"

#include <string.h>

#include "common/clock.h"

/* A free one, else the one forgotten first: its last readers have had the most time.
 * NULL: all are taken. */
static smp_control_block *
find_free(smp_control_block *controls, uint32_t *was)
{
    smp_control_block *oldest = NULL;

    for (int i = 0; i < SMP_CONTROL_BLOCKS; i++) {
        smp_control_block *control = &controls[i];
        uint32_t           taken = atomic_load(&control->taken);

        *was = taken;
        if (taken == SMP_CONTROL_FREE) {
            return control;
        }
        if (taken == SMP_CONTROL_FORGOTTEN &&
            (oldest == NULL || control->forgotten_ns < oldest->forgotten_ns)) {
            oldest = control;
        }
    }
    *was = SMP_CONTROL_FORGOTTEN;
    return oldest;
}

smp_control_block *
smp_control_block_take(smp_control_block *controls)
{
    smp_control_block *control;
    uint32_t           was;

    while ((control = find_free(controls, &was)) != NULL) {
        if (atomic_compare_exchange_strong(&control->taken, &was, SMP_CONTROL_TAKEN)) {
            atomic_store(&control->read, 0);
            atomic_store(&control->failed, 0);
            atomic_store(&control->holds, 0);
            atomic_store(&control->waits, 0);
            atomic_store(&control->slots[0].notice.step, 0);
            atomic_store(&control->slots[1].notice.step, 0);
            control->slots[0].notice.sequence = 0; /* no operation yet */
            control->slots[1].notice.sequence = 0;
            memset(control->slots[0].data, 0, SMP_GROUP_MEMBERS * sizeof(uint64_t));
            smp_doorbell_get_up(&control->doorbell);
            return control;
        }
    }
    return NULL;
}

void
smp_control_block_give_back(smp_control_block *control)
{
    atomic_store(&control->id, 0);
    atomic_store(&control->taken, SMP_CONTROL_FREE);
}

void
smp_control_block_forget(smp_control_block *control)
{
    atomic_store(&control->id, 0);
    control->forgotten_ns = smp_clock_ns();
    atomic_store(&control->taken, SMP_CONTROL_FORGOTTEN);
}

void
smp_control_block_leave(smp_control_block *control)
{
    atomic_store(&control->id, 0);
}

smp_control_block *
smp_control_block_find(smp_control_block *controls, uint64_t id)
{
    for (int i = 0; i < SMP_CONTROL_BLOCKS; i++) {
        if (atomic_load(&controls[i].id) == id) {
            return &controls[i];
        }
    }
    return NULL;
}
