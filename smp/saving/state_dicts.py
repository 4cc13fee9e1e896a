"""State dicts of a model with parts on several ranks.

Names are those of the wrapped module.  A *partial* dict has this rank's entries, and the key
``_smp_is_partial``; a *full* one has everything, and loads into the plain module.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from smp.marks import IS_PARTIAL
from smp.modules import remote_tensors
from smp.modules.live_models import LiveModel, parts_of, record_of
from smp.ranks import CommGroup
from smp.saving.replica import Replica, map_tensors
from smp.slicing.slices import Slices, slices_of
from smp.tensor_parallel import group

_NO_VALUES_YET = ".*non-meta parameter.*meta"  # torch's warning
_VERSIONS = 0  # a key beside the names of entries


def owners_of_entries(model: LiveModel, names: Mapping[str, Any]) -> dict[str, int]:
    """The pp_rank of each entry of the module's state dict; alike on all ranks."""
    parts = parts_of(model)
    by_parameter = {
        id(parameter): parts.owners[name] for name, parameter in model.module.named_parameters()
    }
    rank_of = parts.partition.rank_of
    of_module: dict[int, int] = {}
    of_path: dict[str, int] = {}
    for path, module in model.module.named_modules(remove_duplicate=False):
        of_path[path] = of_module.setdefault(id(module), rank_of.get(path, 0))
    out = {}
    for name, value in names.items():
        owner = by_parameter.get(id(value))
        if owner is None:  # a buffer, extra state, or a hook's entry
            path = name.rpartition(".")[0]
            while path not in of_path:
                path = path.rpartition(".")[0]
            owner = of_path[path]
        out[name] = owner
    return out


def _entries(module: nn.Module) -> "OrderedDict[str, Any]":
    """The module's state dict of parameters and buffers themselves; no data is touched."""
    return module.state_dict(keep_vars=True)  # type: ignore[return-value]


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def local_state_dict(model: LiveModel) -> "OrderedDict[str, Any]":
    """This rank's entries, and ``_smp_is_partial``.

    Raises:
        RuntimeError: one has no values before the partition.
    """
    out = _owned(model)
    out[IS_PARTIAL] = True
    return out


def _owned(model: LiveModel) -> "OrderedDict[str, Any]":
    entries = _entries(model.module)
    mine = OrderedDict(entries)
    if model.partitioned:
        owners = owners_of_entries(model, entries)
        rank = record_of(model).rt.pp_rank
        mine = OrderedDict((k, v) for k, v in entries.items() if owners[k] == rank)
    if delayed := [name for name, value in mine.items() if _is_meta(value)]:
        raise RuntimeError(
            f"smp: state dict of a model: '{delayed[0]}' has no values yet, as it was made in "
            "smp.delay_param_initialization: call a step function first"
        )
    if (live := record_of(model).live_parameters) is not None:
        mine = OrderedDict((name, live.read(value)) for name, value in mine.items())
    out = map_tensors(mine, Tensor.detach)
    out._metadata = entries._metadata  # type: ignore[attr-defined]
    return out


def full_state_dict(
    model: LiveModel, gather_to_rank0: bool, cast_to_cpu: bool
) -> "OrderedDict[str, Any]":
    """Everything, in the order of the module's own state dict.

    Collective over the MP_GROUP after the partition.

    Args:
        gather_to_rank0: only mp_rank 0 gets it; the others get an empty dict.
        cast_to_cpu: tensors in host memory; those of other ranks are there in any case.

    Raises:
        RuntimeError: a tensor has no values before the partition.
    """
    mine = _owned(model)
    entries = _entries(model.module)
    slices = slices_by_name(entries)
    parts: list[Any] | None = [mine]
    if model.partitioned or slices:
        replica = Replica("model.state_dict")
        sent = mine if group.rank() == 0 else {n: v for n, v in mine.items() if n in slices}
        parts = replica.gather(sent, 0 if gather_to_rank0 else None)
    out: OrderedDict[str, Any] = OrderedDict()
    if parts is None:
        return out
    merged: dict[str, Any] = {}
    for part in parts:
        merged.update(part)
    if slices:
        for name, cut in slices.items():
            # Before the partition every pp_rank has a tp_rank's slice.
            pairs = zip(replica.tp_ranks(), parts, strict=True)
            by_rank = {rank: part[name].cpu() for rank, part in pairs if name in part}
            merged[name] = cut.join([by_rank[rank] for rank in sorted(by_rank)])
    for name in entries:
        if name in merged:
            out[name] = merged.pop(name)
    out.update(merged)  # entries of its owner's hooks alone
    if cast_to_cpu:
        out = map_tensors(out, Tensor.cpu)
    out._metadata = mine._metadata  # type: ignore[attr-defined]
    return out


def slices_by_name(entries: Mapping[str, Any]) -> dict[str, Slices]:
    """The cuts of entries of a module's state dict; whole ones have none."""
    cut = ((n, slices_of(v)) for n, v in entries.items() if isinstance(v, Tensor))
    return {name: slices for name, slices in cut if slices is not None}


def _own_slices(entries: Mapping[str, Any], given: "OrderedDict[str, Any]") -> Any:
    """A full dict with this tp_rank's slices in place of whole parameters.

    Raises:
        RuntimeError: one has another shape than the whole parameter.
    """
    wrong = []
    out = OrderedDict(given)
    for name, slices in slices_by_name(entries).items():
        whole = given.get(name)
        if not isinstance(whole, Tensor):
            continue
        shape = slices.full_shape(entries[name].shape)
        if list(whole.shape) == shape:
            out[name] = slices.take(whole, group.rank())
        else:
            wrong.append(f"{name}: {list(whole.shape)}, where the model has {shape}")
    if wrong:
        raise RuntimeError(f"smp: load_state_dict: other shapes: {'; '.join(wrong)}")
    if hasattr(given, "_metadata"):
        out._metadata = given._metadata  # type: ignore[attr-defined]
    return out


