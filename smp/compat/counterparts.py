"""The parameters of a plain model, where distributed modules replace modules.

A distributed module may have a parameter under another name, transposed, or in several parts.
State of an optimizer is saved in the plain model's form, and so needs the correspondence.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from smp.marks import REPLACES
from smp.slicing.slices import whole_shape
from smp.tensor_parallel.splits.replacement import BothWays, Translate

Shapes = Mapping[str, list[int]]  # of parameters, by name


class Counterpart(NamedTuple):
    """Parameters of the plain model, and their counterparts now.

    Attributes:
        plain: by path; none: ours are new.
        ours: by path; none: the plain ones are no longer.
        to_ours, to_plain: between the tensors of each, by path.
    """

    plain: Shapes
    ours: Shapes
    to_ours: Translate
    to_plain: Translate


class Counterparts(NamedTuple):
    """All parameters of a model with replaced modules.

    Attributes:
        order: place in the plain model, by path there.
        every: each parameter in one of them.
    """

    order: Mapping[str, int]
    every: list[Counterpart]


def shapes_of(model: nn.Module) -> dict[str, list[int]]:
    """Shapes of the whole parameters."""
    return {name: whole_shape(p) for name, p in model.named_parameters()}


def counterparts(model: nn.Module, plain: Shapes) -> Counterparts | None:
    """The correspondence; None: no module was replaced.

    Args:
        model: after its modules were replaced.
        plain: of the model before.
    """
    replaced = {
        path: module.__dict__[REPLACES]
        for path, module in model.named_modules()
        if REPLACES in module.__dict__
    }
    if not replaced:
        return None
    out = []
    left = dict(plain)
    ours = _Ours(model)
    for name, shape in plain.items():
        if name not in left:
            continue
        path = next((p for p in replaced if not p or name.startswith(f"{p}.")), None)
        if path is None:
            out.append(Counterpart({name: shape}, {name: ours.shapes[name]}, dict, dict))
            continue
        before = f"{path}." if path else ""
        inside = {n: left.pop(n) for n in list(left) if n.startswith(before)}
        out += _of_replaced(before, replaced[path], inside, ours)
    return Counterparts({name: place for place, name in enumerate(plain)}, out)


class _Ours:
    """The model's parameters now."""

    def __init__(self, model: nn.Module) -> None:
        self.shapes = shapes_of(model)
        first = {id(p): name for name, p in model.named_parameters()}
        every = model.named_parameters(remove_duplicate=False)
        self.first = {name: first[id(p)] for name, p in every}  # of the names of a tied one


def _of_replaced(
    before: str, translation: BothWays, plain: Shapes, ours: _Ours
) -> Iterator[Counterpart]:
    """Those of one module.

    Args:
        before: its path and a dot.
        plain: its parameters, by path in the model.
    """
    shapeless = {
        name.removeprefix(before): torch.empty(shape, device="meta")
        for name, shape in plain.items()
    }
    try:
        pieces = [({n: t}, translation.to_ours({n: t})) for n, t in shapeless.items()]
    except KeyError:  # several of the plain model's are one here
        pieces = [(shapeless, translation.to_ours(shapeless))]
    new = {name for name in ours.shapes if name.startswith(before)}
    for theirs, here in pieces:
        names = {before + n: ours.first[before + n] for n in here if before + n in ours.first}
        new -= set(names.values())
        to_plain = _to_plain(before, translation.to_plain, names)
        kept = to_plain(
            {first: here[name.removeprefix(before)] for name, first in names.items()}
        )
        some = [before + name for name in theirs]
        yield Counterpart(
            {name: plain[name] for name in some if name in kept},
            {name: ours.shapes[name] for name in names.values()},
            _to_ours(before, translation.to_ours, names),
            to_plain,
        )
        for name in some:
            if name not in kept:
                yield Counterpart({name: plain[name]}, {}, dict, dict)
    for name in sorted(new):
        yield Counterpart({}, {name: ours.shapes[name]}, dict, dict)


def _to_ours(before: str, translate: Translate, names: Mapping[str, str]) -> Translate:
    def translated(given: Mapping[str, Any]) -> dict[str, Any]:
        inside = {name.removeprefix(before): value for name, value in given.items()}
        out = {before + name: value for name, value in translate(inside).items()}
        return {names[name]: value for name, value in out.items() if name in names}

    return translated


def _to_plain(before: str, translate: Translate, names: Mapping[str, str]) -> Translate:
    def translated(given: Mapping[str, Any]) -> dict[str, Any]:
        inside = {name.removeprefix(before): given[first] for name, first in names.items()}
        return {before + name: value for name, value in translate(inside).items()}

    return translated
