/* Numbering hosts, and cutting the tree where they meet. */
#include "comm/collective/inter_host/hosts.h"

#include <stdlib.h>

static void
number_hosts(smp_hosts *hosts, const int *lowest)
{
    int n = 0;

    for (int m = 0; m < hosts->size; m++) {
        if (lowest[m] == m) {
            hosts->starts[hosts->nhosts] = n;
            for (int other = m; other < hosts->size; other++) {
                if (lowest[other] == m) {
                    hosts->host_of[other] = hosts->nhosts;
                    hosts->place_of[other] = n - hosts->starts[hosts->nhosts];
                    hosts->order[n++] = other;
                }
            }
            hosts->nhosts++;
        }
    }
    hosts->starts[hosts->nhosts] = n;
}

static bool
is_on_one_host(const smp_hosts *hosts, int first, int n)
{
    for (int m = first + 1; m < first + n; m++) {
        if (hosts->host_of[m] != hosts->host_of[first]) {
            return false;
        }
    }
    return true;
}

/* The largest node from `first`, in a tree over `size`, on one host.  Nodes from there
 * have sizes of powers of two dividing `first`, or reach to the end. */
static int
largest_from(const smp_hosts *hosts, int first)
{
    int left = hosts->size - first;
    int n = 1;

    while ((first & n) == 0 && n < left) {
        n *= 2;
    }
    if (n > left) {
        n = left;
    }
    while (!is_on_one_host(hosts, first, n)) {
        int half = 1;

        while (2 * half < n) {
            half *= 2;
        }
        n = half;
    }
    return n;
}

static void
cut_tree(smp_hosts *hosts)
{
    for (int m = 0; m < hosts->size;) {
        int n = largest_from(hosts, m);

        hosts->nodes[hosts->nnodes++] = (smp_node){
            .first = m,
            .n = n,
            .host = hosts->host_of[m],
            .place = hosts->place_of[m],
        };
        m += n;
    }
}

smp_status
smp_hosts_init(smp_hosts *hosts, const int *lowest, int size)
{
    size_t n = (size_t)size;

    *hosts = (smp_hosts){
        .size = size,
        .host_of = calloc(n, sizeof(int)),
        .place_of = calloc(n, sizeof(int)),
        .order = calloc(n, sizeof(int)),
        .starts = calloc(n + 1, sizeof(int)),
        .nodes = calloc(n, sizeof(smp_node)),
    };
    if (hosts->host_of == NULL || hosts->place_of == NULL || hosts->order == NULL ||
        hosts->starts == NULL || hosts->nodes == NULL) {
        smp_hosts_fini(hosts);
        return SMP_ERR_NO_MEMORY;
    }
    number_hosts(hosts, lowest);
    cut_tree(hosts);
    return SMP_OK;
}

void
smp_hosts_fini(smp_hosts *hosts)
{
    free(hosts->host_of);
    free(hosts->place_of);
    free(hosts->order);
    free(hosts->starts);
    free(hosts->nodes);
    *hosts = (smp_hosts){.size = 0};
}

int
smp_hosts_nodes(const smp_hosts *hosts, int host)
{
    int n = 0;

    for (int i = 0; i < hosts->nnodes; i++) {
        n += hosts->nodes[i].host == host;
    }
    return n;
}
