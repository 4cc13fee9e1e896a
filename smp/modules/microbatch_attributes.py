"""Attributes set by code on modules in a step: each microbatch has its own.

Several microbatches are under way on a rank.  One may run while another waits within a module's
forward, between ``self.h = f(x)`` and the read of it.  Each reads its own values.  A microbatch
that reads first gets the value left by the one before, and waits until that is known.  The last
one's value stays after the step.  One process behaves so.

Descriptors in a stand-in class keep the values apart.  They have the names set in the traced
run, and those set in branches of code not traced (``smp/modules/stores.py``).  On modules
with calls to other ranks, they also have names set for the first time in a later step.
"""

import functools
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from smp import _core, marks
from smp.modules import gates, live_models, stand_ins, stores

if TYPE_CHECKING:
    from smp.modules.gates import Turns

_ABSENT = object()
_DELETED = object()
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}


class Kept(NamedTuple):
    """The way of one attribute of one module from microbatch to microbatch.

    Attributes:
        gate: the place of waiting for a microbatch that reads before its first set; -1: none,
            it has the value from before the step.
        uses: reads and sets until a call of the module is past the gate; 0: its end.
        counted: calls of the module pass the gate.
        unseen: code may set it, but the traced run has not: its readers are noted.
    """

    gate: int
    uses: int = 0
    counted: bool = False
    unseen: bool = False


class _Values:
    """The values of one attribute of one module, in this step."""

    __slots__ = ("by_microbatch", "module", "read_before")

    def __init__(self, module: nn.Module):
        self.module = module
        self.by_microbatch: dict[int, Any] = {}
        self.read_before = -1  # the last reader of another one's value

    def restore(self, microbatch: int, value: Any) -> None:
        """The microbatch's value is this one again; ``_ABSENT``: it has none."""
        if value is _ABSENT:
            self.by_microbatch.pop(microbatch, None)
        else:
            self.by_microbatch[microbatch] = value


_values: dict[tuple[int, str], _Values] = {}  # by id of the module, and name


class _Running(threading.local):
    """This thread's calls of modules with carried attributes."""

    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, dict[str, int]]] = []


_running = _Running()


class _OfMicrobatch(stand_ins.WatchedAttribute):
    """Such an attribute, in a module's stand-in class."""

    def __get__(self, module: nn.Module | None, cls: type[nn.Module]) -> Any:
        microbatch = None if module is None else _core.current()
        if module is not None and microbatch is not None:
            value = self._value(module, module.__dict__[marks.KEPT][self.name], microbatch)
            if value is _DELETED:
                return getattr(super(self.owner, module), self.name)  # its class may have one
            if value is not _ABSENT:
                return value
        return super().__get__(module, cls)

    def __set__(self, module: nn.Module, value: Any) -> None:
        microbatch = _core.current()
        if microbatch is None:
            super().__set__(module, value)
            return
        kept = module.__dict__[marks.KEPT][self.name]
        values = _values.get((id(module), self.name))
        if _core.in_backward():
            self._set_in_backward(module, kept, values, microbatch, value)
            return
        if values is None:
            values = _values[id(module), self.name] = _Values(module)
        if kept.unseen:
            before = values.by_microbatch.get(microbatch, _ABSENT)
            _core.refuse_foreseen(functools.partial(values.restore, microbatch, before))
        if kept.counted and microbatch not in values.by_microbatch:
            _core.await_turn(kept.gate)
        if values.read_before > microbatch:
            self._refuse(module, microbatch, values.read_before)
        values.by_microbatch[microbatch] = value
        _count(module, self.name, kept)

    def __delete__(self, module: nn.Module) -> None:
        if _core.current() is not None:
            self.__get__(module, type(module))
            self.__set__(module, _DELETED)
        else:
            super().__delete__(module)

    def _value(self, module: nn.Module, kept: Kept, microbatch: int) -> Any:
        """Its own value, or that left by those before; ``_ABSENT``: unset in the step."""
        values = _values.get((id(module), self.name))
        if _core.in_backward():
            owner = _owner_in_backward(kept, values, microbatch)
            return _ABSENT if values is None or owner is None else values.by_microbatch[owner]
        if values is not None and microbatch in values.by_microbatch:
            _count(module, self.name, kept)
            return values.by_microbatch[microbatch]
        if kept.gate < 0 or (values is None and not kept.counted and not kept.unseen):
            return _ABSENT
        if kept.unseen and (values is None or not values.by_microbatch):
            values = _values.setdefault((id(module), self.name), _Values(module))
            values.read_before = max(values.read_before, microbatch)
            return _ABSENT
        if values is None or values.read_before < microbatch:
            _core.await_turn(kept.gate)
            values = _values.setdefault((id(module), self.name), _Values(module))
            values.read_before = max(values.read_before, microbatch)
        _count(module, self.name, kept)
        earlier = [one for one in values.by_microbatch if one < microbatch]
        return values.by_microbatch[max(earlier)] if earlier else _ABSENT

    def _set_in_backward(
        self,
        module: nn.Module,
        kept: Kept,
        values: _Values | None,
        microbatch: int,
        value: Any,
    ) -> None:
        """A value set by a forward's second run is its microbatch's own.  An attribute that no
        forward sets is shared by the backwards: they have an order, as in one process.
        """
        owner = _owner_in_backward(kept, values, microbatch)
        if values is not None and owner is not None:
            values.by_microbatch[owner if kept.counted else microbatch] = value
            return
        if values is not None and values.read_before > microbatch:
            self._refuse(module, microbatch, values.read_before)
        super().__set__(module, value)

    def _refuse(self, module: nn.Module, microbatch: int, other: int) -> None:
        path, owner = live_models.home_of(module) or (type(module).__name__, 0)
        name = f"{path}.{self.name}".lstrip(".")
        raise RuntimeError(
            f"smp: '{name}' on pp_rank {owner} is set in microbatch {microbatch}, after "
            f"microbatch {other}, which runs beside it, has read it: set it in each microbatch "
            "before it is read, return it from the forward instead, or set "
            "'active_microbatches': 1"
        )