def load(
    model: LiveModel,
    state_dict: Mapping[str, Any],
    strict: bool,
    same_partition_load: bool,
    translate_function: Callable | None,
) -> _IncompatibleKeys:
    """Load a full dict, or a partial one on every rank of the PP_GROUP.

    Before the partition every rank gets everything; values for meta tensors wait, and so do a
    tp_rank's own buffers.

    Returns:
        missing and unexpected keys, as torch does.

    Raises:
        RuntimeError: ``strict`` and other keys, or another shape: by name, both shapes.
    """
    metadata = getattr(state_dict, "_metadata", None)
    given: OrderedDict[str, Any] = OrderedDict(state_dict)
    partial = bool(given.pop(IS_PARTIAL, False))
    if translate_function is not None:
        given = OrderedDict(translate_function(given))
        given.pop(IS_PARTIAL, None)
    if metadata is not None:
        given._metadata = metadata  # type: ignore[attr-defined]
    record = record_of(model)
    if model.partitioned or record.rt.pp_size == 1:
        with model.gathered_parameters():
            return _load_now(model, given, partial, strict, same_partition_load)
    # Every rank has the whole module until the partition.
    entries = _entries(model.module)
    whole = _of_all_ranks(entries, given) if partial else _own_slices(entries, given)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NO_VALUES_YET)
        keys = model.module.load_state_dict(whole, strict)
    if any(map(_is_meta, entries.values())):
        record.deferred_loads.append((given, partial, strict, same_partition_load))
        return keys
    record.deferred_loads.clear()
    if partial and group.size() > 1:
        # The partition gives tp_rank 0's buffers to all tp_ranks; a partial dict has its own.
        names = {name for name, _ in model.module.named_buffers(remove_duplicate=False)}
        buffers = OrderedDict((n, value) for n, value in given.items() if n in names)
        _set_versions(buffers, given, {}, entries)
        record.deferred_loads.append((buffers, True, False, same_partition_load))
    return keys


def _of_all_ranks(
    entries: Mapping[str, Any], given: "OrderedDict[str, Any]"
) -> "OrderedDict[str, Any]":
    """A partial dict with the entries of other ranks.  Collective over the PP_GROUP.

    This rank's own come first.  Those of meta tensors, which take no values, are meta tensors.
    """
    shapes = {
        name: list(value.shape)
        for name, value in given.items()
        if isinstance(value, Tensor) and _is_meta(entries.get(name))
    }
    values = {name: value for name, value in given.items() if name not in shapes}
    replica = Replica("model.load_state_dict", CommGroup.PP_GROUP)
    parts = replica.gather((values, shapes, _versions(given))) or []
    out: OrderedDict[str, Any] = OrderedDict()
    versions: dict[str, Any] = {}
    for values, shapes, its in reversed(parts):
        out.update(values)
        out.update((n, torch.empty(s, device="meta")) for n, s in shapes.items())
        versions.update(its)
    out.update(given)
    _set_versions(out, given, versions, entries)
    return out


def _versions(given: "OrderedDict[str, Any]") -> dict[str, Any]:
    """The versions of modules' classes, by path, that a state dict was made with."""
    metadata = getattr(given, "_metadata", {})
    return {path: one["version"] for path, one in metadata.items() if "version" in one}


def _set_versions(
    out: "OrderedDict[str, Any]",
    given: "OrderedDict[str, Any]",
    versions: Mapping[str, Any],
    entries: Mapping[str, Any],
) -> None:
    """Have a dict be of the given one's versions, of these, or else of now."""
    known = {path: {"version": version} for path, version in versions.items()}
    known |= getattr(given, "_metadata", {})
    out._metadata = known or entries._metadata  # type: ignore[attr-defined]


def load_deferred(model: LiveModel) -> None:
    """Do the loads deferred until the partition, in their order."""
    record = record_of(model)
    waiting, record.deferred_loads = record.deferred_loads, []
    for given, partial, strict, same_partition_load in waiting:
        _load_now(model, given, partial, strict, same_partition_load)


def _load_now(
    model: LiveModel,
    given: "OrderedDict[str, Any]",
    partial: bool,
    strict: bool,
    same_partition_load: bool,
) -> _IncompatibleKeys:
    module = model.module
    if not partial:
        given = _own_slices(_entries(module), given)
    if not model.partitioned:
        return module.load_state_dict(given, strict)
    if partial:
        entries = _entries(module)
        owners = owners_of_entries(model, entries)
        rank = record_of(model).rt.pp_rank
        mine = [name for name in entries if owners[name] == rank]
        known: dict[Any, Any] = {n: v for n, v in given.items() if n in entries}
        found = known
        if not same_partition_load:
            replica = Replica("model.load_state_dict", CommGroup.PP_GROUP)
            versions = _versions(given)
            held = {**known, _VERSIONS: versions} if versions else known
            found = replica.route(held, [*mine, _VERSIONS])
        # Entries of other ranks stand for themselves: torch checks only ours.
        whole = OrderedDict((n, v) for n, v in entries.items() if n not in set(mine))
        whole.update((n, found[n]) for n in mine if n in found)
        whole.update((n, v) for n, v in given.items() if n not in entries)
        _set_versions(whole, given, found.get(_VERSIONS, {}), entries)
        given = whole
    with remote_tensors.loading(), warnings.catch_warnings():
        # Buffers of other ranks' modules may have no memory.
        warnings.filterwarnings("ignore", message=_NO_VALUES_YET)
        return module.load_state_dict(given, strict)
