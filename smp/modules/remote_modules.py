"""Applying a partition to a model on this rank.

A module of another rank gets a class of its own: its ``__call__``, in C
(``csrc/python/modules/call.c``), sends a request.  Its parameters keep shape, dtype and
``requires_grad`` and lose their storage.  The rank's own modules are not touched, except an
``nn.Sequential`` with children on several ranks.  Nor are modules without values, such as an
activation, perhaps shared with other models: they run on their caller's rank.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from smp import _core, marks
from smp.modules import (
    conversion,
    gates,
    remote_tensors,
    stand_ins,
    travelling_changes,
)
from smp.modules.live_models import Entry, Runs
from smp.modules.pins import pin_of

# Bits of an entry's byte in a step: as in csrc/python/modules/step.c.
TRAINS, CHAINS, COLLECTIVE = 1, 2, 4


# Activation checkpointing of a run: whether random numbers are drawn again, and the size of a
# group; None: the whole run.
Groups = tuple[bool, int | None]
RunGroups = Callable[[list[nn.Module], Any, Groups], Any]


class SequentialRun:
    """Consecutive children of an ``nn.Sequential`` with one owner: one request."""

    def __init__(self, children: list[nn.Module], run_groups: RunGroups):
        self.children = children
        self.run_groups = run_groups

    def __call__(self, value: Any, groups: Groups | None = None) -> Any:
        """The last child's result.  With groups, each one is checkpointed here."""
        if groups is not None:
            return self.run_groups(self.children, value, groups)
        for child in self.children:
            value = child(value)
        return value


def remote(cls: type[nn.Module]) -> dict[str, Any]:
    """The methods of a class like ``cls``, with calls to the owner's rank."""

    @functools.wraps(cls.forward)
    def forward(self, *args, **kwargs):
        return _core.call_remote(self, args, kwargs, True, False)

    return {
        "__call__": _core.module_call,
        "forward": forward,
        "_apply": conversion.convert_elsewhere,
        marks.ORIGINAL_CLASS: cls,
        **_slices_of(cls),
        **travelling_changes.watched(cls),
    }


def runs_where_called(module: nn.Module) -> bool:
    """Whether the module has no parameter, buffer, child or hook, and no pin of its own."""
    held = (module._parameters, module._buffers, module._modules)
    if any(thing is not None for things in held for thing in things.values()):
        return False
    hooks = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return not any(hooks) and pin_of(module) is None


def original_class(module: nn.Module) -> type[nn.Module]:
    """The module's class before its partition."""
    return getattr(type(module), marks.ORIGINAL_CLASS, type(module))


def spans_ranks(module: nn.Module, ranks: dict[int, int]) -> bool:
    """Whether it is an ``nn.Sequential`` with plain forward and a child of another rank."""
    if not isinstance(module, nn.Sequential):
        return False
    cls = original_class(module)
    if getattr(cls, marks.CHECKPOINTED, cls).forward is not nn.Sequential.forward:
        return False
    children = (child for child in module._modules.values() if child is not None)
    return any(ranks[id(child)] != ranks[id(module)] for child in children)


def has_hooks_of_caller(children: list[nn.Module]) -> bool:
    """Whether a run's caller has hooks to run around a child, and so calls each by itself."""
    return any(
        child._forward_hooks or child._backward_hooks or child._backward_pre_hooks
        for child in children
    )


def _slices_of(cls: type[nn.Module]) -> dict[str, Any]:
    """A part of an ``nn.Sequential`` is one of the user's class, made on demand."""
    if getattr(cls, "__getitem__", None) is not nn.Sequential.__getitem__:
        return {}

    def __getitem__(self, index):
        if isinstance(index, slice):
            children = OrderedDict(list(self._modules.items())[index])
            return stand_ins.users_class(type(self))(children)
        return nn.Sequential.__getitem__(self, index)

    return {"__getitem__": __getitem__}


def in_runs(cls: type[nn.Module]) -> dict[str, Any]:
    """The methods of a class like ``cls``, an ``nn.Sequential`` with one request a run.

    A checkpointed one's own forward knows the runs.
    """

    @functools.wraps(cls.forward)
    def forward(self, input):
        for number, children in self.__dict__[marks.RUNS]:
            if number is None or len(children) == 1 or has_hooks_of_caller(children):
                for child in children:
                    input = child(input)
            else:
                input = _core.call_entry(number, (input,))
        return input

    methods = {} if hasattr(cls, marks.CHECKPOINTED) else {"forward": forward}
    return {**methods, marks.ORIGINAL_CLASS: cls, **_slices_of(cls)}


