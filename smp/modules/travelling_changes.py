"""Changes by code in a step on modules of other ranks: flags, attributes, ``requires_grad``.

The change is made here at once, on the module's stand-in.  It travels with every later call and
backward of the same microbatch, to any rank: while the request runs, that rank has the change,
too.  Other microbatches are under way meanwhile, and see it when the step function has
returned.  At the end of the step all ranks get the step function's changes; a change by a
module's forward goes on with its rank's calls.  Between steps every rank runs the script, and
makes the change itself.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from smp import _core
from smp.modules import live_models, microbatch_attributes
from smp.pytorch.contents import can_change

# A module or parameter, the attribute's name, the value.  The codec sends the first by its
# number, alike on all ranks.
Change = tuple[nn.Module | nn.Parameter, str, Any]

REQUIRES_GRAD = "requires_grad"
_ABSENT = object()

Changes = dict[tuple[int, str], Change]  # by id of the object, and name

_made: dict[int, Changes] = {}  # by microbatch under way
_kept: Changes = {}  # of microbatches, and by modules in steps, that are over
_names: set[tuple[int, str]] = set()  # keys of _made, now or earlier in this step
_touched: set[tuple[int, int, str]] = set()  # microbatch and key: set in this step
_sent: set[tuple[int, int, str]] = set()  # ... and can change, and gone with a call since


def note(target: nn.Module | nn.Parameter, name: str, value: Any, before: Any) -> None:
    """Code of a task set an attribute of another rank's module or parameter."""
    key = (id(target), name)
    at = _core.current()
    if at is None:
        _kept.pop(key, None)
        return
    _touched.add((at, *key))
    _sent.discard((at, *key))
    if value is before and key not in _names and key not in _kept:
        return
    _names.add(key)
    _made.setdefault(at, {})[key] = (target, name, value)


def noted(target: nn.Module | nn.Parameter, name: str) -> bool:
    """Whether the current task, or a microbatch that is over, has set the attribute.

    Later changes in place by the module, on its own rank, do not count.
    """
    at = _core.current() if _touched or _kept else None
    if at is None:
        return False
    key = (id(target), name)
    if (at, *key) in _touched:
        return (at, *key) not in _sent
    return key in _kept and not can_change(_kept[key][2])


def travelling() -> tuple[Change, ...]:
    """The changes that go with a call of the current task."""
    at = _core.current() if _made or _kept else None
    if at is None:
        return ()
    mine = _made.get(at, {})
    for key, (_, _, value) in mine.items():
        if can_change(value):
            _sent.add((at, *key))
    return tuple((_kept | mine).values())


def returned(microbatch: int) -> None:
    """The step function has returned; tensors of its graph are not for others."""
    for key, change in _made.pop(microbatch, {}).items():
        if not _holds_tensors(change[2]):
            _kept[key] = change


def forget() -> None:
    """A job begins."""
    _made.clear()
    _kept.clear()
    _names.clear()
    _touched.clear()
    _sent.clear()


def forget_others(models: Iterable[nn.Module]) -> None:
    """Forget changes of modules in none of the models: other ranks have them no more."""
    if not _kept:
        return
    theirs = {id(m) for model in models for m in model.modules()}
    theirs |= {id(p) for model in models for p in model.parameters()}
    for key in [key for key in _kept if key[0] not in theirs]:
        del _kept[key]


def finish() -> None:
    """The step is over."""
    for microbatch in sorted(_made):
        returned(microbatch)
    _names.clear()
    _touched.clear()
    _sent.clear()


def told() -> tuple[Change, ...]:
    """The changes for all ranks with the end of the step; ``finish`` comes before."""
    changes = tuple(_kept.values())
    _kept.clear()
    return changes


def make(changes: Iterable[Change]) -> None:
    """Make arrived changes; those on a third rank's modules travel on."""
    for target, name, value in changes:
        if getattr(target, name, _ABSENT) is not value:
            setattr(target, name, value)


@contextmanager
def made(changes: Iterable[Change]) -> Iterator[None]:
    """A request's changes, until its end."""
    before = [_before(target, name) for target, name, _ in changes]
    for (target, name, value), old in zip(changes, before, strict=True):
        if old is not value:
            _bring(target, name, value)
    try:
        yield
    finally:
        for (target, name, new), old in zip(changes, before, strict=True):
            if _before(target, name) is new:  # else the request's own code has set it
                _bring(target, name, old)


