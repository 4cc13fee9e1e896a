/* The part of DLPack 1.3 between binaries: struct layouts and the table behind
 * torch.Tensor.__dlpack_c_exchange_api__.
 *
 * Source: dlpack.h 1.3 (https://github.com/dmlc/dlpack), the layouts only.
 */
#ifndef SMP_PYTHON_VALUES_DLPACK_ABI_H
#define SMP_PYTHON_VALUES_DLPACK_ABI_H

#include <stdint.h>

#include "comm/collective/kernels/kind.h"

#define SMP_DLPACK_MAJOR 1

enum { SMP_DL_CPU = 1, SMP_DL_CUDA = 2, SMP_DL_OTHER = 12 /* kDLExtDev */ };

typedef struct {
    uint32_t major;
    uint32_t minor;
} dl_version;

typedef struct {
    int32_t type;
    int32_t id;
} dl_device;

typedef struct {
    uint8_t  code; /* SMP_DL_INT ... */
    uint8_t  bits;
    uint16_t lanes;
} dl_dtype;

typedef struct {
    void     *data;
    dl_device device;
    int32_t   ndim;
    dl_dtype  dtype;
    int64_t  *shape;
    int64_t  *strides; /* in elements */
    uint64_t  byte_offset;
} dl_tensor;

typedef struct dl_managed {
    dl_version version;
    void      *manager_ctx;
    void (*deleter)(struct dl_managed *self);
    uint64_t  flags;
    dl_tensor tensor;
} dl_managed;

typedef struct dl_exchange_header {
    dl_version                 version;
    struct dl_exchange_header *older;
} dl_exchange_header;

typedef struct {
    dl_exchange_header header;
    int (*allocate)(dl_tensor *prototype, dl_managed **out, void *error_ctx,
                    void (*set_error)(void *, const char *, const char *));
    int (*from_python)(void *tensor, dl_managed **out);
    int (*to_python)(dl_managed *managed, void **out); /* takes managed */
    int (*borrow)(void *tensor, dl_tensor *out); /* until control returns to Python */
    int (*current_stream)(int32_t device_type, int32_t device_id, void **out);
} dl_exchange;

#endif
