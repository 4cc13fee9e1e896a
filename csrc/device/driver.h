/* The GPU driver's functions for the core, found at run time.
 *
 * The library is libcuda.so.1, or the one named by SMP_CUDA_LIBRARY: the tests'
 * stand-in (tests/core/stand_in.c).  Nothing is linked, so the core works without a
 * driver.
 *
 * Threads  any.
 * Source   CUDA Driver API reference: names, types and values, the last as comments
 * say.
 */
#ifndef SMP_DEVICE_DRIVER_H
#define SMP_DEVICE_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Room for a failure's text. */
#define SMP_DRIVER_TEXT 160

/* A memory or event of this process, for another one (CUipcMemHandle). */
typedef struct {
    uint8_t bytes[64];
} smp_driver_handle;

/* Values of CUresult used here. */
enum { SMP_DRIVER_OK = 0, SMP_DRIVER_INVALID_VALUE = 1, SMP_DRIVER_NOT_READY = 600 };

enum {
    SMP_DRIVER_STREAM_ALONE = 1,    /* CU_STREAM_NON_BLOCKING */
    SMP_DRIVER_EVENT_UNTIMED = 2,   /* CU_EVENT_DISABLE_TIMING */
    SMP_DRIVER_EVENT_SHARED = 4,    /* CU_EVENT_INTERPROCESS */
    SMP_DRIVER_OPEN_WITH_PEERS = 1, /* CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS */
    SMP_DRIVER_CAPTURE_RELAXED = 2, /* CU_STREAM_CAPTURE_MODE_RELAXED */
    SMP_DRIVER_HOST_PORTABLE = 1,   /* CU_MEMHOSTREGISTER_PORTABLE */
    SMP_DRIVER_BUFFER_ID = 7,       /* CU_POINTER_ATTRIBUTE_BUFFER_ID: uint64_t */
    SMP_DRIVER_DEVICE_ORDINAL = 9,  /* CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: int */
};

/* The driver shares memory with other processes in blocks of this size: a smaller
 * allocation would take others along.  [CUDA programming guide, interprocess
 * communication] */
#define SMP_DRIVER_BLOCK ((size_t)2 << 20)

/* The size in bytes of the whole blocks around `bytes`. */
static inline size_t
smp_driver_blocks(size_t bytes)
{
    return (bytes + SMP_DRIVER_BLOCK - 1) / SMP_DRIVER_BLOCK * SMP_DRIVER_BLOCK;
}

/* CUcontext, CUstream, CUevent, CUmodule and CUfunction are pointers; CUdeviceptr is a
 * uint64_t. */
typedef struct {
    int (*init)(unsigned flags);
    int (*device_get)(int *device, int ordinal);
    int (*context_retain)(void **context, int device);
    int (*context_release)(int device);
    int (*context_push)(void *context);
    int (*context_pop)(void **context);
    int (*capture_exchange)(int *mode);
    int (*alloc)(uint64_t *at, size_t bytes);
    int (*free)(uint64_t at);
    int (*memory_range)(uint64_t *base, size_t *bytes, uint64_t at);
    int (*pointer_attribute)(void *value, int attribute, uint64_t at);
    int (*memory_export)(smp_driver_handle *handle, uint64_t at);
    int (*memory_open)(uint64_t *at, smp_driver_handle handle, unsigned flags);
    int (*memory_close)(uint64_t at);
    int (*host_register)(void *at, size_t bytes, unsigned flags);
    int (*host_unregister)(void *at);
    int (*stream_create)(void **stream, unsigned flags);
    int (*stream_destroy)(void *stream);
    int (*stream_wait)(void *stream, void *event, unsigned flags);
    int (*stream_query)(void *stream);
    int (*stream_capturing)(void *stream, int *status); /* 0: it is not */
    int (*event_create)(void **event, unsigned flags);
    int (*event_destroy)(void *event);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event);
    int (*event_export)(smp_driver_handle *handle, void *event);
    int (*event_open)(void **event, smp_driver_handle handle);
    int (*copy)(uint64_t to, uint64_t from, size_t bytes, void *stream);
    int (*copy_from_host)(uint64_t to, const void *from, size_t bytes, void *stream);
    int (*copy_to_host)(void *to, uint64_t from, size_t bytes, void *stream);
    int (*module_load)(void **module, const void *image);
    int (*module_function)(void **function, void *module, const char *name);
    int (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                  unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                  void *stream, void **parameters, void **extra);
    int (*error_name)(int result, const char **name);
} smp_driver;

/* The table; the first call loads the library and starts the driver.  NULL, then and
 * ever after: there is none, and `why` says why. */
const smp_driver *smp_driver_load(char why[SMP_DRIVER_TEXT]);

/* Makes the context the thread's, and exempts its calls from a capture (of a CUDA
 * graph): an allocation or a query from here would end the capture, also another
 * thread's.  smp_driver_leave(), by the same thread, undoes both; pairs may be nested.
 * False: nothing to leave; `why` names the failure. */
bool smp_driver_enter(const smp_driver *driver, void *context,
                      char why[SMP_DRIVER_TEXT]);

void smp_driver_leave(const smp_driver *driver);

/* Whether SMP_CUDA_LIBRARY names another library than the GPU's. */
bool smp_driver_is_stand_in(void);

/* True for SMP_DRIVER_OK; else `why` says "call: CUDA_ERROR_..." in the driver's words.
 */
bool smp_driver_ok(const smp_driver *driver, const char *call, int result,
                   char why[SMP_DRIVER_TEXT]);

/* Waits until the stream has nothing more to do, until_ns (smp_clock_ns) at the latest:
 * SMP_DRIVER_OK; SMP_DRIVER_NOT_READY: it still has; or the device's error.  The
 * context is current, as below. */
int smp_driver_rest(const smp_driver *driver, void *stream, int64_t until_ns);

/* An event, and the handle for other processes to open it.  False: none; `why` names
 * the failure. */
bool smp_driver_share_event(const smp_driver *driver, void **event,
                            smp_driver_handle *handle, char why[SMP_DRIVER_TEXT]);

#endif
