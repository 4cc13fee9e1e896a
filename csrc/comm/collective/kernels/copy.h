/* Copies of tensors larger than the caches.
 *
 * A plain store first reads the overwritten line, and throws others out of the caches.
 * The C library knows other stores, but uses them from a size on derived from the cache
 * of the whole processor.  A virtual machine has a part of that.
 *
 * Threads  any.
 */
#ifndef SMP_COMM_COLLECTIVE_KERNELS_COPY_H
#define SMP_COMM_COLLECTIVE_KERNELS_COPY_H

#include <stddef.h>

/* Copies past the caches, where the processor can; else as memcpy().  A release after
 * it (a store, a doorbell) finds the copy written. */
void smp_copy_uncached(void *to, const void *from, size_t bytes);

#endif