def _owner_in_backward(kept: Kept, values: _Values | None, microbatch: int) -> int | None:
    """The microbatch with the value for a forward that runs again; None: no forward has set it.

    For a carried attribute it is the newest, since backwards come in an order of their own.
    """
    known = values.by_microbatch if values is not None else ()
    return max((one for one in known if kept.counted or one <= microbatch), default=None)


def _count(module: nn.Module, name: str, kept: Kept) -> None:
    """A use of a carried attribute: with the last one of a call its microbatch is past."""
    if kept.counted and kept.uses and _running.calls and _running.calls[-1][0] is module:
        left = _running.calls[-1][1]
        left[name] -= 1
        if left[name] == 0:
            _core.left(kept.gate)


def _counting(cls: type[nn.Module]) -> dict[str, Any]:
    """The methods of a class like that of a module with carried attributes.  The end of a call
    lets the next microbatch's read them.
    """

    def counted(self: nn.Module, call: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            _core.current() is None
            or _core.in_backward()
            or any(one is self for one, _ in _running.calls)
        ):
            return call(self, *args, **kwargs)
        kept = {n: one for n, one in self.__dict__[marks.KEPT].items() if one.counted}
        left = {name: one.uses for name, one in kept.items()}
        _running.calls.append((self, left))
        try:
            return call(self, *args, **kwargs)
        finally:
            _running.calls.pop()
            for name, one in kept.items():
                if left[name] > 0 or one.uses == 0:
                    _core.left(one.gate)

    def __call__(self, *args, **kwargs):
        return counted(self, cls.__call__, *args, **kwargs)

    @functools.wraps(cls.forward)
    def forward(self, *args, **kwargs):
        return counted(self, cls.forward, *args, **kwargs)

    return {"__call__": __call__, "forward": forward, **stand_ins.of_original(cls)}


@functools.cache
def own_of_microbatch(names: tuple[str, ...]) -> stand_ins.Members:
    """The methods of a class like that of a module with these attributes set."""

    def members(cls: type[nn.Module]) -> dict[str, Any]:
        return {**stand_ins.of_original(cls), **{name: _OfMicrobatch() for name in names}}

    return members


def _adopting(cls: type[nn.Module]) -> dict[str, Any]:
    """The methods of a class like that of a module with calls to other ranks.  An attribute set
    for the first time in a step is each microbatch's own from then on.
    """

    def __setattr__(self, name, value):
        is_module = isinstance(value, nn.Parameter | nn.Module)
        if _core.current() is not None and not is_module and _can_be_own(self, name):
            watch(self, {name: Kept(self.__dict__[marks.ORDER], unseen=True)})
        cls.__setattr__(self, name, value)

    return {"__setattr__": __setattr__, **stand_ins.of_original(cls)}


