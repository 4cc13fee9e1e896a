/* The interfaces as the kernel lists them, and the choice of an address without
 * messages. */
#define _GNU_SOURCE
#include "comm/transport/connecting/address.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/log.h"

/* Addresses of documentation (RFC 5737, 3849): routed like any other of the world. */
#define WORLD_4 "203.0.113.1"
#define WORLD_6 "2001:db8::1"
#define WORLDS 2

static size_t
length_of(const smp_tcp_address *address)
{
    return address->family == 4 ? 4 : 16;
}

static bool
same_bytes(const smp_tcp_address *a, const smp_tcp_address *b)
{
    return a->family == b->family && memcmp(a->bytes, b->bytes, length_of(a)) == 0;
}

/* Whether the first `prefix` bits are equal. */
static bool
in_subnet(const smp_tcp_address *a, const smp_tcp_address *b, unsigned prefix)
{
    size_t   whole = prefix / 8;
    unsigned rest = prefix % 8;

    if (a->family != b->family || prefix > 8 * length_of(a) ||
        memcmp(a->bytes, b->bytes, whole) != 0) {
        return false;
    }
    return rest == 0 || (a->bytes[whole] ^ b->bytes[whole]) >> (8 - rest) == 0;
}

static bool
is_loopback(const smp_tcp_address *address)
{
    static const uint8_t one[16] = {[15] = 1};

    return address->family == 4 ? address->bytes[0] == 127
                                : memcmp(address->bytes, one, sizeof(one)) == 0;
}

static bool
from_socket(const struct sockaddr *from, smp_tcp_address *out)
{
    *out = (smp_tcp_address){0};
    if (from != NULL && from->sa_family == AF_INET) {
        out->family = 4;
        memcpy(out->bytes, &((const struct sockaddr_in *)(const void *)from)->sin_addr,
               4);
        return true;
    }
    if (from != NULL && from->sa_family == AF_INET6) {
        const struct sockaddr_in6 *six =
            (const struct sockaddr_in6 *)(const void *)from;

        out->family = 6;
        memcpy(out->bytes, &six->sin6_addr, 16);
        return !IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr); /* needs a zone too */
    }
    return false;
}

socklen_t
smp_tcp_socket_address(const smp_tcp_address *address, struct sockaddr_storage *out)
{
    memset(out, 0, sizeof(*out));
    if (address->family == 4) {
        struct sockaddr_in *four = (struct sockaddr_in *)out;

        four->sin_family = AF_INET;
        four->sin_port = htons(address->port);
        memcpy(&four->sin_addr, address->bytes, 4);
        return sizeof(*four);
    }
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)out;

    six->sin6_family = AF_INET6;
    six->sin6_port = htons(address->port);
    memcpy(&six->sin6_addr, address->bytes, 16);
    return sizeof(*six);
}

/* "10.0.0.0/24", or an address alone. */
static bool
parse_subnet(const char *text, smp_tcp_address *out)
{
    char  address[INET6_ADDRSTRLEN];
    char *end;
    long  prefix;
    int   length = (int)strcspn(text, "/");

    if (length >= (int)sizeof(address)) {
        return false;
    }
    snprintf(address, sizeof(address), "%.*s", length, text);
    *out = (smp_tcp_address){.family = 4};
    if (inet_pton(AF_INET, address, out->bytes) != 1) {
        out->family = 6;
        if (inet_pton(AF_INET6, address, out->bytes) != 1) {
            return false;
        }
    }
    out->prefix = (uint8_t)(8 * length_of(out));
    if (text[length] == '/') {
        prefix = strtol(text + length + 1, &end, 10);
        if (end == text + length + 1 || *end != '\0' || prefix < 0 ||
            prefix > out->prefix) {
            return false;
        }
        out->prefix = (uint8_t)prefix;
    }
    return true;
}

static uint8_t
prefix_of(const struct sockaddr *mask)
{
    smp_tcp_address bits;
    int             prefix = 0;

    if (!from_socket(mask, &bits)) {
        return 0;
    }
    for (size_t i = 0; i < length_of(&bits); i++) {
        prefix += __builtin_popcount(bits.bytes[i]);
    }
    return (uint8_t)prefix;
}

/* The kernel's own address for packets to `world`; nothing is sent. */
static bool
leads_to(const char *world, smp_tcp_address *out)
{
    smp_tcp_address         there;
    struct sockaddr_storage to;
    struct sockaddr_storage from = {0};
    socklen_t               bytes = sizeof(from);
    bool                    found;
    int                     fd;

    if (!parse_subnet(world, &there)) {
        return false;
    }
    there.port = 9; /* discard; any will do */
    fd = socket(there.family == 4 ? AF_INET : AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return false;
    }
    found =
        connect(fd, (struct sockaddr *)&to, smp_tcp_socket_address(&there, &to)) == 0 &&
        getsockname(fd, (struct sockaddr *)&from, &bytes) == 0 &&
        from_socket((struct sockaddr *)&from, out);
    close(fd);
    return found;
}

static void
describe(const smp_tcp_address *address, const char *name, char text[SMP_TCP_TEXT])
{
    char printed[INET6_ADDRSTRLEN];

    inet_ntop(address->family == 4 ? AF_INET : AF_INET6, address->bytes, printed,
              sizeof(printed));
    snprintf(text, SMP_TCP_TEXT, "%s %s/%d", name, printed, address->prefix);
}

