/* The members of a group on each host, and the nodes of the tree of sums
 * (comm/collective/kernels/reduce.h) within a host.
 *
 * Hosts are numbered by their lowest member; a host's members have places in their
 * order.
 */
#ifndef SMP_COMM_COLLECTIVE_INTER_HOST_HOSTS_H
#define SMP_COMM_COLLECTIVE_INTER_HOST_HOSTS_H

#include <stdbool.h>
#include <stddef.h>

#include "common/status.h"

/* tree(first .. first + n), a largest node with all its members on one host. */
typedef struct {
    int first;
    int n;
    int host;
    int place; /* of member `first` on the host */
} smp_node;

typedef struct {
    int       size; /* members */
    int       nhosts;
    int      *host_of;  /* owned, like all below: [size] */
    int      *place_of; /* [size] */
    int      *order;    /* [size]: members, host by host */
    int      *starts;   /* [nhosts + 1]: host h has order[starts[h] .. starts[h + 1]) */
    smp_node *nodes;    /* [nnodes], in the order of the members; they cover the tree */
    int       nnodes;
} smp_hosts;

/* lowest[m] is the lowest member on m's host.  SMP_ERR_NO_MEMORY.  fini takes an
 * all-zero one. */
smp_status smp_hosts_init(smp_hosts *hosts, const int *lowest, int size);
void       smp_hosts_fini(smp_hosts *hosts);

/* The number of a host's members, and the member at a place. */
static inline int
smp_hosts_count(const smp_hosts *hosts, int host)
{
    return hosts->starts[host + 1] - hosts->starts[host];
}

static inline int
smp_hosts_member(const smp_hosts *hosts, int host, int place)
{
    return hosts->order[hosts->starts[host] + place];
}

/* The number of a host's nodes. */
int smp_hosts_nodes(const smp_hosts *hosts, int host);

#endif
