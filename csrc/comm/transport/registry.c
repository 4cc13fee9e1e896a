/* The transports for comms, in order of preference. */
#include <string.h>

#include "comm/transport/transport.h"
#include "common/lock.h"

static smp_lock lock =
    SMP_LOCK_INIT(SMP_LOCK_REGISTRY); /* guards the variables below */
static const smp_transport *registered[SMP_TRANSPORTS + 1] = {
    /* and NULL */
    &smp_transport_shm,
    &smp_transport_ucx,
    &smp_transport_tcp,
};

/* Caller holds the lock. */
static int
count(void)
{
    int n = 0;

    while (registered[n] != NULL) {
        n++;
    }
    return n;
}

/* Caller holds the lock. */
static const smp_transport *
find(const char *name, size_t length)
{
    for (int i = 0; registered[i] != NULL; i++) {
        if (strlen(registered[i]->name) == length &&
            strncmp(registered[i]->name, name, length) == 0) {
            return registered[i];
        }
    }
    return NULL;
}

smp_status
smp_transport_register(const smp_transport *transport)
{
    smp_status status = SMP_OK;

    if (transport->abi != SMP_TRANSPORT_ABI) {
        return SMP_ERR_INVALID;
    }
    smp_lock_acquire(&lock);
    if (find(transport->name, strlen(transport->name)) == NULL) {
        int n = count();

        if (n == SMP_TRANSPORTS) {
            status = SMP_ERR_INVALID;
        } else {
            registered[n] = transport;
        }
    }
    smp_lock_release(&lock);
    return status;
}

const smp_transport *
smp_transport_find(const char *name, size_t length)
{
    const smp_transport *found;

    smp_lock_acquire(&lock);
    found = find(name, length);
    smp_lock_release(&lock);
    return found;
}

int
smp_transport_all(const smp_transport *out[SMP_TRANSPORTS])
{
    int n;

    smp_lock_acquire(&lock);
    n = count();
    memcpy(out, registered, (size_t)n * sizeof(*registered));
    smp_lock_release(&lock);
    return n;
}
