/* The pattern between host and device, and the wait. */
#include "comm/device/trial.h"

#include <stdio.h>
#include <stdlib.h>

#include "common/clock.h"
#include "common/pattern.h"

/* The most time of a device: its other work comes first, perhaps. */
#define PATIENCE_NS (10 * SMP_NS_PER_S)

bool
smp_trial_write(const smp_driver *driver, uint64_t to, size_t bytes, uint64_t seed,
                void *stream, char why[SMP_DRIVER_TEXT])
{
    void *pattern = malloc(bytes);
    bool  done;

    if (pattern == NULL) {
        snprintf(why, SMP_DRIVER_TEXT, "out of memory");
        return false;
    }
    smp_pattern_write(pattern, bytes, seed);
    /* The driver is done with pageable memory when it returns.  [CUDA Driver API,
     * "API synchronization behavior"] */
    done = smp_driver_ok(driver, "cuMemcpyHtoDAsync",
                         driver->copy_from_host(to, pattern, bytes, stream), why);
    free(pattern);
    return done;
}

static bool
comes_to_rest(const smp_driver *driver, void *stream, char why[SMP_DRIVER_TEXT])
{
    int result = smp_driver_rest(driver, stream, smp_clock_ns() + PATIENCE_NS);

    if (result == SMP_DRIVER_NOT_READY) {
        snprintf(why, SMP_DRIVER_TEXT, "the copy of a pattern did not end");
        return false;
    }
    return smp_driver_ok(driver, "cuStreamQuery", result, why);
}

smp_trial_result
smp_trial_read(const smp_driver *driver, uint64_t at, size_t bytes, uint64_t seed,
               void *stream, char why[SMP_DRIVER_TEXT])
{
    smp_trial_result result = SMP_TRIAL_FAILED;
    void            *found = malloc(bytes);

    if (found == NULL) {
        snprintf(why, SMP_DRIVER_TEXT, "out of memory");
        return SMP_TRIAL_FAILED;
    }
    /* A copy to pageable memory waits for the stream, without an end: so at its rest.
     */
    if (comes_to_rest(driver, stream, why) &&
        smp_driver_ok(driver, "cuMemcpyDtoHAsync",
                      driver->copy_to_host(found, at, bytes, stream), why)) {
        result = smp_pattern_is(found, bytes, seed) ? SMP_TRIAL_RIGHT : SMP_TRIAL_WRONG;
        if (result == SMP_TRIAL_WRONG) {
            snprintf(why, SMP_DRIVER_TEXT,
                     "a pattern arrived with other bytes than it was sent with");
        }
    }
    free(found);
    return result;
}
