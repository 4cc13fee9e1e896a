/* What tests tell the stand-in of UCX (stand_in_ucp.c), beside UCX's own functions.
 * Found by dlsym, as those are.
 *
 * Threads  what is not atomic is set while nobody is in UCX.
 */
#ifndef SMP_TESTS_STAND_IN_UCP_H
#define SMP_TESTS_STAND_IN_UCP_H

#include <stdatomic.h>
#include <stdbool.h>

typedef struct {
    unsigned    major; /* of the version that it says it is */
    unsigned    minor;
    const char *broken;    /* the function that fails; NULL: none does */
    const char *transport; /* by which it reaches another worker */

    /* From now on, the one with that number (1: the next) fails; 0: none does. */
    _Atomic int  fetch; /* of what was announced */
    _Atomic int  sent;  /* active message */
    _Atomic bool late;  /* ... after it was begun */

    /* So many workers find their connections broken. */
    _Atomic int faults;

    /* What ucp_config_modify() was last told; "": nothing. */
    char net_devices[64];
    char tls[64];

    /* Contexts, workers, connections and requests that were not given back. */
    _Atomic int alive;
} stand_in_ucp_table;

/* The symbol's name is "stand_in_ucp". */
extern stand_in_ucp_table stand_in_ucp;

#endif
