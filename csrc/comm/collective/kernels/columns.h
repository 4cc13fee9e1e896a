/* Columns of a matrix in row-major order, and the same elements one behind the other.
 *
 * A tensor cut, or joined, along another axis than its first is such a matrix: the axes
 * before are its rows.
 *
 * Threads  any.
 */
#ifndef SMP_COMM_COLLECTIVE_KERNELS_COLUMNS_H
#define SMP_COMM_COLLECTIVE_KERNELS_COLUMNS_H

#include <stddef.h>
#include <stdint.h>

/* Neighbouring columns of a matrix; sizes are in bytes. */
typedef struct {
    size_t stride; /* of a row of the matrix */
    size_t first;  /* where they begin in a row */
    size_t width;  /* of them all; 0: nothing is copied */
} smp_columns;

/* Copies `bytes` of the columns, row after row, those after the first `skip`. */
void smp_columns_take(const smp_columns *columns, const uint8_t *matrix, size_t skip,
                      size_t bytes, uint8_t *to);

/* The way back. */
void smp_columns_put(const smp_columns *columns, uint8_t *matrix, size_t skip,
                     size_t bytes, const uint8_t *from);

#endif
