/* Row after row. */
#include "comm/collective/kernels/columns.h"

#include <string.h>

/* A piece of a row. */
typedef struct {
    size_t at; /* in the matrix */
    size_t bytes;
} piece;

/* The piece in one row behind `skip` bytes of the columns, at most `most`. */
static piece
next_piece(const smp_columns *columns, size_t skip, size_t most)
{
    size_t row = skip / columns->width;
    size_t column = skip % columns->width;
    size_t left = columns->width - column;

    return (piece){row * columns->stride + columns->first + column,
                   left < most ? left : most};
}

void
smp_columns_take(const smp_columns *columns, const uint8_t *matrix, size_t skip,
                 size_t bytes, uint8_t *to)
{
    while (bytes != 0 && columns->width != 0) {
        piece p = next_piece(columns, skip, bytes);

        memcpy(to, matrix + p.at, p.bytes);
        to += p.bytes;
        skip += p.bytes;
        bytes -= p.bytes;
    }
}

void
smp_columns_put(const smp_columns *columns, uint8_t *matrix, size_t skip, size_t bytes,
                const uint8_t *from)
{
    while (bytes != 0 && columns->width != 0) {
        piece p = next_piece(columns, skip, bytes);

        memcpy(matrix + p.at, from, p.bytes);
        from += p.bytes;
        skip += p.bytes;
        bytes -= p.bytes;
    }
}
