"""Where the models of this rank are: on its accelerator, if the host has one.

A script leaves its model on the CPU.  What this rank owns is moved when that is known: at once
without pipeline parallelism, else at the partition; the inputs of a step follow.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from smp import _core
from smp.modules import conversion


def home_of(module: nn.Module, local_rank: int) -> torch.device | None:
    """The device that this rank computes on; None: the host has no accelerator in use.

    Where the module already is on one, there.  Else the current device; the first one is what
    nobody has chosen, and then it is the ``local_rank``-th, which becomes the current one.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return None
    for tensor in module.parameters():
        if tensor.device.type == kind.type:
            return tensor.device
    index = torch.accelerator.current_device_index()
    if index == 0:
        index = local_rank % torch.accelerator.device_count()
        torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


def mover(device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function of a tensor: the same there, if it is on the CPU; else the tensor itself."""
    return lambda tensor: tensor.to(device) if tensor.device.type == "cpu" else tensor


@contextmanager
def keeping_parameters(device: torch.device) -> Iterator[None]:
    """In the block ``module._apply`` leaves each parameter the object that it is.

    It does anyhow for a CUDA device; for some kinds torch makes new parameters by default,
    which an optimizer made before would not know.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    there = torch.empty(0, device=device)
    if not torch._has_compatible_shallow_copy_type(torch.empty(0, device="cpu"), there):
        torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def move(module: nn.Module, device: torch.device, local: set[nn.Module] | None = None) -> None:
    """Move what of a model is on the CPU.

    Args:
        local: the modules that are on this rank, once the model has been partitioned.
    """
    with keeping_parameters(device):
        if local is None:
            module._apply(mover(device))
        else:
            conversion.convert(module, mover(device), local)


def move_back(module: nn.Module, device: torch.device) -> None:
    """Move a model that may be there in part to the CPU."""
    with keeping_parameters(device):
        module._apply(lambda tensor: tensor.cpu())


def trim(device: torch.device) -> None:
    """Give the device back memory that no tensor uses."""
    module = torch.get_device_module(device)
    if hasattr(module, "empty_cache"):
        module.empty_cache()


def empty_cache() -> None:
    """Give back memory that this rank keeps for later and does not use now.

    The accelerator gets what ``torch.cuda.empty_cache()`` gives, the system the free pages of
    the heap, which ``smp.init`` has it keep.  Tensors stay as they are; the next step takes
    what it needs again, which costs time.  Of this rank alone, at any time.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is not None:
        trim(kind)
    _core.trim_heap()
