/* Ranks in words: "rank 2", "ranks 1, 3 to 17, 20". */
#ifndef SMP_COMM_COLLECTIVE_CHECKS_RANK_LIST_H
#define SMP_COMM_COLLECTIVE_CHECKS_RANK_LIST_H

#include <stddef.h>

/* Enough for the text in most jobs. */
#define SMP_RANK_LIST_TEXT 256

typedef struct {
    int *names; /* borrowed: room for all added ones; smp_comm_name() */
    int  n;
} smp_rank_list;

static inline void
smp_rank_list_add(smp_rank_list *list, int name)
{
    list->names[list->n++] = name;
}

/* Sorts the names, and writes them; "" for none.  A text beyond `bytes` (32 or more)
 * ends with "..." behind a whole number. */
void smp_rank_list_say(smp_rank_list *list, char *out, size_t bytes);

#endif
