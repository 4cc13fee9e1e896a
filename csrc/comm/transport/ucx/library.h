/* UCX, looked for when it is wanted.
 *
 * libucp.so.0 is taken, in this order,
 *
 *   1. from beside the libucs.so.0 that this process has already (MPI's): two versions
 *      do not go together;
 *   2. from the path in SMP_UCX_LIBRARY, if that is set, and then from nowhere else;
 *   3. from where the system's linker finds it;
 *   4. from the path that smp_ucx_packaged() has told (a Python package's).
 *
 * It stays loaded until the process ends.
 *
 * Threads  any.
 */
#ifndef SMP_COMM_TRANSPORT_UCX_LIBRARY_H
#define SMP_COMM_TRANSPORT_UCX_LIBRARY_H

#include "comm/transport/ucx/ucp_abi.h"
#include "common/status.h"

/* Where a Python package has it; the first call counts.  SMP_ERR_NO_MEMORY. */
smp_status smp_ucx_packaged(const char *path);

/* Loads it, once; *out has static storage.  SMP_ERR_SYSTEM: it is not there, is older
 * than what ucp_abi.h describes, or lacks a function; smp_ucx_trouble() says which. */
smp_status smp_ucx_library(const smp_ucp **out);

/* Why the last smp_ucx_library() of this thread failed; valid until its next one. */
const char *smp_ucx_trouble(void);

#endif
