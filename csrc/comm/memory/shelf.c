/* The shelves of a segment: taken by their owner, found by the others. */
#include "comm/memory/shelf.h"

#include <string.h>

#include "common/clock.h"

/* One that nobody has, else the one that was forgotten first: who still looks at it has
 * had the most time to do so.  NULL: all are taken. */
static smp_shelf *
find_free(smp_shelf *shelves, uint32_t *was)
{
    smp_shelf *oldest = NULL;

    for (int i = 0; i < SMP_SHELVES; i++) {
        smp_shelf *shelf = &shelves[i];
        uint32_t   taken = atomic_load(&shelf->taken);

        *was = taken;
        if (taken == SMP_SHELF_FREE) {
            return shelf;
        }
        if (taken == SMP_SHELF_FORGOTTEN &&
            (oldest == NULL || shelf->forgotten_ns < oldest->forgotten_ns)) {
            oldest = shelf;
        }
    }
    *was = SMP_SHELF_FORGOTTEN;
    return oldest;
}

smp_shelf *
smp_shelf_take(smp_shelf *shelves)
{
    smp_shelf *shelf;
    uint32_t   was;

    while ((shelf = find_free(shelves, &was)) != NULL) {
        if (atomic_compare_exchange_strong(&shelf->taken, &was, SMP_SHELF_TAKEN)) {
            atomic_store(&shelf->read, 0);
            atomic_store(&shelf->failed, 0);
            atomic_store(&shelf->holds, 0);
            atomic_store(&shelf->waits, 0);
            atomic_store(&shelf->stuck, 0);
            atomic_store(&shelf->sure, 0);
            atomic_store(&shelf->slots[0].notice.step, 0);
            atomic_store(&shelf->slots[1].notice.step, 0);
            shelf->slots[0].notice.sequence = 0; /* no operation yet */
            shelf->slots[1].notice.sequence = 0;
            memset(shelf->slots[0].data, 0, SMP_SHELF_MEMBERS * sizeof(uint64_t));
            smp_doorbell_get_up(&shelf->doorbell);
            return shelf;
        }
    }
    return NULL;
}

void
smp_shelf_give_back(smp_shelf *shelf)
{
    atomic_store(&shelf->id, 0);
    atomic_store(&shelf->taken, SMP_SHELF_FREE);
}

void
smp_shelf_forget(smp_shelf *shelf)
{
    atomic_store(&shelf->id, 0);
    shelf->forgotten_ns = smp_clock_ns();
    atomic_store(&shelf->taken, SMP_SHELF_FORGOTTEN);
}

void
smp_shelf_leave(smp_shelf *shelf)
{
    atomic_store(&shelf->id, 0);
}

smp_shelf *
smp_shelf_find(smp_shelf *shelves, uint64_t id)
{
    for (int i = 0; i < SMP_SHELVES; i++) {
        if (atomic_load(&shelves[i].id) == id) {
            return &shelves[i];
        }
    }
    return NULL;
}
