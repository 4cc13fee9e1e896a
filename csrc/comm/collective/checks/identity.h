/* By what members know that they mean the same group, and the same meeting. */
#ifndef SMP_COMM_COLLECTIVE_CHECKS_IDENTITY_H
#define SMP_COMM_COLLECTIVE_CHECKS_IDENTITY_H

#include <stdint.h>

/* Of a list of members in order: whoever has another list has, but for chance, another
 * digest. */
uint64_t smp_members_digest(const int *ranks, int size);

/* A number that no meeting before has had, but for chance, and not 0.  `here`: an
 * address of the caller's, for where there is no random number to be had. */
uint64_t smp_new_nonce(const void *here);

#endif
