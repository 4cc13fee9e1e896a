/* The pattern between host and device, and the wait. */
#include "comm/device/trial.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/clock.h"
#include "common/pattern.h"

/* The most time of a device: its other work comes first, perhaps. */
#define PATIENCE_NS (10 * SMP_NS_PER_S)

/* SMP_DRIVER_OK, or the stream's error, or SMP_DRIVER_NOT_READY: it still has work. */
static int
rests(const smp_driver *driver, void *stream, char why[SMP_DRIVER_TEXT])
{
    int result = smp_driver_rest(driver, stream, smp_clock_ns() + PATIENCE_NS);

    if (result == SMP_DRIVER_NOT_READY) {
        snprintf(why, SMP_DRIVER_TEXT, "the copy of a pattern did not end");
    } else {
        (void)smp_driver_ok(driver, "cuStreamQuery", result, why);
    }
    return result;
}

bool
smp_trial_write(const smp_driver *driver, uint64_t to, size_t bytes, uint64_t seed,
                void *stream, char why[SMP_DRIVER_TEXT])
{
    void *pattern = malloc(bytes);
    int   rest;

    if (pattern == NULL) {
        snprintf(why, SMP_DRIVER_TEXT, "out of memory");
        return false;
    }
    smp_pattern_write(pattern, bytes, seed);
    if (!smp_driver_ok(driver, "cuMemcpyHtoDAsync",
                       driver->copy_from_host(to, pattern, bytes, stream), why)) {
        free(pattern);
        return false;
    }
    /* The device may read it until then.  [CUDA Driver API, "API synchronization
     * behavior": such copies "might be synchronous"] */
    rest = rests(driver, stream, why);
    if (rest != SMP_DRIVER_NOT_READY) {
        free(pattern);
    }
    return rest == SMP_DRIVER_OK;
}

bool
smp_trial_came(const smp_driver *driver, void *event, char why[SMP_DRIVER_TEXT])
{
    int64_t until = smp_clock_ns() + PATIENCE_NS;
    int     result;

    while ((result = driver->event_query(event)) == SMP_DRIVER_NOT_READY &&
           smp_clock_ns() < until) {
        sched_yield();
    }
    if (result == SMP_DRIVER_NOT_READY) {
        snprintf(why, SMP_DRIVER_TEXT, "the event behind a pattern did not come");
        return false;
    }
    return smp_driver_ok(driver, "cuEventQuery", result, why);
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
    /* A copy to pageable memory may wait for the stream, without an end: so at its
     * rest. It may also return too early. */
    if (rests(driver, stream, why) == SMP_DRIVER_OK &&
        smp_driver_ok(driver, "cuMemcpyDtoHAsync",
                      driver->copy_to_host(found, at, bytes, stream), why)) {
        int rest = rests(driver, stream, why);

        if (rest == SMP_DRIVER_NOT_READY) {
            return SMP_TRIAL_FAILED; /* the device may write to it */
        }
        if (rest != SMP_DRIVER_OK) {
            free(found);
            return SMP_TRIAL_FAILED;
        }
        result = smp_pattern_is(found, bytes, seed) ? SMP_TRIAL_RIGHT : SMP_TRIAL_WRONG;
        if (result == SMP_TRIAL_WRONG) {
            snprintf(why, SMP_DRIVER_TEXT,
                     "a pattern arrived with other bytes than it was sent with");
        }
    }
    free(found);
    return result;
}