def _can_be_own(module: nn.Module, name: str) -> bool:
    """Whether the attribute is a plain one, and none of ours or of torch's."""
    if (
        name in module.__dict__.get(marks.KEPT, ())
        or marks.is_mark(name)
        or name.startswith("__")
    ):
        return False
    registered = (module._parameters, module._buffers, module._modules)
    if any(name in names for names in registered) or name in _OF_TORCH:
        return False
    return not hasattr(getattr(type(module), name, None), "__set__")


def watch(module: nn.Module, kept: Mapping[str, Kept]) -> None:
    """Keep these attributes of a module of this rank apart, from microbatch to microbatch."""
    known = module.__dict__.setdefault(marks.KEPT, {})
    new = tuple(sorted(kept.keys() - known.keys()))
    known.update(kept)
    if new:
        marks.set_class(module, stand_ins.stand_in(type(module), own_of_microbatch(new)))
    if any(one.counted for one in kept.values()):
        marks.set_class(module, stand_ins.stand_in(type(module), _counting))


def adopt(module: nn.Module, order: int) -> None:
    """Keep apart all attributes set on a module of this rank with calls to other ranks.

    Args:
        order: the gate passed by a microbatch at the end of its forward.
    """
    if marks.ORDER not in module.__dict__:
        marks.set_class(module, stand_ins.stand_in(type(module), _adopting))
    module.__dict__[marks.ORDER] = order


def keep_apart(
    root: nn.Module,
    here: Collection[str],
    turns: "Turns",
    numbers: Sequence[int],
    split: Sequence[str],
) -> None:
    """Keep each microbatch's settings on this rank's modules of a model apart.

    Args:
        here: paths of the modules on this rank.
        numbers: of the model's gates in this job, and of one more, passed by a microbatch at
            the end of its forward.
        split: paths of modules split by tensor parallelism: their calls wait for other ranks,
            too.
    """
    order = numbers[-1]
    named = dict(root.named_modules())
    may_be_set = stores.stored(named)
    for path, module in named.items():
        if path not in here:
            continue
        if path in turns.reads:
            reads = gates.read_outside(tuple(turns.reads[path]))
            marks.set_class(module, stand_ins.stand_in(type(module), reads))
        kept = {name: Kept(order) for name in turns.own.get(path, ())}
        kept |= {name: Kept(-1) for name in turns.restored.get(path, ())}
        for name, (gate, uses) in turns.carried.get(path, {}).items():
            kept[name] = Kept(numbers[gate], uses, counted=True)
        read = turns.reads.get(path, ())
        for name in may_be_set[path] - kept.keys() - set(read):
            if _can_be_own(module, name):
                kept[name] = Kept(order, unseen=True)
        if kept:
            watch(module, kept)
        inside = f"{path}." if path else ""
        theirs = [f"{inside}{name}" for name, _ in module.named_modules() if name]
        if any(one not in here or one in split for one in theirs):
            adopt(module, order)


def keeps(target: nn.Module | nn.Parameter, name: str) -> bool:
    """Whether each microbatch has its own value of the attribute."""
    return name in target.__dict__.get(marks.KEPT, ())


def of_this_microbatch(target: nn.Module | nn.Parameter, name: str, absent: Any) -> Any:
    """The current microbatch's own value, without a look at others'."""
    values, microbatch = _values.get((id(target), name)), _core.current()
    if values is None or microbatch is None:
        return absent
    return values.by_microbatch.get(microbatch, absent)


def put(module: Any, name: str, value: Any, absent: Any) -> None:
    """Give the microbatch a value from elsewhere, or ``absent``, for a while."""
    values = _values.setdefault((id(module), name), _Values(module))
    microbatch = _core.current()
    assert microbatch is not None, "values come within a task"
    if value is absent:
        values.by_microbatch.pop(microbatch, None)
    else:
        values.by_microbatch[microbatch] = value


def finish(went_well: bool) -> None:
    """The step is over: the last microbatch's values stay.

    After a failure those stay that tracing has not seen: a branch that runs once has run.
    """
    for (_, name), values in _values.items():
        unseen = values.module.__dict__[marks.KEPT][name].unseen
        if not values.by_microbatch or not (went_well or unseen):
            continue
        last = values.by_microbatch[max(values.by_microbatch)]
        if last is _DELETED:
            values.module.__dict__.pop(name, None)
        else:
            values.module.__dict__[name] = last
    _values.clear()
