/* What tests tell the stand-in of the GPU's driver (stand_in.c), beside the driver's
 * own functions.  Found by dlsym, as those are.
 *
 * Threads  any.
 */
#ifndef SMP_TESTS_STAND_IN_H
#define SMP_TESTS_STAND_IN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Runs on a stream, as a kernel does. */
typedef void (*stand_in_kernel)(void *arg);

/* What a driver that cannot be relied on does, in this process. */
typedef enum {
    STAND_IN_IS_SOUND,
    STAND_IN_SPOILS_BYTES, /* a copy between devices changes a byte */
    STAND_IN_LATE_EVENTS,  /* records are not done, until it is sound again */
} stand_in_fault;

/* How much of a range of the host's memory is registered, all in one piece. */
typedef enum {
    STAND_IN_PAGEABLE,
    STAND_IN_IN_PART,
    STAND_IN_PINNED
} stand_in_registered;

typedef struct {
    /* The call number `nth` from now (1: the next) of the function `name` (NULL: of any
     * that can fail) returns `result` and does nothing.  0: none does. */
    void (*fail)(const char *name, int nth, int result);

    /* Whether the failure asked for has happened. */
    bool (*failed)(void);

    /* Streams of this process do nothing until it is taken back. */
    void (*hold)(bool held);

    /* fn(arg) on the stream, when what is before it is done. */
    void (*launch)(void *stream, stand_in_kernel fn, void *arg);

    /* Called before what an event on the null stream stands for counts as done: what a
     * test has of a device's own queue. */
    void (*set_drain)(void (*drain)(void));

    /* Allocations, mappings, streams and events that this process has not given back.
     */
    int (*alive)(void);

    /* A capture begins, of this stream or of one that nobody here knows (NULL), or
     * ends: whether it is whole, because nobody has allocated or asked meanwhile
     * without having said that it may. */
    void (*begin_capture)(void *stream);
    bool (*end_capture)(void);

    /* From now on, or (STAND_IN_IS_SOUND) no longer. */
    void (*misbehave)(stand_in_fault fault);

    /* The allocation with this address cannot be exported, as one in expandable
     * segments.
     */
    void (*withhold)(uint64_t at);

    stand_in_registered (*registered)(const void *at, size_t bytes);
} stand_in_table;

/* The symbol's name is "stand_in". */
extern const stand_in_table stand_in;

#endif
