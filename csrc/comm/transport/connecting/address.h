/* A rank's addresses over TCP: those of this host's interfaces, and the job's choice
 * among them.
 *
 * The choice is made from the cards of all ranks, so every rank makes the same:
 *
 *   1. Loopback, when all ranks have one network (the same network namespace).
 *   2. Else the address with neighbours on the most ranks of other networks: a
 *      neighbour is an address in the same subnet, and not the same one (every host has
 *      a bridge 172.17.0.1).  Among equals, the one leading to the world, then the
 *      first.
 *
 * With comm_interface a rank offers only the named addresses, and 1. does not apply.
 */
#ifndef SMP_COMM_TRANSPORT_CONNECTING_ADDRESS_H
#define SMP_COMM_TRANSPORT_CONNECTING_ADDRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#define SMP_TCP_ADDRESSES 16

typedef struct {
    uint8_t  family; /* 4 or 6 */
    uint8_t  prefix; /* common bits of its subnet */
    uint16_t port;   /* 0: none yet */
    uint8_t  bytes[16];
} smp_tcp_address;

/* Equal on ranks with one loopback. */
typedef struct {
    char     boot[40]; /* the kernel's boot id; empty: not known */
    uint64_t space;    /* the network namespace's number there */
} smp_tcp_network;

/* One rank's offer. */
typedef struct {
    smp_tcp_network network;
    uint32_t        forced; /* 1: comm_interface named these */
    uint32_t        naddresses;
    smp_tcp_address addresses[SMP_TCP_ADDRESSES];
} smp_tcp_offer;

/* One address of an interface, for people: "eth0 10.0.0.7/24". */
#define SMP_TCP_TEXT 80

/* The addresses of this host's interfaces in state up, the one leading to the world
 * first; returns their number.  The last are left out if there is no room.  `interface`
 * leaves those with this name, or address, or with an address in this subnet
 * ("10.0.0.0/24"); NULL: all.  Link-local ones are left out.  texts: NULL, or room for
 * as many texts as addresses. */
int smp_tcp_addresses(const char *interface, smp_tcp_address out[SMP_TCP_ADDRESSES],
                      char (*texts)[SMP_TCP_TEXT]);

/* This rank's offer: the addresses left by `interface`, NULL for all. */
void smp_tcp_offer_fill(smp_tcp_offer *offer, const char *interface);

/* Whether a rank can have written every field. */
bool smp_tcp_offer_ok(const smp_tcp_offer *offer);

/* The index of the listening address of `rank`; -1: it has none.  offers[r] is NULL for
 * a rank without TCP. */
int smp_tcp_choose(const smp_tcp_offer *const *offers, int size, int rank);

/* For bind() and connect(); the length. */
socklen_t smp_tcp_socket_address(const smp_tcp_address   *address,
                                 struct sockaddr_storage *out);

#endif
