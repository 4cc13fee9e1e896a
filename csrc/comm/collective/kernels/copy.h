/* Copies of tensors that are larger than the caches.
 *
 * A plain store first reads the line that it overwrites, and throws others out of the
 * caches.  The C library knows stores that do not, but uses them from a size on that it
 * takes from the cache of the whole processor, of which a virtual machine has a part.
 *
 * Threads  any.
 */
#ifndef SMP_COMM_COLLECTIVE_KERNELS_COPY_H
#define SMP_COMM_COLLECTIVE_KERNELS_COPY_H

#include <stddef.h>

/* Copies past the caches, where the processor can; else as memcpy().  What is released
 * after it (a store, a doorbell) finds the copy written. */
void smp_copy_uncached(void *to, const void *from, size_t bytes);

#endif