/* The number of the address's group: leading to the world, v4 and then v6, and the
 * others. */
static size_t
group_of(const smp_tcp_address *address, const smp_tcp_address world[WORLDS])
{
    size_t group = 0;

    while (group < WORLDS && !same_bytes(&world[group], address)) {
        group++;
    }
    return group;
}

int
smp_tcp_addresses(const char *interface, smp_tcp_address out[SMP_TCP_ADDRESSES],
                  char (*texts)[SMP_TCP_TEXT])
{
    static const char *const worlds[WORLDS] = {WORLD_4, WORLD_6};
    struct ifaddrs          *all;
    smp_tcp_address          world[WORLDS] = {0}; /* family 0: nothing leads there */
    smp_tcp_address          wanted = {0};
    smp_tcp_address          here;
    int                      n = 0;
    int                      left_out = 0;

    if (getifaddrs(&all) != 0) {
        return 0;
    }
    for (size_t w = 0; w < WORLDS; w++) {
        if (!leads_to(worlds[w], &world[w])) {
            world[w].family = 0;
        }
    }
    if (interface != NULL && !parse_subnet(interface, &wanted)) {
        wanted.family = 0;
    }
    for (size_t group = 0; group <= WORLDS; group++) {
        for (const struct ifaddrs *one = all; one != NULL; one = one->ifa_next) {
            if ((one->ifa_flags & IFF_UP) == 0 || !from_socket(one->ifa_addr, &here) ||
                group_of(&here, world) != group) {
                continue;
            }
            here.prefix = prefix_of(one->ifa_netmask);
            if (interface != NULL && strcmp(one->ifa_name, interface) != 0 &&
                !in_subnet(&here, &wanted, wanted.prefix)) {
                continue;
            }
            if (n == SMP_TCP_ADDRESSES) {
                left_out++;
                continue;
            }
            if (texts != NULL) {
                describe(&here, one->ifa_name, texts[n]);
            }
            out[n++] = here;
        }
    }
    freeifaddrs(all);
    if (left_out != 0) {
        smp_log(
            SMP_LOG_WARN,
            "this host has %d addresses, and other hosts are told of %d, the default "
            "route's first; comm_interface chooses",
            n + left_out, n);
    }
    return n;
}

static void
network_fill(smp_tcp_network *network)
{
    int         fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    struct stat space;

    *network = (smp_tcp_network){0};
    if (fd < 0) {
        return;
    }
    if (stat("/proc/self/ns/net", &space) == 0 &&
        read(fd, network->boot, sizeof(network->boot) - 1) > 0) {
        network->space = space.st_ino;
    }
    close(fd);
}

static bool
same_network(const smp_tcp_network *a, const smp_tcp_network *b)
{
    return a->space != 0 && a->space == b->space &&
           memcmp(a->boot, b->boot, sizeof(a->boot)) == 0;
}

void
smp_tcp_offer_fill(smp_tcp_offer *offer, const char *interface)
{
    *offer = (smp_tcp_offer){.forced = interface != NULL};
    network_fill(&offer->network);
    offer->naddresses = (uint32_t)smp_tcp_addresses(interface, offer->addresses, NULL);
}

bool
smp_tcp_offer_ok(const smp_tcp_offer *offer)
{
    if (offer->forced > 1 || offer->naddresses > SMP_TCP_ADDRESSES) {
        return false;
    }
    for (uint32_t i = 0; i < offer->naddresses; i++) {
        const smp_tcp_address *address = &offer->addresses[i];

        if ((address->family != 4 && address->family != 6) || address->port == 0 ||
            address->prefix > 8 * length_of(address)) {
            return false;
        }
    }
    return true;
}

/* Whether one of `offer`'s addresses is in the subnet of `address`. */
static bool
has_neighbour(const smp_tcp_offer *offer, const smp_tcp_address *address)
{
    for (uint32_t i = 0; i < offer->naddresses; i++) {
        const smp_tcp_address *theirs = &offer->addresses[i];

        if (in_subnet(theirs, address, address->prefix) &&
            in_subnet(theirs, address, theirs->prefix) &&
            !same_bytes(theirs, address)) {
            return true;
        }
    }
    return false;
}

int
smp_tcp_choose(const smp_tcp_offer *const *offers, int size, int rank)
{
    const smp_tcp_offer *own = offers[rank];
    bool                 together = !own->forced;
    int                  best = -1;
    int                  most = -1;

    for (int r = 0; r < size; r++) {
        together = together && (offers[r] == NULL ||
                                same_network(&offers[r]->network, &own->network));
    }
    for (int i = 0; i < (int)own->naddresses; i++) {
        const smp_tcp_address *address = &own->addresses[i];
        int                    neighbours = together && is_loopback(address);

        if (!own->forced && is_loopback(address) && !together) {
            continue; /* no other rank reaches it */
        }
        for (int r = 0; r < size; r++) {
            neighbours += offers[r] != NULL &&
                          !same_network(&offers[r]->network, &own->network) &&
                          has_neighbour(offers[r], address);
        }
        if (neighbours > most) {
            most = neighbours;
            best = i;
        }
    }
    return best;
}
