"""The part of a parameter held by each rank of the TP_GROUP.

A slice is one or more ranges of one axis: one where the axis is cut as it is, several where it
holds blocks with a cut of their own (the query, key and value columns of a packed linear).
Axis and ranges are kept with the parameter and serve saving and loading.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from smp.marks import (
    OF_SPLIT_MODEL,
    PARTIAL_GRADIENT,
    PATH,
    PATH_OF_PARAMETER,
    SCALED_BATCH,
    SCALES,
    SLICES,
)

Range = tuple[int, int]  # first, one past the last


def share(count: int, parts: int) -> list[int]:
    """How many of ``count`` each part gets, as ``torch.tensor_split``: the first ones more."""
    least, more = divmod(count, parts)
    return [least + (i < more) for i in range(parts)]


class Slices(NamedTuple):
    """The cut of an axis.

    Attributes:
        axis: of the parameter.
        size: of the whole axis.
        ranges: by tp_rank, the rank's parts, in its order there.
    """

    axis: int
    size: int
    ranges: tuple[tuple[Range, ...], ...]

    @staticmethod
    def even(axis: int, size: int, parts: int, unit: int = 1, blocks: int = 1) -> "Slices":
        """Cut each of ``blocks`` equal blocks into ``parts``, in whole units.

        Args:
            axis: of the parameter.
            size: of the whole axis; ``unit * blocks`` divides it.
            parts: tp_size.
            unit: elements to keep together, the size of a head for example.
            blocks: equal parts of the axis, each cut by itself.
        """
        width = size // blocks
        counts = share(width // unit, parts)
        ranges = []
        for part in range(parts):
            first = sum(counts[:part]) * unit
            last = first + counts[part] * unit
            ranges.append(tuple((b * width + first, b * width + last) for b in range(blocks)))
        return Slices(axis, size, tuple(ranges))

    def local_size(self, part: int) -> int:
        """The length of a rank's axis."""
        return sum(last - first for first, last in self.ranges[part])

    def full_shape(self, local: Sequence[int]) -> list[int]:
        """The shape of the whole, from a part's."""
        shape = list(local)
        shape[self.axis] = self.size
        return shape

    def take(self, whole: Tensor, part: int) -> Tensor:
        """A rank's part, contiguous, in memory of its own."""
        pieces = [whole.narrow(self.axis, a, b - a) for a, b in self.ranges[part]]
        return (
            torch.cat(pieces, self.axis)
            if len(pieces) > 1
            else pieces[0].clone(memory_format=torch.contiguous_format)
        )

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole, from every rank's part."""
        whole = parts[0].new_empty(self.full_shape(parts[0].shape))
        for part, ranges in zip(parts, self.ranges, strict=True):
            at = 0
            for first, last in ranges:
                piece = part.narrow(self.axis, at, last - first)
                whole.narrow(self.axis, first, last - first).copy_(piece)
                at += last - first
        return whole

    def by_rank(self, whole: Tensor) -> Tensor:
        """The ranks' parts of the whole, one behind the other along the axis."""
        return (
            whole if self._is_in_order() else whole.index_select(self.axis, self._held(whole))
        )

    def in_order(self, joined: Tensor) -> Tensor:
        """The whole, from the ranks' parts one behind the other along the axis."""
        if self._is_in_order():
            return joined
        return joined.index_select(self.axis, self._held(joined).argsort())

    def _is_in_order(self) -> bool:
        return all(len(ranges) == 1 for ranges in self.ranges)

    def _held(self, whole: Tensor) -> Tensor:
        """Places along the axis, by rank."""
        ranges = (pair for ranges in self.ranges for pair in ranges)
        held = [i for first, last in ranges for i in range(first, last)]
        return torch.tensor(held, device=whole.device)


