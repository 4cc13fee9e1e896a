/* A rank's address card: its identity, its cores, and one section per transport, read
 * only by that transport. */
#ifndef SMP_COMM_TRANSPORT_CARD_H
#define SMP_COMM_TRANSPORT_CARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

#define SMP_CARD_BYTES 4096u
#define SMP_CARD_SECTIONS 8u /* SMP_TRANSPORTS */
#define SMP_CARD_CORES 1024u

typedef struct {
    char     name[8]; /* of the transport, ends with NUL */
    uint32_t offset;  /* in the card */
    uint32_t bytes;
} smp_card_section;

typedef struct {
    uint32_t         magic;
    uint32_t         version;
    int32_t          rank;
    int32_t          size;
    uint64_t         cores[SMP_CARD_CORES / 64]; /* bit c: may run on core c */
    uint32_t         bytes;                      /* of the whole card */
    uint32_t         nsections;
    smp_card_section sections[SMP_CARD_SECTIONS];
    uint8_t          data[];
} smp_card;

/* A card without sections in `card`, of SMP_CARD_BYTES; cores are this thread's. */
void smp_card_begin(smp_card *card, int rank, int size);

/* False: no room. */
bool smp_card_add(smp_card *card, const char *name, const void *data, size_t bytes);

/* Whether `bytes` are the card of `rank` in a job of `size`: every section lies inside.
 */
bool smp_card_ok(const void *bytes, size_t n, int rank, int size);

/* The section of a transport in a checked card, at most 8-byte aligned; NULL: none. */
const void *smp_card_find(const smp_card *card, const char *name, size_t *bytes);

#endif
