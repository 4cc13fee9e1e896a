"""The core's tables of all models: entries, gates, names, and the gradients of entries."""

from array import array
from collections import OrderedDict
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from smp import _core
from smp.marks import CHECKPOINTED
from smp.modules import live_models, remote_modules
from smp.modules.live_models import LiveModel, parts_of
from smp.precision import conversion
from smp.runtime_state import CoreTables, Runtime
from smp.slicing import parameter_marks


def install(rt: Runtime) -> None:
    """Tell the core about the entries, parameters and gradients of all models."""
    models = live_models.partitioned()
    modules: list[nn.Module] = []
    parameters: list[Any] = []
    owners: list[int] = []
    paths: list[str] = []
    entries: list[tuple] = []
    for model in models:
        its = parts_of(model)
        modules += list(model.module.modules())
        named = dict(model.module.named_parameters())
        for path, owner in its.owners.items():
            parameters.append(named[path])
            owners.append(owner)
            paths.append(path)
        named_modules = dict(model.module.named_modules())
        rank_of = its.partition.rank_of
        for path, names in its.changing.items():
            for name in names:
                buffers, owner = named_modules[path]._buffers, rank_of[path]
                # A forward may put another tensor in its place.
                parameters.append((buffers, name) if owner == rt.pp_rank else buffers[name])
                owners.append(owner)
                paths.append(f"{path}.{name}".lstrip("."))
        remote_modules.number_runs(named_modules, its.runs, len(entries))
        entries += [tuple(entry) for entry in its.entries]
    _core.set_entries(entries)
    _core.set_gates(rt.tables.gates if len(rt.tables.gates) else None)
    _core.set_names(modules, parameters, owners, paths)
    install_gradients(rt, models)


def install_gradients(rt: Runtime, models: list[LiveModel]) -> None:
    """Tell the core of the local parameters with gradients from each entry.

    Args:
        models: all partitioned ones.
    """
    for model in models:
        conversion.accumulate_in_float32(model, rt.cfg)
    # Models may share some.
    everyone = {id(p): p for m in models for p in m.local_parameters()}
    local = [p for p in everyone.values() if p.requires_grad]
    for parameter in local:
        parameter_marks.attach_hooks(parameter)  # the core adds its own
    number = {id(p): i for i, p in enumerate(local)}
    first = array("i", [0])
    uses = array("i")
    flags = bytearray()
    for model in models:
        its = parts_of(model)
        kinds = zip(its.entries, its.chainable, its.collective, strict=True)
        for entry, chains, collective in kinds:
            members = entry.callable.children if entry.module is None else [entry.module]
            inside = [p for m in members for p in m.parameters()]
            trains = remote_modules.TRAINS * any(p.requires_grad for p in inside)
            chains = chains and rt.cfg.fast_mode
            # A chain keeps its calls' outputs on the device, in case the caller wants them.
            if chains and rt.cfg.offload_activations:
                inner = (m for member in members for m in member.modules())
                chains = not any(hasattr(type(m), CHECKPOINTED) for m in inner)
            kind = remote_modules.CHAINS * chains | remote_modules.COLLECTIVE * collective
            flags.append(trains | kind)
            uses.extend(sorted({number[id(p)] for p in inside if id(p) in number}))
            first.append(len(uses))
    _core.gradients_setup(local, first, uses, _sum_of_layouts)
    rt.staging.live_with(t for m in models for t in (*m.local_parameters(), *m.local_buffers()))
    tables = rt.tables
    tables.parameters = local
    tables.entry_flags = bytes(flags)
    every = (module for model in models for module in model.module.modules())
    tables.holders = [module._parameters for module in every if module._parameters]
    tables.grad_flags = grad_flags(tables)
    mine = set(map(id, local))
    every_one = (p for its in tables.holders for p in its.values() if p is not None)
    tables.others = [p for p in every_one if id(p) not in mine]
    tables.hooks_on_others = [_hooks_on_sum(p) for p in tables.others]
    of_all = bytes(p.requires_grad for m in models for p in m.module.parameters())
    some = f"{sum(of_all)} of {len(of_all)} parameters require grad"
    tables.grad_told = f"{some} ({crc32(of_all):08x})"


def chains_of(model: LiveModel) -> list[list[str]]:
    """The calls made by this rank in one request, as learned: paths of the model's modules."""
    first = 0
    for other in live_models.partitioned():
        number = len(parts_of(other).entries)
        if other is model:
            paths = [entry.path for entry in parts_of(other).entries]
            inside = range(first, first + number)
            return [
                [paths[call - first] for call in calls]
                for _, calls in _core.chains()
                if all(call in inside for call in calls)
            ]
        first += number
    return []


def grad_flags(tables: CoreTables) -> bytes:
    """``requires_grad`` of each parameter of all models, and which ones they are by now.

    Every step looks at them.  A module may have another one in the same dict.
    """
    with torch._C.DisableTorchFunctionSubclass():  # it would be 100 times slower
        return _core.grad_flags(tables.holders)


def with_hook_on_sum(tables: CoreTables) -> nn.Parameter | None:
    """One with a ``register_post_accumulate_grad_hook`` of the script's."""
    if any(tables.hooks_on_others):
        both = zip(tables.others, tables.hooks_on_others, strict=True)
        return next(parameter for parameter, hooks in both if hooks)
    return _core.gradients_hooked()


def _hooks_on_sum(parameter: nn.Parameter) -> dict:
    """Its dict of ``register_post_accumulate_grad_hook``, which later hooks enter, too."""
    with torch._C.DisableTorchFunctionSubclass():
        if parameter._post_accumulate_grad_hooks is None:
            parameter._post_accumulate_grad_hooks = OrderedDict()  # type: ignore[assignment]
        return parameter._post_accumulate_grad_hooks  # type: ignore[return-value]


def _sum_of_layouts(total: Tensor, term: Tensor) -> Tensor:
    """The sum of two gradients, one of them sparse, in torch's order: dense, then sparse."""
    return term + total if total.is_sparse else total + term
