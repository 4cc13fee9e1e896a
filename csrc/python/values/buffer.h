/* Memory that grows: bytes in a row, and arrays of pointers.
 *
 * Threads  The GIL is held.
 * Errors   0, or -1 with MemoryError and the old contents.
 */
#ifndef SMP_PYTHON_VALUES_BUFFER_H
#define SMP_PYTHON_VALUES_BUFFER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>

/* Begins as zeros; its owner frees `at`. */
typedef struct {
    uint8_t *at; /* owned */
    size_t   size;
    size_t   room;
} smp_buffer;

/* Makes room for so many more bytes. */
int smp_buffer_reserve(smp_buffer *buffer, size_t more);

/* Appends them. */
int smp_buffer_put(smp_buffer *buffer, const void *bytes, size_t nbytes);

/* Makes room for one more element behind `count` in an array of pointers; `array` is
 * the address of its pointer: NULL, or malloc's. */
int smp_array_reserve(void *array, size_t count, size_t *room);

#endif
