/* A chain's call as the caller has written it. */
#include "python/modules/served.h"

#include <string.h>

#include "python/modules/session.h"
#include "python/values/unpack_scalar.h"

static const char *
sized(smp_unpack *from, uint32_t *size)
{
    return smp_unpack_raw(from, 1) == NULL ? NULL : smp_unpack_sized(from, size);
}

int
smp_served_read(smp_unpack *from, smp_written_call *call)
{
    const char *bytes;
    uint32_t    nbytes;
    uint32_t    nsources;

    if ((bytes = sized(from, &nbytes)) == NULL ||
        (call->values = sized(from, &call->nvalues)) == NULL ||
        (call->sources = sized(from, &nsources)) == NULL) {
        return -1;
    }
    if (nbytes != sizeof(call->head)) {
        return smp_malformed("a chain's call of %u bytes", (unsigned)nbytes);
    }
    memcpy(&call->head, bytes, sizeof(call->head));
    if (nsources != call->head.nsources * sizeof(smp_chain_source) ||
        call->head.entry < 0 || (size_t)call->head.entry >= smp_the_session.nentries) {
        return smp_malformed("a chain's call of entry %d", (int)call->head.entry);
    }
    return 0;
}
