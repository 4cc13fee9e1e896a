/* The part of UCP for this transport: constants, struct layouts and functions of
 * libucp.so.0, so building needs no UCX.
 *
 * UCX keeps them compatible within that name: a struct begins with a mask of its valid
 * fields, and grows only at its end.  tests/core/ucx_abi.c compares all of this with
 * UCX's own headers where it finds them.
 *
 * Source: ucp/api/ucp.h, ucp/api/ucp_def.h, ucs/type/status.h and
 * ucs/type/thread_mode.h of UCX 1.22 (https://github.com/openucx/ucx), the interface
 * only.  1.13 has all of it.  Copyright (C) NVIDIA CORPORATION & AFFILIATES and others,
 * BSD-3-Clause.
 */
#ifndef SMP_COMM_TRANSPORT_UCX_UCP_ABI_H
#define SMP_COMM_TRANSPORT_UCX_UCP_ABI_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

/* The oldest version with everything below. */
#define SMP_UCP_MAJOR 1
#define SMP_UCP_MINOR 13

/* ucs_status_t is a packed enum. */
typedef int8_t ucs_code;

enum {
    SMP_UCS_OK = 0,
    SMP_UCS_INPROGRESS = 1,
    SMP_UCS_ERR_BUSY = -15,
    SMP_UCS_ERR_LAST = -100
};

enum { SMP_UCS_THREAD_MODE_SERIALIZED = 1 };

enum { SMP_UCS_MEMORY_TYPE_HOST = 0 };

enum {
    SMP_UCP_PARAM_FIELD_FEATURES = 1 << 0,
    SMP_UCP_PARAM_FIELD_ESTIMATED_NUM_EPS = 1 << 6,
    SMP_UCP_FEATURE_WAKEUP = 1 << 4,
    SMP_UCP_FEATURE_AM = 1 << 6,

    SMP_UCP_WORKER_PARAM_FIELD_THREAD_MODE = 1 << 0,

    SMP_UCP_WORKER_ATTR_FIELD_ADDRESS = 1 << 1,
    SMP_UCP_WORKER_ATTR_FIELD_ADDRESS_FLAGS = 1 << 2,
    SMP_UCP_WORKER_ADDRESS_FLAG_NET_ONLY = 1 << 0,

    SMP_UCP_EP_PARAM_FIELD_REMOTE_ADDRESS = 1 << 0,
    SMP_UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE = 1 << 1,
    SMP_UCP_EP_PARAM_FIELD_ERR_HANDLER = 1 << 2,
    SMP_UCP_ERR_HANDLING_MODE_PEER = 1,

    SMP_UCP_EP_ATTR_FIELD_TRANSPORTS = 1 << 3,

    SMP_UCP_AM_HANDLER_PARAM_FIELD_ID = 1 << 0,
    SMP_UCP_AM_HANDLER_PARAM_FIELD_FLAGS = 1 << 1,
    SMP_UCP_AM_HANDLER_PARAM_FIELD_CB = 1 << 2,
    SMP_UCP_AM_HANDLER_PARAM_FIELD_ARG = 1 << 3,
    SMP_UCP_AM_FLAG_WHOLE_MSG = 1 << 0,
    SMP_UCP_AM_RECV_ATTR_FLAG_RNDV = 1 << 17,
    SMP_UCP_AM_SEND_FLAG_EAGER = 1 << 1,
    SMP_UCP_AM_SEND_FLAG_RNDV = 1 << 2,

    SMP_UCP_OP_ATTR_FIELD_CALLBACK = 1 << 1,
    SMP_UCP_OP_ATTR_FIELD_USER_DATA = 1 << 2,
    SMP_UCP_OP_ATTR_FIELD_FLAGS = 1 << 4,
    SMP_UCP_OP_ATTR_FIELD_MEMORY_TYPE = 1 << 6,
    SMP_UCP_EP_CLOSE_FLAG_FORCE = 1 << 0
};

typedef struct ucp_config  ucp_config;
typedef struct ucp_context ucp_context;
typedef struct ucp_worker  ucp_worker;
typedef struct ucp_ep      ucp_ep;
typedef struct ucp_address ucp_address;

typedef struct {
    uint64_t field_mask;
    uint64_t features;
    size_t   request_size;
    void (*request_init)(void *request);
    void (*request_cleanup)(void *request);
    uint64_t tag_sender_mask;
    int      mt_workers_shared;
    size_t   estimated_num_eps;
} ucp_params;

