"""Dense copies of tensors, for a core that takes only such.

The core wants tensors without gaps, in the order of their indices.  Lists of tensors that
an operation takes or gives as one are joined here, and parted again.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def listed(value: Tensor | Sequence) -> list[Tensor]:
    """The tensors of nested lists, in a row."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in listed(each)]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """One row with the elements of all."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def room_for(tensors: Sequence[Tensor]) -> Tensor:
    """One row, not yet filled, for the elements of all."""
    return tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))


def parted(row: Tensor, tensors: Sequence[Tensor]) -> Callable[[], None]:
    """What copies a row into the tensors whose elements it has."""

    def copy() -> None:
        with torch.no_grad():
            parts = row.split([tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    return copy


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself if the core takes it, else a copy that it takes."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def counts(tensors: Sequence[Tensor]) -> list[int] | None:
    """The numbers of elements; None: they are equal."""
    numbers = [tensor.numel() for tensor in tensors]
    return None if len(set(numbers)) == 1 else numbers


def copied_back(
    copies: Sequence[Tensor],
    given: Sequence[Tensor],
    then: Callable[[], None] | None = None,
) -> Callable[[], None]:
    """What brings the copies' elements to the tensors that they stand for."""

    def copy() -> None:
        with torch.no_grad():
            for tensor, filled in zip(given, copies, strict=True):
                if tensor.data_ptr() != filled.data_ptr():
                    tensor.copy_(filled)
        if then is not None:
            then()

    return copy
