"""The place of this rank's models: its accelerator, if the host has one.

A script leaves its model on the CPU.  This rank's part moves once known: at once without
pipeline parallelism, else at the partition; the inputs of a step follow.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from smp import _core
from smp.modules import conversion
from smp.slicing import parameter_marks


def home_of(module: nn.Module, local_rank: int) -> torch.device | None:
    """The device of this rank's computations; None: the host has no accelerator in use.

    A module already on an accelerator stays there.  Else the device is the current one.  The
    first device is no choice of the script's: the ``local_rank``-th takes its place, and
    becomes the current one.
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
    """A function of a tensor: a copy there, if on the CPU; else the tensor itself."""
    return lambda tensor: tensor.to(device) if tensor.device.type == "cpu" else tensor


@contextmanager
def keeping_parameters(device: torch.device) -> Iterator[None]:
    """In the block ``module._apply`` keeps each parameter's object.

    For a CUDA device it does so anyhow.  For some kinds torch makes new parameters by default,
    unknown to an optimizer made before.
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
    """Move a model's tensors from the CPU.

    Args:
        local: the modules on this rank, once the model has been partitioned.
    """
    with keeping_parameters(device):
        if local is None:
            with ExitStack() as marks:  # of modules split by their own constructors
                for one in module.modules():
                    marks.enter_context(parameter_marks.kept(one))
                module._apply(mover(device))
        else:
            conversion.convert(module, mover(device), local)


def move_back(module: nn.Module, device: torch.device) -> None:
    """Move a model, perhaps in part on the device, to the CPU."""
    with keeping_parameters(device):
        module._apply(lambda tensor: tensor.cpu())


def trim(device: torch.device) -> None:
    """Give the device back its unused memory."""
    module = torch.get_device_module(device)
    if hasattr(module, "empty_cache"):
        module.empty_cache()


def empty_cache() -> None:
    """Give back memory kept by this rank for later and not in use now.

    The accelerator gets the memory of ``torch.cuda.empty_cache()``, the system the free pages
    of the heap, kept since ``smp.init``.  Tensors stay as they are; the next step takes its
    memory again, at a cost of time.  The call is this rank's alone, at any time.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is not None:
        trim(kind)
    _core.trim_heap()
