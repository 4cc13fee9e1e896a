"""Modules and parameters made and kept by a model in its first forward.

BigBird puts a full attention in the place of its sparse one when sequences are short.  One
process does so once.  The traced run does so too, on one rank, and all changes seen by tracing
are put back.  So these modules go to all ranks before the partition, with the flags that mark
them as made.  A second traced run finds them, and the partition decides about them.
"""

import enum
import io
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from smp.modules.late_modules import has_values
from smp.pytorch import restore

_REGISTERS = ("_modules", "_parameters")
_ABSENT = object()


class Registers:
    """The modules and parameters of a run's modules, before the run and after.

    Args:
        modules: of the models.
        original: by id of a parameter of the run, the id of the model's own.
    """

    def __init__(self, modules: Sequence[nn.Module], original: dict[int, int]):
        self._original = original
        self._before = {id(m): (m, self._held(m), _flags(m)) for m in modules}
        self._new: list[nn.Module] = []
        self.changed: list[tuple[nn.Module, str, dict[str, Any]]] = []
        self._of_new: list[tuple[nn.Module, str, dict[str, Any]]] = []
        self._set: dict[int, tuple[nn.Module, dict[str, Any]]] = {}

    def _held(self, module: nn.Module) -> dict[str, dict[str, int]]:
        return {
            register: {
                name: self._original.get(id(thing), id(thing))
                for name, thing in getattr(module, register).items()
                if thing is not None
            }
            for register in _REGISTERS
        }

    def add(self, module: nn.Module) -> Iterator[nn.Module]:
        """A module is put into another one: yield the new ones in it."""
        for one in module.modules():
            if id(one) not in self._before:
                self._before[id(one)] = one, self._held(one), _flags(one)
                self._new.append(one)
                yield one

    def take(self) -> None:
        """The run is over; its changes are not put back yet."""
        new = set(map(id, self._new))
        for module, before, flags in self._before.values():
            after = self._held(module)
            for register in _REGISTERS:
                held = dict(getattr(module, register))
                if id(module) in new:
                    self._of_new.append((module, register, held))
                elif self._differ(before[register], after[register], held):
                    self.changed.append((module, register, held))
            later = _flags(module)
            its = {n: v for n, v in later.items() if flags.get(n, _ABSENT) is not v}
            if its and id(module) not in new:
                self._set[id(module)] = module, its

    def _differ(
        self, before: dict[str, int], after: dict[str, int], held: dict[str, Any]
    ) -> bool:
        """Whether something with values, as a parameter, has come or gone."""
        names = [n for n in {*before, *after} if before.get(n) != after.get(n)]
        things = [held.get(n) for n in names]
        things += [self._before[before[n]][0] for n in names if before.get(n) in self._before]
        return any(isinstance(t, Tensor) or has_values(t) for t in things if t is not None)

    def keep_new(self) -> None:
        """All is put back: later additions to the new modules are theirs."""
        for module, register, held in self._of_new:
            _put(module, register, held)

    def flags(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        """Flags set by the run on modules with new parts."""
        changed = {id(module) for module, _, _ in self.changed}
        return [
            (module, its)
            for module, its in self._set.values()
            if any(id(inside) in changed for inside in module.modules())
        ]


def _flags(module: nn.Module) -> dict[str, Any]:
    """Plain attributes that name a state; numbers count."""
    return {
        name: value
        for name, value in module.__dict__.items()
        if (isinstance(value, bool | str | enum.Enum) or value is None) and name != "training"
    }


def _put(module: nn.Module, register: str, held: dict[str, Any]) -> None:
    own = getattr(module, register)
    own.clear()
    own.update(held)
    for name in held:
        module.__dict__.pop(name, None)  # a plain attribute, as None, before


# ---------------------------------------------------------------------- to all ranks

# The name of a module, or of its parameter, buffer or object: number of the model, path of the
# module, name.
_Name = tuple[int, str, str]


def _things(roots: Sequence[nn.Module]) -> Iterator[tuple[Any, _Name]]:
    """The things of all ranks: modules, tensors, and objects such as configurations."""
    for number, root in enumerate(roots):
        for path, module in root.named_modules():
            yield module, (number, path, "")
            for held in (module._parameters, module._buffers, module.__dict__):
                for name, thing in held.items():
                    if isinstance(thing, Tensor) or restore.kind_of(thing) == restore.OBJECT:
                        yield thing, (number, path, name)


class _Pickler(pickle.Pickler):
    def __init__(self, to: io.BytesIO, names: dict[int, _Name]):
        super().__init__(to)
        self._names = names

    def persistent_id(self, thing: Any) -> _Name | None:
        return self._names.get(id(thing))


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, things: dict[_Name, Any]):
        super().__init__(data)
        self._things = things

    def persistent_load(self, name: _Name) -> Any:
        return self._things[name]


def packed(roots: Sequence[nn.Module], registers: Registers, original: dict[int, int]) -> bytes:
    """The run's new modules and parameters, for `make`.

    Args:
        original: by id of a parameter of the run, the id of the model's own.

    Raises:
        RuntimeError: they cannot be pickled.
    """
    names = {id(thing): name for thing, name in _things(roots)}
    names |= {twin: names[own] for twin, own in original.items() if own in names}
    out = io.BytesIO()
    try:
        _Pickler(out, names).dump((registers.changed, registers.flags()))
    except Exception as error:
        raise RuntimeError(
            f"smp: {described(roots, registers)} in the first forward, which other ranks "
            f"cannot be given ({type(error).__name__}: {error}): do so before "
            "smp.DistributedModel"
        ) from error
    return out.getvalue()


def make(
    roots: Sequence[nn.Module], data: bytes
) -> tuple[list[tuple[nn.Module, nn.Module]], set[str]]:
    """Repeat on the models the changes of their first forward on another rank.

    Returns:
        modules, each with the one in its place; names of the flags set now.
    """
    things = {name: thing for thing, name in _things(roots)}
    path_of = {id(module): path for root in roots for path, module in root.named_modules()}
    changes, flags = _Unpickler(io.BytesIO(data), things).load()
    replaced: list[tuple[nn.Module, nn.Module]] = []
    for module, register, held in changes:
        before = dict(getattr(module, register))
        _put(module, register, held)
        for name, thing in held.items():
            old = before.get(name)
            if isinstance(old, nn.Module) and thing is not None and old is not thing:
                replaced.append((old, thing))
    for module, its in flags:
        module.__dict__.update(its)
    names = {f"{path_of[id(m)]}.{name}".lstrip(".") for m, its in flags for name in its}
    return replaced, names


def described(roots: Sequence[nn.Module], registers: Registers) -> str:
    """The run's first new module or parameter, in words."""
    module, register, held = registers.changed[0]
    paths = {id(m): path for root in roots for path, m in root.named_modules()}
    before = getattr(module, register)
    name = next(n for n in (*held, *before) if held.get(n) is not before.get(n))
    path = f"{paths.get(id(module), '')}.{name}".lstrip(".")
    old, new = before.get(name), held.get(name)
    kind = "module" if register == "_modules" else "parameter"
    if old is None:
        return f"{kind} '{path}' ({type(new).__name__}) is made"
    by = "None" if new is None else f"a {type(new).__name__}"
    return f"{kind} '{path}' ({type(old).__name__}) is replaced by {by}"
