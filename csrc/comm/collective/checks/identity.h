/* The proof that members mean the same group, and the same meeting. */
#ifndef SMP_COMM_COLLECTIVE_CHECKS_IDENTITY_H
#define SMP_COMM_COLLECTIVE_CHECKS_IDENTITY_H

#include <stdint.h>

/* The digest of a list of members in order: another list has, but for chance, another
 * digest. */
uint64_t smp_members_digest(const int *ranks, int size);

/* A number of no earlier meeting, but for chance, and not 0.  `here`: an address of the
 * caller's, in place of a missing random number. */
uint64_t smp_new_nonce(const void *here);

#endif
