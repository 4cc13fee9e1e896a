/* Tensors of a device in and out of the device pool (comm/device/port.h).
 *
 * Threads  The GIL is held, and it is one thread at a time: the baton's.
 * Errors   An exception.
 */
#ifndef SMP_PYTHON_VALUES_DEVICE_H
#define SMP_PYTHON_VALUES_DEVICE_H

#include "comm/messaging/comm.h"
#include "python/values/tensor.h"

/* Whether the driver has this device: CUDA's, or one of the tests beside the driver's
 * stand-in. */
bool smp_device_is_drivers(dl_device device);

/* The calling thread's current stream on the device.  0, or -1 with an exception. */
int smp_device_stream(dl_device device, void **stream);

/* A new tensor of PyTorch's own memory: so many elements in a row; NULL with an
 * exception naming its purpose. */
PyObject *smp_device_allocate(dl_device device, dl_dtype dtype, int64_t length,
                              const char *what);

/* A block with the meta's bytes of `t`, a tensor of a device, for `dest` in *out; NULL
 * there: they must go through host memory.  0, or -1 with an exception. */
int smp_device_pack(smp_comm *comm, int dest, const dl_tensor *t, uint64_t bytes,
                    smp_block **out);

/* A new tensor on this rank's device with the elements of the meta's span in a row.
 * Takes the block: a device's, received from `source`. */
PyObject *smp_device_unpack(smp_comm *comm, int source, smp_block *block,
                            const smp_tensor_meta *meta);

/* A block out of host memory is about to be copied to this rank's device: pinned, if it
 * can be. */
void smp_device_pin(smp_comm *comm, const smp_block *block);

/* `tensor` came from `source` through host memory: the next one need not. */
int smp_device_seen(smp_comm *comm, int source, PyObject *tensor);

#endif
