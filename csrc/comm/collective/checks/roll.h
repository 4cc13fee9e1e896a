/* Ranks in words: "rank 2", "ranks 1, 3 to 17, 20". */
#ifndef SMP_COMM_COLLECTIVE_CHECKS_ROLL_H
#define SMP_COMM_COLLECTIVE_CHECKS_ROLL_H

#include <stddef.h>

/* What is enough for the words in most jobs. */
#define SMP_ROLL_TEXT 256

typedef struct {
    int *names; /* borrowed: room for all that are added; smp_comm_name() */
    int  n;
} smp_roll;

static inline void
smp_roll_add(smp_roll *roll, int name)
{
    roll->names[roll->n++] = name;
}

/* Sorts the names, and says them; "" for none.  What does not fit into `bytes`, which
 * are 32 or more, is "..." behind a whole number. */
void smp_roll_say(smp_roll *roll, char *out, size_t bytes);

#endif
