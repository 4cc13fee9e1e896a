/* A path between devices is tried before tensors take it: a pattern goes through it, on
 * the streams, by the copies and behind the events of tensors.
 *
 * Status   Run by ranks on one shared H100, not yet between two GPUs.
 * Threads  one at a time.  The device's context is current.
 */
#ifndef SMP_COMM_DEVICE_TRIAL_H
#define SMP_COMM_DEVICE_TRIAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/driver.h"

/* The pattern's bytes, with room for so many. */
#define SMP_TRIAL_BYTES ((size_t)65536)

typedef enum {
    SMP_TRIAL_RIGHT,
    SMP_TRIAL_WRONG, /* other bytes have arrived */
    SMP_TRIAL_FAILED /* an error, or no end within 10 s: the stream may still be
                        working, so nothing of its use may be given back */
} smp_trial_result;

/* Has `stream` write the pattern of `seed` to the device's memory at `to`.  False with
 * `why`. */
bool smp_trial_write(const smp_driver *driver, uint64_t to, size_t bytes, uint64_t seed,
                     void *stream, char why[SMP_DRIVER_TEXT]);

/* Whether an event of another process has come; waits for it, 10 s at most.  A stream
 * that waits for one that never comes is the device's for good: so the host asks first.
 */
bool smp_trial_came(const smp_driver *driver, void *event, char why[SMP_DRIVER_TEXT]);

/* Waits for the work of `stream`; then whether the pattern lies at `at`.  `why`: the
 * failure. */
smp_trial_result smp_trial_read(const smp_driver *driver, uint64_t at, size_t bytes,
                                uint64_t seed, void *stream, char why[SMP_DRIVER_TEXT]);

#endif
