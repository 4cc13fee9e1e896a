/* The core's own streams of a process, and whether a device still works for them.
 *
 * cuMemFree, cuIpcCloseMemHandle and cuMemHostUnregister may wait for all of a
 * context's work.  A stream that waits for an event of a dead rank makes them wait for
 * ever, whosever memory it is: so the end of a pool, an exchange or a slab asks here
 * first.  Streams of the user wait for other ranks through these alone.
 *
 * Threads  any.
 */
#ifndef SMP_DEVICE_STREAMS_H
#define SMP_DEVICE_STREAMS_H

#include <stdbool.h>
#include <stdint.h>

#include "device/driver.h"

/* Makes a stream that does not wait for the null stream, in the current context, which
 * is `context`.  False: none; *stream is NULL and `why` names the failure. */
bool smp_stream_create(const smp_driver *driver, void *context, void **stream,
                       char why[SMP_DRIVER_TEXT]);

/* NULL: nothing to do.  The context is current. */
void smp_stream_destroy(const smp_driver *driver, void *stream);

/* Whether the streams of the process have nothing to do, at until_ns (smp_clock_ns) at
 * the latest.  A wait in vain is the last one, until they do rest. */
bool smp_streams_rest(int64_t until_ns);

#endif
