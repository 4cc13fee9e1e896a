/* One call of a module on its owner.
 *
 * Threads  The GIL is held, by the holder of the baton.
 */
#ifndef SMP_PYTHON_MODULES_RUN_ENTRY_H
#define SMP_PYTHON_MODULES_RUN_ENTRY_H

#include "python/modules/session.h"
#include "python/values/pack.h"

/* Calls the entry, with the caller's thread state where it differs from a worker's.
 *
 * flags   of the request.
 * state   borrowed; NULL: none.
 * kwargs  borrowed; or NULL.
 * Returns the module's value (new); NULL with an exception. */
PyObject *smp_run_entry(const smp_entry *entry, uint16_t flags, PyObject *state,
                        PyObject *args, PyObject *kwargs);

/* Warns once of a module's hook on a tensor of its caller: an argument, or an output.
 * 0, or -1 with an exception. */
int smp_warn_of_hooks(const smp_unpack *unpack, const smp_pack *pack,
                      const smp_entry *entry);

#endif
