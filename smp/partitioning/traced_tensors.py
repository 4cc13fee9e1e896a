"""The tensors of a traced run in place of the model's own."""

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smp import marks
from smp.modules.remote_tensors import RemoteBuffer, RemoteTensor
from smp.slicing import split_parameters

_LARGE_BYTES = 1 << 20  # the least size worth a mapping of its own
# Linux refuses at once more memory than the machine has, without this flag.  Python may not
# name it; the number is Linux's for most processors.  [asm-generic/mman.h]
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def as_meta(value: Any) -> Any:
    """A meta tensor like ``value``, also in a list; other values stay."""
    if isinstance(value, Tensor) and not value.is_meta:
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device="meta"
        )
    if type(value) in (list, tuple):
        return type(value)(as_meta(v) for v in value)
    return value


def meta_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """A meta parameter like the given one."""
    twin = nn.Parameter(as_meta(parameter.detach()), requires_grad=parameter.requires_grad)
    split_parameters.become_like(twin, parameter)
    return twin


@contextlib.contextmanager
def on_zeros(roots: Sequence[nn.Module]) -> Iterator[None]:
    """In the block the models have zeros for their meta tensors, and for those of other ranks.

    A model larger than memory can be run on them.  A buffer of another rank's has its last
    value here.

    Raises:
        RuntimeError: there is no address space for them.
    """
    zeros: dict[int, Tensor] = {}  # by id of the replaced tensor
    places = [
        (module, held, name, tensor)
        for module in {id(m): m for root in roots for m in root.modules()}.values()
        for held in (module._parameters, module._buffers, module.__dict__)
        for name, tensor in held.items()
        if isinstance(tensor, RemoteTensor) or (isinstance(tensor, Tensor) and tensor.is_meta)
    ]
    for _, _, _, tensor in places:
        if id(tensor) not in zeros:
            made = _older(tensor) if isinstance(tensor, RemoteBuffer) else _zeros(tensor)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
                split_parameters.become_like(made, tensor)
            zeros[id(tensor)] = made

    def put(module: nn.Module, held: dict, name: str, tensor: Tensor) -> None:
        if held is module.__dict__:  # also a parameter: setattr would register it
            held[name] = tensor
        else:
            setattr(module, name, tensor)  # nn.LSTM keeps a list too

    for module, held, name, tensor in places:
        put(module, held, name, zeros[id(tensor)])
    try:
        yield
    finally:
        for place in places:
            put(*place)


@contextlib.contextmanager
def as_in_one_process(roots: Sequence[nn.Module]) -> Iterator[None]:
    """In the block partitioned models run here, as they did before.

    The run of a step function traced for other models may call them, too.
    """
    ours = [
        (module, type(module), getattr(type(module), marks.ORIGINAL_CLASS, None))
        for module in {id(m): m for root in roots for m in root.modules()}.values()
    ]
    ours = [each for each in ours if each[2] is not None]
    for module, _, original in ours:
        marks.set_class_itself(module, original)
    try:
        with on_zeros(roots):
            yield
    finally:
        for module, cls, _ in ours:
            marks.set_class_itself(module, cls)


def _older(buffer: RemoteBuffer) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return buffer.detach().as_subclass(Tensor)


def _zeros(tensor: Tensor) -> Tensor:
    """Zeros of its shape and dtype; their memory exists from the first write on.

    Until then all its pages are the system's one page of zeros.  torch.zeros writes.

    Raises:
        RuntimeError: no address space.
    """
    if tensor.nbytes < _LARGE_BYTES:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, tensor.nbytes, flags=flags)
    except OSError as error:
        raise RuntimeError(
            f"smp: no address space for zeros in the place of a tensor of {tensor.nbytes} "
            f"bytes ({error}): raise the limit of `ulimit -v` or vm.overcommit_memory, give "
            "the model its values before its first step, or set skip_tracing"
        ) from error
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
