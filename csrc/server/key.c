#include "server/key.h"

#include <stdio.h>
#include <string.h>

#include "server/schedule.h"

smp_key
smp_key_of(const char *path)
{
    const size_t length = strlen(path);
    smp_key      key;

    memset(&key, 0, sizeof(key)); /* it is compared, and travels, with every byte */
    if (length < sizeof(key.path)) {
        memcpy(key.path, path, length);
    } else {
        memcpy(key.path, "...", 3);
        memcpy(key.path + 3, path + length - (sizeof(key.path) - 4),
               sizeof(key.path) - 4);
    }
    return key;
}

size_t
smp_key_write(const smp_key *key, char *out, size_t room)
{
    const int n =
        snprintf(out, room, "module '%.*s' (microbatch %d, %s, call %u, collective %u)",
                 (int)sizeof(key->path) - 1, key->path, (int)key->microbatch,
                 smp_phase_name((smp_phase)key->phase), (unsigned)key->time,
                 (unsigned)key->number);

    return n < 0 ? 0 : (size_t)n < room ? (size_t)n : room - 1;
}

bool
smp_key_equal(const smp_key *a, const smp_key *b)
{
    return a->call == b->call && a->number == b->number &&
           memcmp(a->path, b->path, sizeof(a->path)) == 0;
}
