/* Shared memory and fork().
 *
 * A forked child (a DataLoader worker) inherits our mappings and descriptors but
 * none of our threads.  Three rules follow.
 *
 *   1. The child never writes to the job's shared memory: its copies of our objects die
 *      too, and their blocks are the parent's.  An object's holder remembers
 *      smp_fork_generation(): the child's differs.
 *   2. The child keeps none of our descriptors, or a dead parent would look alive to
 *      its peers: smp_fork_close_in_child().
 *   3. A block alive at the fork is not given back while a child maps it, because
 *      shared memory is not copied on write: smp_fork_defer().
 *
 * Threads  any.
 */
#ifndef SMP_COMMON_FORK_H
#define SMP_COMMON_FORK_H

#include <stdbool.h>
#include <stdint.h>

#include "common/status.h"

/* Installs the fork handlers; the first call counts.  SMP_ERR_NO_MEMORY. */
smp_status smp_fork_init(void);

/* Differs between a process and its forked children. */
uint32_t smp_fork_generation(void);

/* The number of this process's forks. */
uint32_t smp_fork_epoch(void);

/* Until smp_fork_forget_fd(fd), a forked child closes its copy.  Call forget before
 * close().  SMP_ERR_NO_MEMORY. */
smp_status smp_fork_close_in_child(int fd);
void       smp_fork_forget_fd(int fd);

/* Called before an object created at fork number `epoch` is given back.  True: a child
 * may still see it, and `give_back(arg)` runs later, from smp_fork_sweep() or another
 * thread's smp_fork_defer().  False: no child does; the caller gives it back. */
bool smp_fork_defer(uint32_t epoch, void (*give_back)(void *), void *arg);

/* Runs the callbacks of ended children.  True: some are left. */
bool smp_fork_sweep(void);

#endif
