"""Tensors of a partitioned model with their data on another rank.

A parameter stays the object known to optimizers and user code, with its shape, dtype, device
and ``requires_grad``.  It becomes a wrapper subclass of torch's, without memory.  Operators
reach it only by way of this file, from any caller.
"""

import contextlib
import copy
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from smp import _core
from smp.marks import HOME, set_class
from smp.modules import travelling_changes
from smp.pytorch import call_warnings

# Harmless reads of a parameter with its data on another rank.
_HARMLESS = {
    "__get__",
    "__set__",
    "__hash__",
    "size",
    "dim",
    "numel",
    "nelement",
    "stride",
    "is_floating_point",
    "is_complex",
    "element_size",
    "ndimension",
    "requires_grad_",
    "register_hook",
    "register_post_accumulate_grad_hook",
}

# Attributes in the form of views of the data.
_VIEWS = {"T", "mT", "H", "mH", "real", "imag"}


class _Loading(threading.local):
    depth = 0


_loading = _Loading()


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """A state dict is loaded in this thread: remote parameters take no data, silently."""
    _loading.depth += 1
    try:
        yield
    finally:
        _loading.depth -= 1


def _remote_in(value: Any) -> "Iterator[RemoteTensor]":
    """The RemoteTensors in an operator's arguments."""
    if isinstance(value, RemoteTensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _remote_in(item)
    elif isinstance(value, dict):
        yield from _remote_in(tuple(value.values()))


class RemoteTensor(Tensor):
    """A parameter's ``data`` on a rank without it: attributes, no operators."""

    _smp_kind = "parameter"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        if name == "copy_" and _loading.depth and isinstance(args[0], RemoteTensor):
            return args[0]
        if name in ("__get__", "__set__"):
            attribute = getattr(func.__self__, "__name__", name)
            if name == "__set__" and attribute == "data":
                if _core.current() is not None:
                    args[0]._smp_refuse("a set of data", written=True)
                return None  # every rank runs the script, and so does its owner's
            if attribute == "data":
                return _data_of(args[0])
            if attribute in _VIEWS:
                name = attribute
        if name in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                required = args[0].requires_grad
                result = func(*args, **(kwargs or {}))
                if isinstance(args[0], nn.Parameter) and name in ("__set__", "requires_grad_"):
                    flag = args[0].requires_grad
                    travelling_changes.note(
                        args[0], travelling_changes.REQUIRES_GRAD, flag, before=required
                    )
            return result
        written = args[0] if args and name in ("__setitem__", "set_") else None
        if args and name.endswith("_") and not name.endswith("__"):
            written = args[0]
        for tensor in _remote_in((args, kwargs or {})):
            tensor._smp_refuse(name, tensor is written)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func, types, args=(), kwargs=None
    ):
        """Refuse operators past ``__torch_function__``, as of ``torch.tensor`` and ``vmap``."""
        refused = next(_remote_in((args, kwargs or {})))
        refused._smp_refuse(func.overloadpacket.__name__, written=False)

    def _smp_refuse(self, name: str, written: bool) -> None:
        """An operator is about to use the data.

        Args:
            written: it changes the tensor in place.

        Raises:
            RuntimeError: this rank does not have the data.
        """
        path, owner = _home_of(self)
        instead = "use it inside its module, or place both together with smp.set_partition"
        if _core.current() is None:
            instead = (
                "outside of steps a rank reads and changes its own: loop over "
                "model.local_named_parameters() or model.local_parameters() on every rank, or "
                "read model.state_dict()"
            )
        raise RuntimeError(
            f"smp: {name} needs the data of {self._smp_kind} '{path}' "
            f"(shape {tuple(self.shape)}), which lives on pp_rank {owner}; {instead}"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        path, owner = _home_of(self)
        kind = type(self).__name__
        return f"{kind}('{path}', shape={tuple(self.shape)}, pp_rank={owner})"

    def __reduce_ex__(self, protocol):
        path, owner = _home_of(self)
        raise RuntimeError(
            f"smp: {self._smp_kind} '{path}' lives on pp_rank {owner} and cannot be pickled "
            "here: save model.state_dict(), which has the whole model, or call "
            "smp.save_checkpoint"
        )


class RemoteParameter(RemoteTensor, nn.Parameter):
    """A parameter with its data on another rank."""

    def __deepcopy__(self, memo):
        raise RuntimeError(
            "smp: a model cannot be copied after its partition; copy the module before it is "
            "wrapped in DistributedModel"
        )


class RemoteBuffer(RemoteTensor):
    """A buffer changed by its module's forward, on another rank than the module's.

    Its memory stays: the script may set the buffer, as on all ranks.
    """

    _smp_kind = "buffer"
    __torch_dispatch__ = torch._C._disabled_torch_dispatch_impl  # type: ignore

    def _smp_refuse(self, name: str, written: bool) -> None:
        """
        Raises:
            RuntimeError: in a step.
        """
        if _core.current() is not None:
            super()._smp_refuse(name, written)
        if not written:
            path, owner = _home_of(self)
            call_warnings.warn_of_attribute(
                path,
                "",
                f"buffer '{path}' is changed by its module, on pp_rank {owner}; its value here "
                "is older (model.state_dict() has the newest)",
            )

    def __deepcopy__(self, memo):
        return copy.deepcopy(self._smp_older("__deepcopy__"), memo)

    def __reduce_ex__(self, protocol):
        return self._smp_older("__reduce_ex__").__reduce_ex__(protocol)

    def _smp_older(self, name: str) -> Tensor:
        """Its value here, for copies of its module."""
        self._smp_refuse(name, written=False)
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


def _home_of(tensor: Tensor) -> tuple[str, int]:
    """The path of a tensor of another rank, and its pp_rank."""
    return getattr(tensor, HOME)


def _data_of(remote: RemoteTensor) -> RemoteTensor:
    """Its ``data``."""
    with torch._C.DisableTorchFunctionSubclass():
        if not isinstance(remote, RemoteBuffer):
            return _wrapper(RemoteTensor, remote, remote.dtype, remote.device)
        data = remote.data
    return mark(data, *_home_of(remote))


def _wrapper(
    cls: type[RemoteTensor], tensor: Tensor, dtype: torch.dtype, device: torch.device
) -> RemoteTensor:
    """A tensor without memory, of the same shape, strides and home."""
    # A step may be one of inference mode; the tensor is for later ones, too.
    with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            tensor.shape,
            tensor.stride(),
            dtype=dtype,
            device=device,
            storage_size=0,
            requires_grad=issubclass(cls, nn.Parameter) and tensor.requires_grad,
        )
    setattr(made, HOME, _home_of(tensor))
    return made


def mark(buffer: Tensor, path: str, owner: int) -> RemoteBuffer:
    """Make it a buffer with the newest value on its owner's rank alone; the same object."""
    set_class(buffer, RemoteBuffer)
    setattr(buffer, HOME, (path, owner))
    return buffer  # type: ignore[return-value]


def forget_data(parameter: nn.Parameter, path: str, owner: int) -> None:
    """Leave the parameter's data to its owner; the same object.

    Other tensors with its memory, such as in a state dict of the script's, keep that.
    """
    parameter.grad = None
    setattr(parameter, HOME, (path, owner))
    convert(parameter, parameter.dtype, parameter.device)


def convert(parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> None:
    """Note the dtype and device of the parameter on its owner's rank."""
    wrapper = _wrapper(RemoteParameter, parameter, dtype, device)
    torch.clear_autocast_cache()  # it has weak references to tensors, not to their objects
    # The parameter keeps its attributes and weak references, and the wrapper takes its memory.
    torch._C._swap_tensor_impl(parameter, wrapper)
    set_class(wrapper, parameter.__class__)
    set_class(parameter, RemoteParameter)
