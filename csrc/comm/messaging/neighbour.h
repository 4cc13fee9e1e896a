/* What a comm knows of the other ranks, for what is faster than messages through
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

/* The rank's shared memory, also this rank's own; false: it is not mapped here.  A
 * connected comm. */
bool smp_comm_neighbour(const smp_comm *comm, int rank, smp_neighbour *out);

/* Blocks of this rank's arena in [address, address + bytes) that are given back are not
 * used again while one of users[0 .. n), which it takes, operates on them
 * (smp_user_operates(last)).  Other addresses, and users NULL: nothing.  Any thread. */
void smp_comm_keep(smp_comm *comm, const void *address, size_t bytes, smp_user *users,
                   int n, uint64_t last);

/* Nothing more comes from `rank`: it died, broke the protocol or ended in order
 * (smp_comm_left).  What it wrote before can be seen.  Any thread. */
bool smp_comm_gone(const smp_comm *comm, int rank);

/* The number of this rank. */
int smp_comm_rank(const smp_comm *comm);

/* Where messages for groups arrive: those of other hosts' ranks, without anybody
 * waiting in smp_comm_receive(). */
smp_post *smp_comm_post(smp_comm *comm);

/* Where tensors of this rank's device enter and leave it (comm/device/port.h). */
smp_device_port *smp_comm_device(smp_comm *comm);

/* Whether a waiter may keep its core from others: each rank of this host has one. */
bool smp_comm_spins(const smp_comm *comm);

#endif
