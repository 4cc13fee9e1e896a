/* Memory of a device given up by this process and perhaps still read by others: it is
 * destroyed after the last reader.
 *
 * Ownership  A list owns its objects.
 * Threads    any.
 */
#ifndef SMP_COMM_DEVICE_RETIRED_H
#define SMP_COMM_DEVICE_RETIRED_H

#include <stdbool.h>

#include "common/lock.h"

/* The first member of a retired object. */
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

/* Destroys those without a reader, while no stream of the core has work: else later. */
void smp_retired_sweep(smp_retired_list *list);

#endif
