/* Growth by doubling. */
#include "python/values/buffer.h"

#include <stdlib.h>
#include <string.h>

int
smp_buffer_reserve(smp_buffer *buffer, size_t more)
{
    if (buffer->size + more > buffer->room) {
        size_t   room = buffer->room == 0 ? 256 : 2 * buffer->room;
        uint8_t *moved;

        while (room < buffer->size + more) {
            room *= 2;
        }
        moved = realloc(buffer->at, room);
        if (moved == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        buffer->at = moved;
        buffer->room = room;
    }
    return 0;
}

int
smp_buffer_put(smp_buffer *buffer, const void *bytes, size_t nbytes)
{
    if (smp_buffer_reserve(buffer, nbytes) < 0) {
        return -1;
    }
    if (nbytes > 0) {
        memcpy(buffer->at + buffer->size, bytes, nbytes);
        buffer->size += nbytes;
    }
    return 0;
}

int
smp_array_reserve(void *array, size_t count, size_t *room)
{
    void **moved;

    if (count < *room) {
        return 0;
    }
    moved = realloc(*(void **)array, 2 * (*room + 8) * sizeof(void *));
    if (moved == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *(void **)array = moved;
    *room = 2 * (*room + 8);
    return 0;
}
