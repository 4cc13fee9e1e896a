"""Dense copies of tensors: the core takes no others.

The core wants tensors without gaps, in the order of their indices; most of its operations want
host memory.  Lists of tensors taken or given as one are joined here, and parted again.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor


def listed(value: Tensor | Sequence) -> list[Tensor]:
    """The tensors of nested lists, in a row."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in listed(each)]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """One row with the elements of all."""
    _check_some(tensors)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def room_for(tensors: Sequence[Tensor]) -> Tensor:
    """One row, not yet filled, for the elements of all."""
    _check_some(tensors)
    return tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))


def parted(row: Tensor, tensors: Sequence[Tensor]) -> Callable[[], None]:
    """A function to copy a row into its tensors."""

    def copy() -> None:
        with _changing(tensors):
            parts = row.split([tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    return copy


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself if the core takes it, else a dense copy."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def in_host_memory(tensor: Tensor, is_read: bool = True) -> Tensor:
    """The tensor itself if it is dense and in host memory, else such a copy.

    On return the device has done all earlier work of its current stream.  A GPU copies to and
    from pinned memory, given back after the copy.

    Args:
        is_read: whether the elements matter, or are written over.

    Raises:
        RuntimeError: a CUDA graph is being captured: its captures hold no calls of the host.
    """
    tensor = dense(tensor)
    if tensor.is_cpu:
        return tensor
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "smp: a CUDA graph cannot hold collectives that go through host memory, as those "
            "of ranks that share a GPU do: capture the graph without them"
        )
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    if is_read:
        copy.copy_(tensor)
    else:
        torch.accelerator.current_stream(tensor.device).synchronize()
    return copy


def devices_of(tensors: Sequence[Tensor]) -> list[int | str | torch.device]:
    """The tensors' devices, for a future."""
    return list({t.device: None for t in tensors if t.device.type not in ("cpu", "meta")})


def is_fake(tensor: Tensor | None) -> bool:
    """Whether the tensor only pretends to have elements, as in a compiler's trace."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def _check_some(tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise ValueError("smp: an empty list, where a tensor for each rank is wanted")


def _changing(tensors: Sequence[Tensor]) -> AbstractContextManager:
    """For writes to the tensors on any thread, unseen by autograd."""
    return torch.inference_mode() if any(t.is_inference() for t in tensors) else torch.no_grad()


def counts(tensors: Sequence[Tensor]) -> list[int] | None:
    """The numbers of elements; None: they are equal."""
    numbers = [tensor.numel() for tensor in tensors]
    return None if len(set(numbers)) == 1 else numbers


def copied_back(
    copies: Sequence[Tensor],
    given: Sequence[Tensor],
    then: Callable[[], None] | None = None,
) -> Callable[[], None]:
    """A function to copy the copies' elements back to the given tensors."""

    def copy() -> None:
        with _changing(given):
            for tensor, filled in zip(given, copies, strict=True):
                if tensor.data_ptr() != filled.data_ptr():
                    tensor.copy_(filled)
        if then is not None:
            then()

    return copy
