/* csrc/comm/transport/ucx/ucp_abi.h against UCX's own headers, while this compiles. */
#include "comm/transport/ucx/ucp_abi.h"

#if defined(__has_include)
#    if __has_include(<ucp/api/ucp.h>)
#        include <ucp/api/ucp.h>
#        define HAS_HEADERS 1
#    endif
#endif

extern const char smp_ucx_abi_checked[];

#ifdef HAS_HEADERS
const char smp_ucx_abi_checked[] = "compared with UCX's headers";

/* Compares one number; one field's place and size; one function's pointer. */
#    define SAME(name) _Static_assert((long long)SMP_##name == (long long)name, #    name)
#    define FIELD(ours, theirs, field)                                                 \
        _Static_assert(offsetof(ours, field) == offsetof(theirs, field) &&             \
                           sizeof(((ours *)0)->field) == sizeof(((theirs *)0)->field), \
                       #theirs "." #field)

SAME(UCS_OK);
SAME(UCS_INPROGRESS);
SAME(UCS_ERR_BUSY);
SAME(UCS_ERR_LAST);
SAME(UCS_THREAD_MODE_SERIALIZED);
SAME(UCS_MEMORY_TYPE_HOST);
SAME(UCP_PARAM_FIELD_FEATURES);
SAME(UCP_PARAM_FIELD_ESTIMATED_NUM_EPS);
SAME(UCP_FEATURE_WAKEUP);
SAME(UCP_FEATURE_AM);
SAME(UCP_WORKER_PARAM_FIELD_THREAD_MODE);
SAME(UCP_WORKER_ATTR_FIELD_ADDRESS);
SAME(UCP_WORKER_ATTR_FIELD_ADDRESS_FLAGS);
SAME(UCP_WORKER_ADDRESS_FLAG_NET_ONLY);
SAME(UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
SAME(UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
SAME(UCP_EP_PARAM_FIELD_ERR_HANDLER);
SAME(UCP_ERR_HANDLING_MODE_PEER);
SAME(UCP_EP_ATTR_FIELD_TRANSPORTS);
SAME(UCP_AM_HANDLER_PARAM_FIELD_ID);
SAME(UCP_AM_HANDLER_PARAM_FIELD_FLAGS);
SAME(UCP_AM_HANDLER_PARAM_FIELD_CB);
SAME(UCP_AM_HANDLER_PARAM_FIELD_ARG);
SAME(UCP_AM_FLAG_WHOLE_MSG);
SAME(UCP_AM_RECV_ATTR_FLAG_RNDV);
SAME(UCP_AM_SEND_FLAG_EAGER);
SAME(UCP_AM_SEND_FLAG_RNDV);
SAME(UCP_OP_ATTR_FIELD_CALLBACK);
SAME(UCP_OP_ATTR_FIELD_USER_DATA);
SAME(UCP_OP_ATTR_FIELD_FLAGS);
SAME(UCP_OP_ATTR_FIELD_MEMORY_TYPE);
SAME(UCP_EP_CLOSE_FLAG_FORCE);

_Static_assert(sizeof(ucs_code) == sizeof(ucs_status_t), "ucs_status_t");

FIELD(ucp_params, ucp_params_t, field_mask);
FIELD(ucp_params, ucp_params_t, features);
FIELD(ucp_params, ucp_params_t, request_size);
FIELD(ucp_params, ucp_params_t, mt_workers_shared);
FIELD(ucp_params, ucp_params_t, estimated_num_eps);
FIELD(ucp_worker_params, ucp_worker_params_t, field_mask);
FIELD(ucp_worker_params, ucp_worker_params_t, thread_mode);
FIELD(ucp_worker_attr, ucp_worker_attr_t, field_mask);
FIELD(ucp_worker_attr, ucp_worker_attr_t, address_flags);
FIELD(ucp_worker_attr, ucp_worker_attr_t, address);
FIELD(ucp_worker_attr, ucp_worker_attr_t, address_length);
FIELD(ucp_ep_params, ucp_ep_params_t, field_mask);
FIELD(ucp_ep_params, ucp_ep_params_t, address);
FIELD(ucp_ep_params, ucp_ep_params_t, err_mode);
FIELD(ucp_ep_params, ucp_ep_params_t, err_handler.cb);
FIELD(ucp_ep_params, ucp_ep_params_t, err_handler.arg);
FIELD(ucp_transport_entry, ucp_transport_entry_t, transport_name);
FIELD(ucp_transport_entry, ucp_transport_entry_t, device_name);
FIELD(ucp_ep_attr, ucp_ep_attr_t, field_mask);
FIELD(ucp_ep_attr, ucp_ep_attr_t, transports.entries);
FIELD(ucp_ep_attr, ucp_ep_attr_t, transports.num_entries);
FIELD(ucp_ep_attr, ucp_ep_attr_t, transports.entry_size);
FIELD(ucp_am_recv_param, ucp_am_recv_param_t, recv_attr);
FIELD(ucp_am_recv_param, ucp_am_recv_param_t, reply_ep);
FIELD(ucp_am_handler_param, ucp_am_handler_param_t, field_mask);
FIELD(ucp_am_handler_param, ucp_am_handler_param_t, id);
FIELD(ucp_am_handler_param, ucp_am_handler_param_t, flags);
FIELD(ucp_am_handler_param, ucp_am_handler_param_t, cb);
FIELD(ucp_am_handler_param, ucp_am_handler_param_t, arg);
FIELD(ucp_request_param, ucp_request_param_t, op_attr_mask);
FIELD(ucp_request_param, ucp_request_param_t, flags);
FIELD(ucp_request_param, ucp_request_param_t, cb.send);
FIELD(ucp_request_param, ucp_request_param_t, cb.recv_am);
FIELD(ucp_request_param, ucp_request_param_t, user_data);
FIELD(ucp_request_param, ucp_request_param_t, memory_type);
#else
const char smp_ucx_abi_checked[] =
    "without UCX's headers: its layouts are not compared";
#endif
