"""``model.to(...)``, ``half()``, ``cpu()`` and the like after the partition.

Each rank converts its own tensors, and notes the new dtype and device of the others': all ranks
see a model of the same dtypes.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from smp.marks import set_class
from smp.modules import remote_tensors
from smp.slicing import parameter_marks


def convert(
    module: nn.Module, function: Callable[[Tensor], Tensor], local: set[nn.Module]
) -> None:
    """The effect of ``module._apply(function)`` on the plain module.

    Args:
        local: the modules on this rank.
    """
    if all(inside in local for inside in module.modules()):
        module._apply(function)  # its class may have an idea of its own
        return
    for child in module.children():
        convert(child, function, local)
    if module in local:
        module._apply(function, recurse=False)
        return
    convert_elsewhere(module, function, recurse=False)


def convert_elsewhere(
    module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """``module._apply`` of a module on another rank.  The script may convert such a module, in
    a wrapped one, without its `DistributedModel`.
    """
    if recurse:
        for child in module.children():
            child._apply(function)
    with parameter_marks.kept(module):
        _convert_own(module, function)
    return module


def _convert_own(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    for parameter in module._parameters.values():
        if isinstance(parameter, remote_tensors.RemoteParameter):
            like = _converted_kind(parameter, function)
            remote_tensors.convert(parameter, like.dtype, like.device)
    for name, buffer in module._buffers.items():
        if buffer is None:
            continue
        with torch._C.DisableTorchFunctionSubclass():
            if buffer.is_meta:
                converted = buffer.to(_converted_kind(buffer, function).dtype)
            else:
                converted = function(buffer)
            if isinstance(buffer, remote_tensors.RemoteBuffer):
                give_data(buffer, converted)  # it goes to its owner as it is now
            else:
                module._buffers[name] = converted


def give_data(tensor: Tensor, data: Tensor) -> None:
    """Give a parameter or buffer the data, on any device; it stays the same object."""
    if torch._has_compatible_shallow_copy_type(tensor, data):
        tensor.data = data
        return
    is_parameter = isinstance(tensor, nn.Parameter)
    twin = nn.Parameter(data, tensor.requires_grad) if is_parameter else data
    set_class(twin, tensor.__class__)
    twin.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, twin)


def _converted_kind(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """An empty tensor of the conversion's dtype, on its device."""
    device = "cpu" if tensor.is_meta else tensor.device
    return function(torch.empty([0] * tensor.dim(), dtype=tensor.dtype, device=device))