typedef struct {
    uint64_t field_mask;
    int      thread_mode;
} ucp_worker_params;

typedef struct {
    uint64_t     field_mask;
    int          thread_mode;
    uint32_t     address_flags;
    ucp_address *address;
    size_t       address_length;
} ucp_worker_attr;

typedef struct {
    uint64_t           field_mask;
    const ucp_address *address;
    int                err_mode;
    struct {
        void (*cb)(void *arg, ucp_ep *ep, ucs_code code);
        void *arg;
    } err_handler;
} ucp_ep_params;

typedef struct {
    const char *transport_name;
    const char *device_name;
} ucp_transport_entry;

typedef struct {
    uint64_t                field_mask;
    char                    name[32];
    struct sockaddr_storage local_sockaddr;
    struct sockaddr_storage remote_sockaddr;
    struct {
        ucp_transport_entry *entries;
        unsigned             num_entries; /* in: room; out: how many there are */
        size_t               entry_size;
    } transports;
} ucp_ep_attr;

typedef struct {
    uint64_t recv_attr;
    ucp_ep  *reply_ep;
} ucp_am_recv_param;

typedef ucs_code (*ucp_am_recv_callback)(void *arg, const void *header,
                                         size_t header_length, void *data,
                                         size_t length, const ucp_am_recv_param *param);

typedef struct {
    uint64_t             field_mask;
    unsigned             id;
    uint32_t             flags;
    ucp_am_recv_callback cb;
    void                *arg;
} ucp_am_handler_param;

typedef struct {
    uint32_t op_attr_mask;
    uint32_t flags;
    void    *request;
    union {
        void (*send)(void *request, ucs_code code, void *user_data);
        void (*recv_am)(void *request, ucs_code code, size_t length, void *user_data);
    } cb;
    uint64_t datatype;
    void    *user_data;
    void    *reply_buffer;
    int      memory_type;
} ucp_request_param;

/* The result of several functions: NULL when all is done, a request, or a code. */
typedef void *ucs_code_ptr;

static inline int
smp_ucs_is_error(ucs_code_ptr p)
{
    return (uintptr_t)p >= (uintptr_t)SMP_UCS_ERR_LAST;
}

/* The functions, by the names of the library. */
typedef struct {
    void (*ucp_get_version)(unsigned *major, unsigned *minor, unsigned *release);
    const char *(*ucp_get_version_string)(void);
    ucs_code (*ucp_config_read)(const char *prefix, const char *file, ucp_config **out);
    ucs_code (*ucp_config_modify)(ucp_config *config, const char *name,
                                  const char *value);
    void (*ucp_config_release)(ucp_config *config);
    ucs_code (*ucp_init_version)(unsigned major, unsigned minor,
                                 const ucp_params *params, const ucp_config *config,
                                 ucp_context **out);
    void (*ucp_cleanup)(ucp_context *context);
    ucs_code (*ucp_worker_create)(ucp_context *context, const ucp_worker_params *params,
                                  ucp_worker **out);
    void (*ucp_worker_destroy)(ucp_worker *worker);
    ucs_code (*ucp_worker_query)(ucp_worker *worker, ucp_worker_attr *attr);
    void (*ucp_worker_release_address)(ucp_worker *worker, ucp_address *address);
    unsigned (*ucp_worker_progress)(ucp_worker *worker);
    ucs_code (*ucp_worker_get_efd)(ucp_worker *worker, int *fd);
    ucs_code (*ucp_worker_arm)(ucp_worker *worker);
    ucs_code (*ucp_worker_set_am_recv_handler)(ucp_worker                 *worker,
                                               const ucp_am_handler_param *param);
    ucs_code (*ucp_ep_create)(ucp_worker *worker, const ucp_ep_params *params,
                              ucp_ep **out);
    ucs_code (*ucp_ep_query)(ucp_ep *ep, ucp_ep_attr *attr);
    ucs_code_ptr (*ucp_ep_close_nbx)(ucp_ep *ep, const ucp_request_param *param);
    ucs_code_ptr (*ucp_am_send_nbx)(ucp_ep *ep, unsigned id, const void *header,
                                    size_t header_length, const void *buffer,
                                    size_t count, const ucp_request_param *param);
    ucs_code_ptr (*ucp_am_recv_data_nbx)(ucp_worker *worker, void *data, void *buffer,
                                         size_t count, const ucp_request_param *param);
    ucs_code (*ucp_request_check_status)(void *request);
    void (*ucp_request_free)(void *request);
} smp_ucp;

#endif
