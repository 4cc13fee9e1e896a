/* Open addressing; an encoding of a few objects needs no allocation. */
#include "python/values/ptrmap.h"

#include <stdlib.h>
#include <string.h>

static size_t
slot_of(const smp_ptrmap *map, const void *key)
{
    uint64_t hash = ((uint64_t)(uintptr_t)key >> 4) * 0x9E3779B97F4A7C15u;
    size_t   i = (size_t)(hash >> 32) & (map->room - 1);

    while (map->slots[i].key != NULL && map->slots[i].key != key) {
        i = (i + 1) & (map->room - 1);
    }
    return i;
}

static bool
grow(smp_ptrmap *map)
{
    smp_ptrmap bigger = {.room = 2 * map->room};

    bigger.slots = calloc(bigger.room, sizeof(*bigger.slots));
    if (bigger.slots == NULL) {
        return false;
    }
    for (size_t i = 0; i < map->room; i++) {
        if (map->slots[i].key != NULL) {
            bigger.slots[slot_of(&bigger, map->slots[i].key)] = map->slots[i];
        }
    }
    if (map->slots != map->inline_slots) {
        free(map->slots);
    }
    map->slots = bigger.slots;
    map->room = bigger.room;
    return true;
}

void
smp_ptrmap_init(smp_ptrmap *map)
{
    memset(map->inline_slots, 0, sizeof(map->inline_slots));
    map->slots = map->inline_slots;
    map->room = SMP_PTRMAP_INLINE;
    map->count = 0;
}

void
smp_ptrmap_fini(smp_ptrmap *map)
{
    if (map->slots != map->inline_slots) {
        free(map->slots);
    }
}

bool
smp_ptrmap_get(const smp_ptrmap *map, const void *key, uint32_t *value)
{
    size_t i = slot_of(map, key);

    if (map->slots[i].key == NULL) {
        return false;
    }
    *value = map->slots[i].value;
    return true;
}

bool
smp_ptrmap_add(smp_ptrmap *map, const void *key, uint32_t value)
{
    if (4 * (map->count + 1) > 3 * map->room && !grow(map)) {
        return false;
    }
    map->slots[slot_of(map, key)] = (smp_ptrmap_slot){key, value};
    map->count++;
    return true;
}
