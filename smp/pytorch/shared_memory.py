"""Arguments of one remote call with common memory.

They arrive as tensors of their own: in one the callee does not see its changes of the other.  A
change of one by the callee is an error on the caller.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def refuse_changed(
    path: str, args: tuple, kwargs: dict[str, Any] | None, changed: Tensor, sent: list[Tensor]
) -> None:
    """Make sure that no other tensor of the call shares an element changed by the callee.

    Args:
        path: of the called module.
        args: of the call, as `kwargs` is.
        changed: the caller's tensor, changed in place by the callee.
        sent: all tensors of the call.

    Raises:
        RuntimeError: one shares an element; the text names both.
    """
    for other in sent:
        if other is not changed and share_elements(changed, other):
            names = {id(tensor): name for name, tensor in _named(args, kwargs)}
            one = names.get(id(changed), "an argument")
            two = names.get(id(other), "another argument")
            raise RuntimeError(
                f"smp: module '{path}' changed {one} (shape {tuple(changed.shape)}) in place, "
                f"which shares memory with {two} (shape {tuple(other.shape)}): on another rank "
                "they are two tensors, and the change is in one of them; pass one and take "
                "the other from it in the module, or pass a clone"
            )


def share_elements(a: Tensor, b: Tensor) -> bool:
    """Whether a change of one can be seen in the other."""
    try:
        if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
            return False
    except (NotImplementedError, RuntimeError):  # sparse ones and the like
        return False
    (a_begin, a_end), (b_begin, b_end) = _span(a), _span(b)
    if a_begin >= b_end or b_begin >= a_end:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    unit = math.gcd(a.element_size(), b.element_size(), a_begin - b_begin)
    first = min(a_begin, b_begin)
    return bool(torch.isin(_units(a, first, unit), _units(b, first, unit)).any())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of its first byte and of the one after its last."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return begin, begin + (last + 1) * tensor.element_size()


def _units(tensor: Tensor, first: int, unit: int) -> Tensor:
    """The tensor's memory, as numbers of pieces of `unit` bytes from `first` on."""
    at = torch.tensor([tensor.data_ptr() - first], device="cpu")
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        steps = torch.arange(size, device="cpu") * (stride * tensor.element_size())
        at = (at[:, None] + steps).flatten()
    pieces = torch.arange(tensor.element_size() // unit, device="cpu")
    return (at[:, None] // unit + pieces).flatten()


def _named(args: tuple, kwargs: dict[str, Any] | None) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the arguments, with their names for a reader of the call."""
    for i, value in enumerate(args):
        yield from _inside(f"argument {i}", value)
    for name, value in (kwargs or {}).items():
        yield from _inside(f"argument {name!r}", value)


def _inside(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _inside(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _inside(f"{name}[{i}]", item)
