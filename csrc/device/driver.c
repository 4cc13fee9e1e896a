/* Loading the driver's library, once a process. */
#include "device/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"

#define LIBRARY "libcuda.so.1"
#define INSTEAD "SMP_CUDA_LIBRARY"

static const struct {
    const char *name;
    size_t      at;
} functions[] = {
    {"cuInit", offsetof(smp_driver, init)},
    {"cuDeviceGet", offsetof(smp_driver, device_get)},
    {"cuDevicePrimaryCtxRetain", offsetof(smp_driver, context_retain)},
    {"cuDevicePrimaryCtxRelease_v2", offsetof(smp_driver, context_release)},
    {"cuCtxPushCurrent_v2", offsetof(smp_driver, context_push)},
    {"cuCtxPopCurrent_v2", offsetof(smp_driver, context_pop)},
    {"cuThreadExchangeStreamCaptureMode", offsetof(smp_driver, capture_exchange)},
    {"cuMemAlloc_v2", offsetof(smp_driver, alloc)},
    {"cuMemFree_v2", offsetof(smp_driver, free)},
    {"cuMemGetAddressRange_v2", offsetof(smp_driver, memory_range)},
    {"cuPointerGetAttribute", offsetof(smp_driver, pointer_attribute)},
    {"cuIpcGetMemHandle", offsetof(smp_driver, memory_export)},
    {"cuIpcOpenMemHandle_v2", offsetof(smp_driver, memory_open)},
    {"cuIpcCloseMemHandle", offsetof(smp_driver, memory_close)},
    {"cuMemHostRegister_v2", offsetof(smp_driver, host_register)},
    {"cuMemHostUnregister", offsetof(smp_driver, host_unregister)},
    {"cuStreamCreate", offsetof(smp_driver, stream_create)},
    {"cuStreamDestroy_v2", offsetof(smp_driver, stream_destroy)},
    {"cuStreamWaitEvent", offsetof(smp_driver, stream_wait)},
    {"cuStreamQuery", offsetof(smp_driver, stream_query)},
    {"cuStreamIsCapturing", offsetof(smp_driver, stream_capturing)},
    {"cuEventCreate", offsetof(smp_driver, event_create)},
    {"cuEventDestroy_v2", offsetof(smp_driver, event_destroy)},
    {"cuEventRecord", offsetof(smp_driver, event_record)},
    {"cuEventQuery", offsetof(smp_driver, event_query)},
    {"cuIpcGetEventHandle", offsetof(smp_driver, event_export)},
    {"cuIpcOpenEventHandle", offsetof(smp_driver, event_open)},
    {"cuMemcpyDtoDAsync_v2", offsetof(smp_driver, copy)},
    {"cuMemcpyHtoDAsync_v2", offsetof(smp_driver, copy_from_host)},
    {"cuMemcpyDtoHAsync_v2", offsetof(smp_driver, copy_to_host)},
    {"cuModuleLoadData", offsetof(smp_driver, module_load)},
    {"cuModuleGetFunction", offsetof(smp_driver, module_function)},
    {"cuLaunchKernel", offsetof(smp_driver, launch)},
    {"cuGetErrorName", offsetof(smp_driver, error_name)},
};

/* Written by load() alone. */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static smp_driver     table;
static bool           loaded;
static char           missing[SMP_DRIVER_TEXT];

/* State of smp_driver_enter(). */
static _Thread_local int depth;
static _Thread_local int capture_before; /* the outermost found this */

static void
load(void)
{
    const char *named = getenv(INSTEAD);
    const char *path = named != NULL ? named : LIBRARY;
    void       *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);

    if (library == NULL) {
        snprintf(missing, sizeof(missing), "there is no %s", path);
        return;
    }
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
        void *found = dlsym(library, functions[i].name);

        if (found == NULL) {
            snprintf(missing, sizeof(missing), "%s has no %s", path, functions[i].name);
            return;
        }
        memcpy((char *)&table + functions[i].at, &found, sizeof(found));
    }
    /* The library is never closed: the driver has threads of its own. */
    loaded = smp_driver_ok(&table, "cuInit", table.init(0), missing);
}

const smp_driver *
smp_driver_load(char why[SMP_DRIVER_TEXT])
{
    pthread_once(&once, load);
    if (!loaded) {
        memcpy(why, missing, sizeof(missing));
        return NULL;
    }
    return &table;
}

bool
smp_driver_is_stand_in(void)
{
    return getenv(INSTEAD) != NULL;
}

bool
smp_driver_ok(const smp_driver *driver, const char *call, int result,
              char why[SMP_DRIVER_TEXT])
{
    const char *name = NULL;

    if (result == SMP_DRIVER_OK) {
        return true;
    }
    if (driver->error_name(result, &name) != SMP_DRIVER_OK || name == NULL) {
        name = "error";
    }
    snprintf(why, SMP_DRIVER_TEXT, "%s: %s (%d)", call, name, result);
    return false;
}

bool
smp_driver_enter(const smp_driver *driver, void *context, char why[SMP_DRIVER_TEXT])
{
    int mode = SMP_DRIVER_CAPTURE_RELAXED;

    if (!smp_driver_ok(driver, "cuCtxPushCurrent", driver->context_push(context),
                       why)) {
        return false;
    }
    if (depth == 0) {
        if (!smp_driver_ok(driver, "cuThreadExchangeStreamCaptureMode",
                           driver->capture_exchange(&mode), why)) {
            (void)driver->context_pop(&context);
            return false;
        }
        capture_before = mode;
    }
    depth++;
    return true;
}

void
smp_driver_leave(const smp_driver *driver)
{
    void *context;

    if (--depth == 0) {
        (void)driver->capture_exchange(&capture_before);
    }
    (void)driver->context_pop(&context);
}

int
smp_driver_rest(const smp_driver *driver, void *stream, int64_t until_ns)
{
    int result;

    while ((result = driver->stream_query(stream)) == SMP_DRIVER_NOT_READY &&
           smp_clock_ns() < until_ns) {
        sched_yield();
    }
    return result;
}

bool
smp_driver_share_event(const smp_driver *driver, void **event,
                       smp_driver_handle *handle, char why[SMP_DRIVER_TEXT])
{
    if (!smp_driver_ok(driver, "cuEventCreate",
                       driver->event_create(event, SMP_DRIVER_EVENT_UNTIMED |
                                                       SMP_DRIVER_EVENT_SHARED),
                       why)) {
        *event = NULL;
        return false;
    }
    if (!smp_driver_ok(driver, "cuIpcGetEventHandle",
                       driver->event_export(handle, *event), why)) {
        (void)driver->event_destroy(*event);
        *event = NULL;
        return false;
    }
    return true;
}
