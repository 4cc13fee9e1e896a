/* Memory of a device that this process has given up while others may still read it: it
 * is destroyed when none does any more.
 *
 * Ownership  A list owns what is on it.
 * Threads    any.
 */
#ifndef SMP_COMM_DEVICE_RETIRED_H
#define SMP_COMM_DEVICE_RETIRED_H

#include <stdbool.h>

#include "common/lock.h"

/* The first member of what is retired. */
typedef struct smp_retired {
    struct smp_retired *next;
} smp_retired;

typedef struct {
    smp_lock     lock;                       /* guards first */
    smp_retired *first;                      /* owned: linked by next */
    bool (*is_read)(const smp_retired *one); /* under the lock */
    void (*destroy)(smp_retired *one);       /* takes it; without the lock */
} smp_retired_list;

/* Puts one on the list. */
void smp_retired_add(smp_retired_list *list, smp_retired *one);

/* Destroys those that nobody reads. */
void smp_retired_sweep(smp_retired_list *list);

#endif
