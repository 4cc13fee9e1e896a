/* UCX, looked for at its first use.
 *
 * libucp.so.0 is taken, in this order,
 *
 *   1. from beside a libucs.so.0 already in this process (MPI's): two versions do not
 *      go together;
 *   2. from the path in SMP_UCX_LIBRARY, if set, and then from nowhere else;
 *   3. from the system's linker;
 *   4. from the path given to smp_ucx_packaged() (a Python package's).
 *
 * It stays loaded until the process ends.
 *
 * Threads  any.
 */
#ifndef SMP_COMM_TRANSPORT_UCX_LIBRARY_H
#define SMP_COMM_TRANSPORT_UCX_LIBRARY_H

#include "comm/transport/ucx/ucp_abi.h"
#include "common/status.h"

/* The path of a Python package's; the first call counts.  SMP_ERR_NO_MEMORY. */
smp_status smp_ucx_packaged(const char *path);

/* Loads it, once; *out has static storage.  SMP_ERR_SYSTEM: it is missing, is older
 * than ucp_abi.h, or lacks a function; smp_ucx_trouble() names the cause. */
smp_status smp_ucx_library(const smp_ucp **out);

/* The reason of the last failure of smp_ucx_library() on this thread; valid until its
 * next one. */
const char *smp_ucx_trouble(void);

#endif
