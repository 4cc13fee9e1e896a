/* Lists, dicts and objects among a call's arguments, changed in place by its module.
 *
 * Threads  The GIL is held.
 * Errors   0, or -1 with an exception.
 */
#ifndef SMP_PYTHON_MODULES_OBJECT_CHANGES_H
#define SMP_PYTHON_MODULES_OBJECT_CHANGES_H

#include "python/modules/session.h"
#include "python/values/pack.h"
#include "python/values/unpack_tensor.h"

/* Appends the new contents of the request's changed objects.
 *
 * TypeError  one of them travels as a pickle: its changes cannot go back. */
int smp_object_changes_pack(smp_pack *pack, const smp_unpack *unpack,
                            const smp_entry *entry);

/* Writes them into the caller's own objects, those of the request's pack. */
int smp_object_changes_apply(smp_unpack *unpack, const smp_pack *pack);

#endif
