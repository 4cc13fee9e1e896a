"""Splitting a batch into microbatches.  [api.md, section 3]"""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.reference.objects import Copier, is_container


class Microbatch(NamedTuple):
    args: tuple
    kwargs: dict
    weight: float  # its share of the samples


def split_sizes(rows: int, microbatches: int) -> list[int]:
    """As even as possible, the larger ones first.

    Raises:
        ValueError: a microbatch would be empty.
    """
    if rows < microbatches:
        raise ValueError(f"{rows} samples cannot fill {microbatches} microbatches")
    small, more = divmod(rows, microbatches)
    return [small + 1] * more + [small] * (microbatches - more)


def split_batch(
    step: Callable,
    model: Any,
    args: tuple,
    kwargs: Mapping[str, Any],
    microbatches: int,
    non_split_inputs: Collection[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
) -> list[Microbatch]:
    """The arguments of ``step(model, *args, **kwargs)``, microbatch by microbatch.

    There are as many as the tensor with the fewest samples has, if these are fewer.  The
    first tensor that is split says how many samples each microbatch has; where there is none,
    all weigh the same.  Tensors without dimensions, modules and what holds no tensors are
    passed through.
    """
    axes = dict(input_split_axes or {})
    bound = inspect.signature(step).bind(model, *args, **kwargs)
    given = {
        name: value
        for number, (name, value) in enumerate(bound.arguments.items())
        if number > 0 and name not in non_split_inputs
        if isinstance(value, Tensor) or is_container(value)
    }
    sizes: list[int] = []
    samples: list[int] = []
    split: list[Microbatch] = []

    def count(value: Any, axis: int) -> None:
        Copier(lambda t: samples.extend([t.size(axis)] if t.dim() else []) or t).copy(value)

    def part(value: Any, index: int, axis: int) -> Any:
        if hasattr(value, "smp_slice") and not isinstance(value, nn.Module):
            return value.smp_slice(microbatches, index, axis)

        def piece(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0:
                return tensor
            own = split_sizes(tensor.size(axis), microbatches)
            if not sizes:
                sizes.extend(own)
            return tensor.narrow(axis, sum(own[:index]), own[index])

        return Copier(piece).copy(value)

    for name, value in given.items():
        count(value, axes.get(name, 0))
    microbatches = min([microbatches, *samples])
    for index in range(microbatches):
        mine = inspect.BoundArguments(bound.signature, bound.arguments.copy())
        for name, value in given.items():
            mine.arguments[name] = part(value, index, axes.get(name, 0))
        weight = sizes[index] / sum(sizes) if sizes else 1 / microbatches
        split.append(Microbatch(mine.args[1:], mine.kwargs, weight))
    return split


def seed_of(tensor: Tensor, given: Tensor | None, weight: float) -> Tensor | None:
    """The gradient that a microbatch's backward starts with: its weight, once."""
    if given is not None:
        return given * weight
    if tensor.numel() != 1:
        return None  # autograd's own error names the shape
    return torch.full_like(tensor, weight)
