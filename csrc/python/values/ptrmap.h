/* Object address -> small number: the memo of one encoding.  Keys are borrowed. */
#ifndef SMP_PYTHON_VALUES_PTRMAP_H
#define SMP_PYTHON_VALUES_PTRMAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SMP_PTRMAP_INLINE 32

typedef struct {
    const void *key;
    uint32_t    value;
} smp_ptrmap_slot;

typedef struct {
    smp_ptrmap_slot  inline_slots[SMP_PTRMAP_INLINE];
    smp_ptrmap_slot *slots; /* inline_slots, or owned */
    size_t           room;  /* a power of two */
    size_t           count;
} smp_ptrmap;

void smp_ptrmap_init(smp_ptrmap *map);
void smp_ptrmap_fini(smp_ptrmap *map);
bool smp_ptrmap_get(const smp_ptrmap *map, const void *key, uint32_t *value);

/* False: out of memory.  key is not NULL and not in the map. */
bool smp_ptrmap_add(smp_ptrmap *map, const void *key, uint32_t value);

#endif