def make_entries(
    root: nn.Module, rank_of: dict[str, int], run_groups: RunGroups
) -> tuple[list[Entry], Runs]:
    """The targets of calls from other ranks, and the runs of each spanning Sequential.

    Args:
        run_groups: runs children in groups, each checkpointed by itself.

    Returns:
        the entries, each module's first and then the runs'; and, by path of a Sequential
        with children on several ranks, its runs as (number among the entries, children).
    """
    named = dict(root.named_modules())
    ranks = {id(module): rank_of[path] for path, module in named.items()}
    entries = [Entry(module, module, path, rank_of[path]) for path, module in named.items()]
    runs: Runs = {}
    for path, module in named.items():
        if not spans_ranks(module, ranks):
            continue
        runs[path] = []
        children = [item for item in module._modules.items() if item[1] is not None]
        for rank, group in groupby(children, key=lambda item: ranks[id(item[1])]):
            names, modules = map(list, zip(*group, strict=True))
            if rank == rank_of[path]:
                runs[path].append((None, modules))
                continue
            to = f" to {names[-1]}" if len(names) > 1 else ""
            label = f"{path}.{names[0]}{to}".lstrip(".")
            # The entry is there in any case: hooks and checkpointing may differ between ranks,
            # numbers may not.
            here = all(map(runs_where_called, modules))
            runs[path].append((None if here else len(entries), modules))
            entries.append(Entry(SequentialRun(modules, run_groups), None, label, rank))
    return entries, runs


def chainable(
    root: nn.Module,
    entries: list[Entry],
    turns: gates.Turns,
    changing: Collection[str],
) -> list[bool]:
    """By entry: whether a call may run before its caller has made it, and in vain.

    Args:
        changing: paths of modules with buffers or attributes changed by a call.
    """
    named = dict(root.named_modules())
    stateful = (turns.modules, turns.reads, turns.carried, turns.own, turns.restored)
    kept = {path for table in stateful for path in table}
    never = {id(named[path]) for path in (*kept, *changing)}
    return [never.isdisjoint(map(id, _inside(entry))) for entry in entries]


def collective(root: nn.Module, entries: list[Entry]) -> list[bool]:
    """By entry: whether a call has collectives of the TP_GROUP, of a split module in it."""
    split = [module for module in root.modules() if marks.PATH in module.__dict__]
    within = {id(one) for module in split for one in module.modules()}
    return [any(id(one) in within for one in _inside(entry)) for entry in entries]


def _inside(entry: Entry) -> Iterator[nn.Module]:
    members = entry.callable.children if entry.module is None else [entry.module]
    return (one for member in members for one in member.modules())


def mark_remote_buffers(
    root: nn.Module, rank_of: dict[str, int], rank: int, changing: dict[str, tuple[str, ...]]
) -> None:
    """Let no operator silently use buffers changed by other ranks' modules.

    Args:
        changing: by path of a module, names of its buffers changed by its forward.
    """
    named = dict(root.named_modules())
    for path, names in changing.items():
        for name in names:
            buffer = named[path]._buffers.get(name)
            if rank_of[path] != rank and type(buffer) is Tensor:
                remote_tensors.mark(buffer, f"{path}.{name}".lstrip("."), rank_of[path])


def parameter_owners(root: nn.Module, rank_of: dict[str, int]) -> dict[str, int]:
    """The rank of each parameter, by its first path; tied ones count once."""
    owners: dict[str, int] = {}
    seen: set[int] = set()
    for path, module in root.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                owners[f"{path}.{name}" if path else name] = rank_of[path]
    return owners


def free_remote_parameters(root: nn.Module, owners: dict[str, int], rank: int) -> None:
    """Let go of the data of other ranks' parameters."""
    named = dict(root.named_parameters())
    for path, owner in owners.items():
        if owner != rank and not isinstance(named[path], remote_tensors.RemoteTensor):
            remote_tensors.forget_data(named[path], path, owner)


def swap_classes(
    root: nn.Module,
    rank_of: dict[str, int],
    rank: int,
    runs: Runs,
    gate_of: dict[str, int],
) -> None:
    """Make the calls of other ranks' modules remote.

    A module of another model, too, may have its class already.

    Args:
        gate_of: by path, the number of the gate passed by calls of a module.
    """
    for path, module in root.named_modules():
        cls = original_class(module)
        if runs_where_called(module):
            continue
        if rank_of[path] != rank:
            if not is_remote(module):
                marks.set_class(module, stand_ins.stand_in(cls, remote))
                for kind, name in (("parameter", "_parameters"), ("buffer", "_buffers")):
                    module.__dict__[name] = travelling_changes.TensorsElsewhere(
                        kind, path, rank_of[path], module.__dict__[name]
                    )
            continue
        if path in runs and marks.RUNS not in module.__dict__:
            module.__dict__[marks.RUNS] = []
            marks.set_class(module, stand_ins.stand_in(cls, in_runs))
        if path in gate_of:
            if marks.GATE not in module.__dict__:
                marks.set_class(module, stand_ins.stand_in(type(module), gates.gated))
            module.__dict__[marks.GATE] = gate_of[path]


def is_remote(module: nn.Module) -> bool:
    """Whether the module's calls go to another rank."""
    return any(
        base.__dict__.get("__call__") is _core.module_call for base in type(module).__mro__
    )


def number_runs(named: dict[str, nn.Module], runs: Runs, first_entry: int) -> None:
    """Tell each ``nn.Sequential`` with children on several ranks its entries, by number.

    Args:
        named: the model's modules by path.
        first_entry: number of the model's first entry among all entries of the job.
    """
    for path, its in runs.items():
        if marks.RUNS in named[path].__dict__:
            named[path].__dict__[marks.RUNS] = [
                (None if number is None else number + first_entry, modules)
                for number, modules in its
            ]