def mark(parameter: Tensor, slices: Slices | None, scaled_batch: bool) -> None:
    """Note this rank's part of a parameter (or buffer), and the samples seen by it.

    Args:
        parameter: in its local shape.
        slices: None: all of it.
        scaled_batch: it sees the samples of the whole TP_GROUP.
    """
    setattr(parameter, SLICES, slices)
    setattr(parameter, SCALED_BATCH, scaled_batch)


def slices_of(parameter: Tensor) -> Slices | None:
    """The cut of a parameter or buffer; None: every rank of the TP_GROUP has all of it."""
    return getattr(parameter, SLICES, None)


def whole_shape(parameter: Tensor) -> list[int]:
    """The shape of a parameter or buffer with the parts of all ranks."""
    slices = slices_of(parameter)
    return list(parameter.shape) if slices is None else slices.full_shape(parameter.shape)


def elements_alike(parameter: Tensor) -> int:
    """A parameter's elements; of a slice the mean, alike on all tp_ranks."""
    slices = slices_of(parameter)
    if slices is None:
        return parameter.numel()
    return math.prod(whole_shape(parameter)) // len(slices.ranges)


def in_words(parameter: Tensor) -> str:
    """This rank's share of a parameter, for a module's representation; "" for all of it."""
    slices = slices_of(parameter)
    if slices is None:
        return ""
    local, whole = parameter.shape[slices.axis], slices.size
    return f", this rank's {local} of {whole} in axis {slices.axis} of the weight"


def is_scaled_batch(parameter: Tensor) -> bool:
    """Whether a parameter sees the samples of the whole TP_GROUP."""
    return getattr(parameter, SCALED_BATCH, False)


def is_scaled_by_module(parameter: Tensor) -> bool:
    """Whether its module multiplies the gradients of the parameter's results."""
    return getattr(parameter, SCALES, 1.0) is None


# Notes with parameters and buffers.
MARKS = (SLICES, SCALED_BATCH, OF_SPLIT_MODEL, PARTIAL_GRADIENT, PATH_OF_PARAMETER)


def mark_model(model: nn.Module) -> None:
    """Note with all parameters of a model that some of them are cut, if any is."""
    parameters = list(model.parameters())
    if any(slices_of(parameter) is not None for parameter in parameters):
        for parameter in parameters:
            setattr(parameter, OF_SPLIT_MODEL, True)
    for module in model.modules():
        if _slices_in(module) and _refuse_slices not in module._state_dict_pre_hooks.values():
            module.register_state_dict_pre_hook(_refuse_slices)


def _slices_in(module: nn.Module) -> list[str]:
    """The names of a module's slices."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, value in named if slices_of(value) is not None]


def _refuse_slices(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Refuse ``state_dict()`` of a module with slices; saving/state_dicts.py keeps variables.

    Raises:
        RuntimeError: a script would take this rank's slices for the whole.
    """
    cut = [] if keep_vars else _slices_in(module)
    if cut:
        raise RuntimeError(
            f"smp: {type(module).__name__}.state_dict() would have this rank's slices of "
            f"'{cut[0]}' and {len(cut) - 1} other parameters: take model.state_dict() of the "
            "DistributedModel, which is whole, with the names of the wrapped module "
            "(save_pretrained(folder, state_dict=...)), or model.local_state_dict()"
        )


def is_of_split_model(parameter: Tensor) -> bool:
    """Whether a parameter is one of a split model, on all ranks alike."""
    return getattr(parameter, OF_SPLIT_MODEL, False)


def refuse_copies(module: nn.Module) -> NoReturn:
    """The ``marks.REFUSES_COPIES`` of a split module.

    Raises:
        TypeError: a copy would not know its values as this rank's slices.
    """
    path = module.__dict__.get(PATH)
    name = f"a {type(module).__name__}" if path is None else f"'{path}'"
    raise TypeError(
        f"smp: {name} is split over the TP_GROUP and cannot be copied or pickled, because this "
        "rank has slices of it: take model.state_dict(), which is whole"
    )
