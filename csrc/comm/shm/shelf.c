/* The shelves of a segment: taken by their owner, found by the others. */
#include "comm/shm/shelf.h"

#include <string.h>

smp_shelf *
smp_shelf_take(smp_shelf *shelves)
{
    for (int i = 0; i < SMP_SHELVES; i++) {
        smp_shelf *shelf = &shelves[i];
        uint32_t   free = 0;

        if (atomic_compare_exchange_strong(&shelf->taken, &free, 1)) {
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
            smp_bell_get_up(&shelf->bell);
            return shelf;
        }
    }
    return NULL;
}

void
smp_shelf_give_back(smp_shelf *shelf)
{
    atomic_store(&shelf->id, 0);
    atomic_store(&shelf->taken, 0);
}

void
smp_shelf_forget(smp_shelf *shelf)
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
