/* Writing and checking cards. */
#define _GNU_SOURCE
#include "comm/transport/card.h"

#include <sched.h>
#include <string.h>

#define MAGIC 0x43504d53u
#define VERSION 1u

void
smp_card_begin(smp_card *card, int rank, int size)
{
    cpu_set_t mine;

    memset(card, 0, SMP_CARD_BYTES);
    card->magic = MAGIC;
    card->version = VERSION;
    card->rank = rank;
    card->size = size;
    card->bytes = sizeof(*card);
    CPU_ZERO(&mine);
    if (sched_getaffinity(0, sizeof(mine), &mine) == 0) {
        for (unsigned c = 0; c < SMP_CARD_CORES && c < CPU_SETSIZE; c++) {
            if (CPU_ISSET(c, &mine)) {
                card->cores[c / 64] |= (uint64_t)1 << c % 64;
            }
        }
    }
}

bool
smp_card_add(smp_card *card, const char *name, const void *data, size_t bytes)
{
    smp_card_section *section = &card->sections[card->nsections];
    size_t            end = card->bytes + (bytes + 7) / 8 * 8;

    if (card->nsections == SMP_CARD_SECTIONS || end > SMP_CARD_BYTES ||
        strlen(name) >= sizeof(section->name)) {
        return false;
    }
    memcpy(section->name, name, strlen(name) + 1);
    section->offset = card->bytes;
    section->bytes = (uint32_t)bytes;
    memcpy((uint8_t *)card + card->bytes, data, bytes);
    card->bytes = (uint32_t)end;
    card->nsections++;
    return true;
}

bool
smp_card_ok(const void *bytes, size_t n, int rank, int size)
{
    const smp_card *card = bytes;

    if (n < sizeof(*card) || card->magic != MAGIC || card->version != VERSION ||
        card->rank != rank || card->size != size || card->bytes != n ||
        card->nsections > SMP_CARD_SECTIONS) {
        return false;
    }
    for (uint32_t i = 0; i < card->nsections; i++) {
        const smp_card_section *section = &card->sections[i];

        if (memchr(section->name, '\0', sizeof(section->name)) == NULL ||
            section->offset > n || section->bytes > n - section->offset) {
            return false;
        }
    }
    return true;
}

const void *
smp_card_find(const smp_card *card, const char *name, size_t *bytes)
{
    for (uint32_t i = 0; i < card->nsections; i++) {
        if (strcmp(card->sections[i].name, name) == 0) {
            *bytes = card->sections[i].bytes;
            return (const uint8_t *)card + card->sections[i].offset;
        }
    }
    return NULL;
}
