/* Interfaces by their addresses, and their hardware as told by the kernel. */
#define _GNU_SOURCE
#include "comm/transport/ucx/devices.h"

#include <dirent.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define FAST "/sys/class/infiniband"

/* Whether a folder holds anything; the first name in it. */
static bool
first_in(const char *path, char name[NAME_MAX + 1])
{
    DIR           *folder = opendir(path);
    struct dirent *entry;
    bool           found = false;

    if (folder == NULL) {
        return false;
    }
    while (!found && (entry = readdir(folder)) != NULL) {
        found = entry->d_name[0] != '.';
        if (found) {
            memcpy(name, entry->d_name, strlen(entry->d_name) + 1);
        }
    }
    closedir(folder);
    return found;
}

bool
smp_ucx_fast_devices(void)
{
    char name[NAME_MAX + 1];

    return first_in(FAST, name);
}

static bool
is_at(const struct sockaddr *at, const smp_tcp_address *address)
{
    if (at == NULL || at->sa_family != (address->family == 4 ? AF_INET : AF_INET6)) {
        return false;
    }
    return at->sa_family == AF_INET
               ? memcmp(&((const struct sockaddr_in *)(const void *)at)->sin_addr,
                        address->bytes, 4) == 0
               : memcmp(&((const struct sockaddr_in6 *)(const void *)at)->sin6_addr,
                        address->bytes, 16) == 0;
}

static bool
interface_of(const smp_tcp_address *address, char name[IF_NAMESIZE])
{
    struct ifaddrs *all;
    bool            found = false;

    if (getifaddrs(&all) != 0) {
        return false;
    }
    for (const struct ifaddrs *i = all; i != NULL && !found; i = i->ifa_next) {
        if (is_at(i->ifa_addr, address)) {
            snprintf(name, IF_NAMESIZE, "%s", i->ifa_name);
            found = true;
        }
    }
    freeifaddrs(all);
    return found;
}

/* "eth1", or "ib0,mlx5_0:1" where the interface belongs to such a device. */
static smp_status
write_only(const char *interface, char out[SMP_UCX_DEVICES_BYTES])
{
    char  path[128];
    char  device[NAME_MAX + 1];
    char  text[16] = "";
    FILE *file;

    snprintf(path, sizeof(path), "/sys/class/net/%s/device/infiniband", interface);
    if (!first_in(path, device)) {
        snprintf(out, SMP_UCX_DEVICES_BYTES, "%s", interface);
        return SMP_OK;
    }
    snprintf(path, sizeof(path), "/sys/class/net/%s/dev_port", interface);
    file = fopen(path, "re");
    if (file != NULL) {
        (void)!fgets(text, sizeof(text), file);
        fclose(file);
    }
    snprintf(out, SMP_UCX_DEVICES_BYTES, "%s,%s:%lu", interface, device,
             strtoul(text, NULL, 10) + 1);
    return SMP_OK;
}

/* "^lo,docker0": all but the other interfaces. */
static smp_status
write_all_but_others(const char *interface, char out[SMP_UCX_DEVICES_BYTES])
{
    struct if_nameindex *all = if_nameindex();
    size_t               at = 0;

    if (all == NULL) {
        return smp_status_refused();
    }
    for (const struct if_nameindex *i = all; i->if_index != 0 && i->if_name != NULL;
         i++) {
        if (strcmp(i->if_name, interface) != 0 && at < SMP_UCX_DEVICES_BYTES) {
            at += (size_t)snprintf(out + at, SMP_UCX_DEVICES_BYTES - at, "%s%s",
                                   at == 0 ? "^" : ",", i->if_name);
        }
    }
    if_freenameindex(all);
    if (at == 0) {
        snprintf(out, SMP_UCX_DEVICES_BYTES, "all");
    }
    return at < SMP_UCX_DEVICES_BYTES ? SMP_OK : SMP_ERR_SYSTEM;
}

static bool
is_loopback(const smp_tcp_address *address)
{
    static const uint8_t six[16] = {[15] = 1};

    return address->family == 4 ? address->bytes[0] == 127
                                : memcmp(address->bytes, six, sizeof(six)) == 0;
}

smp_status
smp_ucx_devices(const smp_tcp_address *address, bool only,
                char out[SMP_UCX_DEVICES_BYTES])
{
    char interface[IF_NAMESIZE];

    if (!only && is_loopback(address)) {
        snprintf(out, SMP_UCX_DEVICES_BYTES, "all");
        return SMP_OK;
    }
    if (!interface_of(address, interface)) {
        return SMP_ERR_SYSTEM;
    }
    return only || !smp_ucx_fast_devices() ? write_only(interface, out)
                                           : write_all_but_others(interface, out);
}
