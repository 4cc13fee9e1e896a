"""Slices: contiguous elements of a large parameter, in an optimizer for their owner.

A slice shares the parameter's storage, and its gradient that of the parameter's.  Only
optimizers that look at each element by itself get slices.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smp.marks import HAS_MASTER
from smp.sharding.owners import Part, setting
from smp.sharding.shards import elements_here, note_slice
from smp.slicing.slices import MARKS


class SliceParameter(nn.Parameter):
    """Elements of a parameter, in its place in an optimizer.

    Attributes:
        stands_for: the parameter.
        part: the elements.
    """

    stands_for: nn.Parameter | None = None
    part: Part

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The elements of the parameter's gradient."""
        whole = self.stands_for
        if whole is None or whole.grad is None:
            return None
        if not whole.grad.is_contiguous():
            whole.grad = whole.grad.contiguous()
        return whole.grad.view(-1)[self.part.start : self.part.end]

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if self.stands_for is None:
            return
        if gradient is None:
            self.stands_for.grad = None
        elif (mine := self.grad) is not None:
            mine.copy_(gradient)

    def is_current(self) -> bool:
        """Whether the parameter still has the storage that is shared."""
        whole = self.stands_for
        if whole is None or whole.dtype != self.dtype:
            return False
        return elements_here(whole, self.part).data_ptr() == self.data_ptr()


def slice_of(parameter: Any, part: Part) -> SliceParameter:
    """The elements of a parameter.

    Raises:
        RuntimeError: the parameter is no longer contiguous.
    """
    if not parameter.is_contiguous():
        raise RuntimeError(
            f"smp: a parameter of shape {list(parameter.shape)} has strides "
            f"{list(parameter.stride())} now, and with {setting()} several "
            "ranks update contiguous elements of it: convert the model's memory format before "
            "smp.DistributedOptimizer"
        )
    made = SliceParameter(elements_here(parameter, part), parameter.requires_grad)
    made.stands_for, made.part = parameter, part
    note_slice(parameter, made)
    for mark in (*MARKS, HAS_MASTER):
        if mark in parameter.__dict__:
            setattr(made, mark, parameter.__dict__[mark])
    return made


def cut(state: Any, shape: Sequence[int], part: Part) -> Any:
    """The elements of a parameter's state: tensors of its shape are cut."""
    return _each(
        state,
        lambda value: (
            value.reshape(-1)[part.start : part.end].clone()
            if list(value.shape) == list(shape)
            else value
        ),
    )


def joined(pieces: Sequence[tuple[Sequence[int], Any]]) -> Any:
    """The state of a whole parameter, in host memory.

    Args:
        pieces: first and last element but one, the parameter's shape; and the state of them.
    """
    pieces = sorted(pieces, key=lambda piece: piece[0][0])
    (start, end, *shape), first = pieces[0]

    def whole(value: Tensor, key: Any) -> Tensor:
        if list(value.shape) != [end - start]:
            return value
        everyones = [one if key is None else one[key] for _, one in pieces]
        return torch.cat([one.cpu() for one in everyones]).view(shape)

    if isinstance(first, Tensor):
        return whole(first, None)
    return {
        key: whole(value, key) if isinstance(value, Tensor) else value
        for key, value in first.items()
    }


def _each(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(state, Tensor):
        return function(state)
    if not isinstance(state, Mapping):
        return state
    return {k: function(v) if isinstance(v, Tensor) else v for k, v in state.items()}


def joined_shards(shards: Sequence[Mapping[Any, Any]], at: Sequence[Mapping]) -> dict[Any, Any]:
    """States by number of all owners as one.

    Args:
        shards: by owner.
        at: by owner, for each number with several owners its place in `joined`.
    """
    out: dict[Any, Any] = {}
    pieces: dict[Any, list[tuple[Sequence[int], Any]]] = {}
    for states, places in zip(shards, at, strict=True):
        for number, one in states.items():
            if number in places:
                pieces.setdefault(number, []).append((places[number], one))
            else:
                out[number] = one
    return out | {number: joined(some) for number, some in pieces.items()}
