/* Interfaces that a test lists in place of this machine's; the linker sends the core's
 * questions here (see the Makefile). */
#ifndef SMP_TESTS_INTERFACES_H
#define SMP_TESTS_INTERFACES_H

#include <ifaddrs.h>
#include <stddef.h>

/* NULL: nothing takes their place. */
static struct ifaddrs *listed;

int  __real_getifaddrs(struct ifaddrs **all);
int  __wrap_getifaddrs(struct ifaddrs **all);
void __real_freeifaddrs(struct ifaddrs *all);
void __wrap_freeifaddrs(struct ifaddrs *all);

int
__wrap_getifaddrs(struct ifaddrs **all)
{
    if (listed == NULL) {
        return __real_getifaddrs(all);
    }
    *all = listed;
    return 0;
}

void
__wrap_freeifaddrs(struct ifaddrs *all)
{
    if (all != listed) {
        __real_freeifaddrs(all);
    }
}

#endif