def _before(target: nn.Module | nn.Parameter, name: str) -> Any:
    if microbatch_attributes.keeps(target, name):
        return microbatch_attributes.of_this_microbatch(target, name, _ABSENT)
    return getattr(target, name, _ABSENT)


def _bring(target: nn.Module | nn.Parameter, name: str, value: Any) -> None:
    if microbatch_attributes.keeps(target, name):
        microbatch_attributes.put(target, name, value, _ABSENT)
    elif value is _ABSENT:
        target.__dict__.pop(name, None)  # a module of a third rank refuses delattr
    else:
        setattr(target, name, value)


def check_frozen(changes: Iterable[Change], called: object) -> None:
    """Refuse a call that would lose gradients without a word.

    Autograd drops the gradient of a parameter without requires_grad at the time.  While a call
    waits for another rank, backwards of other microbatches run here.

    Raises:
        RuntimeError: a change of ``requires_grad`` came with a call that may wait.
    """
    frozen = next((target for target, name, _ in changes if name == REQUIRES_GRAD), None)
    if frozen is None or not isinstance(called, nn.Module):
        return
    for path, module in called.named_modules():
        if type(module).__dict__.get("__call__") is _core.module_call:
            raise RuntimeError(
                f"smp: requires_grad was changed in the step, and then {type(called).__name__} "
                f"was called, whose module '{path}' is on another rank: with "
                "pipeline='interleaved' the gradients of other microbatches would be lost; use "
                "pipeline='simple', or place the module's parts together with "
                "smp.set_partition"
            )


def _holds_tensors(value: Any) -> bool:
    leaves = torch.utils._pytree.tree_leaves(value)
    return any(isinstance(leaf, Tensor) for leaf in leaves)


def watched(cls: type[nn.Module]) -> dict[str, Any]:
    """The methods of a class like ``cls``, for instances on another rank."""

    def __setattr__(self, name, value):
        if isinstance(value, nn.Module | nn.Parameter) and _core.current() is not None:
            raise RuntimeError(
                f"smp: {type(self).__name__}.{name} is a {type(value).__name__} that is set "
                "in a step, on a module of another rank; set it before the first step, or in "
                "that module's own forward"
            )
        if name in self._buffers and _core.current() is not None:
            raise RuntimeError(
                f"smp: {_described(self, name, 'buffer')} is set in a step by code on another "
                "rank, where it is none of the model's: set it in that module's own forward, "
                "or place the modules together with smp.set_partition"
            )
        before = self.__dict__.get(name, _ABSENT)
        cls.__setattr__(self, name, value)
        note(self, name, value, before)

    def __delattr__(self, name):
        if _core.current() is not None:
            raise RuntimeError(
                f"smp: {_described(self, name, 'attribute')} is deleted in a step by code on "
                "another rank, where it would stay: delete it in that module's own forward, or "
                "place the modules together with smp.set_partition"
            )
        cls.__delattr__(self, name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


class TensorsElsewhere(dict[str, Tensor | None]):
    """The parameters, or the buffers, of a module of another rank.

    ``torch.func.functional_call`` puts others there past ``__setattr__``, and its owner's rank
    would compute with its own.
    """

    def __init__(self, kind: str, path: str, owner: int, tensors: dict) -> None:
        super().__init__(tensors)
        self._described = kind, path, owner

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(self.items())

    def __setitem__(self, name: str, value: Tensor | None) -> None:
        if value is not self.get(name):
            self._check(name, "replaced")
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._check(name, "taken out")
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        self._check(name, "taken out")
        return super().pop(name, *default)

    def _check(self, name: str, how: str) -> None:
        """
        Raises:
            RuntimeError: in a step.
        """
        if _core.current() is None:
            return
        kind, path, owner = self._described
        raise RuntimeError(
            f"smp: {kind} '{f'{path}.{name}'.lstrip('.')}' is {how} in a step (as "
            "torch.func.functional_call does) by code on another rank than its module, which "
            f"is on pp_rank {owner} and would use its own; do it in the first step, too, whose "
            "trace then places the module and its caller together, or do so with "
            "smp.set_partition"
        )


def _described(module: nn.Module, name: str, kind: str) -> str:
    """A part of another rank's module, and that rank."""
    path, owner = live_models.home_of(module) or (type(module).__name__, "another one")
    whole = f"{path}.{name}".lstrip(".")
    return f"{kind} '{whole}', of a module on pp_rank {owner},"
