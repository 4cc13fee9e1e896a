/* A comm's view of the other ranks, for faster ways than messages through
 * smp_comm_receive(). */
#ifndef SMP_COMM_MESSAGING_NEIGHBOUR_H
#define SMP_COMM_MESSAGING_NEIGHBOUR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/memory/segment.h"
#include "comm/memory/user.h"
#include "comm/messaging/post.h"

typedef struct smp_comm        smp_comm;
typedef struct smp_device_port smp_device_port;
typedef struct smp_pinned      smp_pinned;

/* The rank's shared memory, also this rank's own; false: it is not mapped here.  A
 * connected comm. */
bool smp_comm_neighbour(const smp_comm *comm, int rank, smp_neighbour *out);

/* Blocks of this rank's arena in [address, address + bytes), once given back, are not
 * used again while one of users[0 .. n) operates on them (smp_user_operates(last)).
 * Takes the users.  Other addresses, and users NULL: nothing.  Any thread. */
void smp_comm_keep(smp_comm *comm, const void *address, size_t bytes, smp_user *users,
                   int n, uint64_t last);

/* Nothing more comes from `rank`: it died, broke the protocol or ended in order
 * (smp_comm_left).  Its earlier writes can be seen.  Any thread. */
bool smp_comm_gone(const smp_comm *comm, int rank);

/* The number of this rank. */
int smp_comm_rank(const smp_comm *comm);

/* The post of groups' messages: those of other hosts' ranks, without a wait in
 * smp_comm_receive(). */
smp_post *smp_comm_post(smp_comm *comm);

/* The port of tensors into and out of this rank's device (comm/device/port.h). */
smp_device_port *smp_comm_device(smp_comm *comm);

/* Host memory pinned for that device (comm/device/pinned.h). */
smp_pinned *smp_comm_pinned(smp_comm *comm);

/* Whether a waiter may keep its core from others: each rank of this host has one. */
bool smp_comm_spins(const smp_comm *comm);

#endif
