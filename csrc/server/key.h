/* The key of a collective of a module: a name known to each rank by itself.
 */
#ifndef SMP_SERVER_KEY_H
#define SMP_SERVER_KEY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of a module's path in a key, with a NUL. */
#define SMP_KEY_PATH 104

/* One collective of a step.  Alike on all ranks, byte for byte; travels as it is. */
typedef struct {
    uint64_t call;       /* server/calls.h; a backward's follows from its forward's */
    int32_t  microbatch; /* for people, as all below but number */
    int32_t  phase;      /* smp_phase */
    uint32_t time;       /* the number of the module's call by its task, from 0 */
    uint32_t number;     /* the number of the collective in the call, from 0 */
    char     path[SMP_KEY_PATH]; /* the module's; of a long one the end */
} smp_key;

/* Makes the key of a path, all else 0. */
smp_key smp_key_of(const char *path);

bool smp_key_equal(const smp_key *a, const smp_key *b);

/* "module 'a.b' (microbatch 1, backward, call 0, collective 2)"; cut off at `room`.
 * The number of bytes without the NUL. */
size_t smp_key_write(const smp_key *key, char *out, size_t room);

#endif
