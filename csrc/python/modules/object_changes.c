/* The new contents behind an argument's number. */
#include "python/modules/object_changes.h"

#include "python/values/pack_scalar.h"
#include "python/values/pack_value.h"
#include "python/values/snapshot.h"
#include "python/values/unpack_scalar.h"
#include "python/values/unpack_value.h"

int
smp_object_changes_pack(smp_pack *pack, const smp_unpack *unpack,
                        const smp_entry *entry)
{
    uint32_t count = 0;

    for (size_t i = 0; i < unpack->nobjects; i++) {
        int changed = smp_snapshot_differs(unpack->snapshots[i], unpack->objects[i]);

        if (changed < 0) {
            return -1;
        }
        if (changed == 1 && smp_snapshot_is_pickle(unpack->snapshots[i])) {
            PyErr_Format(
                PyExc_TypeError,
                "smp: module '%s' on pp_rank %d changed an argument of type %s in "
                "place; "
                "the change (a cache in it is one) cannot go back to its caller on "
                "another "
                "rank: return the object, or use a list, dict, set or an object "
                "without "
                "__slots__",
                smp_entry_path(entry), entry->owner,
                Py_TYPE(unpack->objects[i])->tp_name);
            return -1;
        }
        count += (uint32_t)changed;
    }
    if (smp_pack_u32(pack, count) < 0) {
        return -1;
    }
    for (size_t i = 0; count > 0 && i < unpack->nobjects; i++) {
        if (smp_snapshot_differs(unpack->snapshots[i], unpack->objects[i]) == 1 &&
            (smp_pack_u32(pack, (uint32_t)i) < 0 ||
             smp_pack_contents(pack, unpack->objects[i]) < 0)) {
            return -1;
        }
    }
    return 0;
}

int
smp_object_changes_apply(smp_unpack *unpack, const smp_pack *pack)
{
    uint32_t count;

    if (smp_unpack_u32(unpack, &count) < 0) {
        return -1;
    }
    for (uint32_t i = 0; i < count; i++) {
        uint32_t number;

        if (smp_unpack_u32(unpack, &number) < 0) {
            return -1;
        }
        if (number >= pack->nobjects) {
            return smp_malformed("a changed object that is none");
        }
        if (smp_unpack_contents_into(unpack, pack->objects[number]) < 0) {
            return -1;
        }
    }
    return 0;
}
