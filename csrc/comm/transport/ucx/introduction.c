/* A pass and an address, one after the other. */
#include "comm/transport/ucx/introduction.h"

#include <stdlib.h>

#include "comm/transport/connecting/lifeline.h"

#define MAGIC 0x55504d53u
#define VERSION 1u

typedef struct {
    uint32_t magic; /* also shows the byte order */
    uint32_t version;
    uint64_t pass;
    uint64_t bytes; /* of the address behind */
} introduction;

bool
smp_ucx_introduce(int fd, uint64_t pass, const void *address, size_t n)
{
    introduction i = {.magic = MAGIC, .version = VERSION, .pass = pass, .bytes = n};

    return smp_lifeline_tell(fd, &i, sizeof(i)) && smp_lifeline_tell(fd, address, n);
}

smp_status
smp_ucx_be_introduced(int fd, const smp_deadline *deadline, uint64_t *pass,
                      void **address)
{
    introduction i;
    smp_status   status = smp_lifeline_listen(fd, &i, sizeof(i), deadline);
    void        *theirs;

    if (status != SMP_OK) {
        return status;
    }
    if (i.magic != MAGIC || i.version != VERSION || i.bytes == 0 ||
        i.bytes > SMP_UCX_ADDRESS_BYTES) {
        return SMP_ERR_MALFORMED;
    }
    theirs = malloc(i.bytes);
    if (theirs == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    status = smp_lifeline_listen(fd, theirs, i.bytes, deadline);
    if (status != SMP_OK) {
        free(theirs);
        return status;
    }
    *pass = i.pass;
    *address = theirs;
    return SMP_OK;
}
