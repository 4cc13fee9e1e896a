"""Parameters cut in place.

Such a parameter is this rank's slice, and the object known to optimizers and scripts.  As a
slice it serves its module's call, smp and PyTorch's optimizers.  An operator of the script's
own code has no slice in mind: ``smp.tensor_parallel.script_uses`` gives the operator its
tensors.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from smp.marks import PART, PATH_OF_PARAMETER, set_class
from smp.pytorch import patches
from smp.pytorch.compiled_code import not_traced
from smp.slicing.slices import slices_of, whole_shape

INIT = "torch.nn.init"
_NOT_SCRIPTS = ("smp.", "torch.optim.", "torch._dynamo.")


_Function = TypeVar("_Function", bound=Callable[..., Any])


class Service(NamedTuple):
    """The tensors for operators of the script's own code.

    Attributes:
        of_slice: the result of an operator; NotImplemented: it is to have the whole.
        whole: from a slice.
    """

    of_slice: Callable[[Any, tuple, dict[str, Any], bool], Any]
    whole: Callable[["SplitTensor"], Tensor]


_service: list[Service] = []


def serve(service: Service) -> None:
    """Have scripts served so, from now on."""
    _service[:] = [service]


def whole_of(part: "SplitTensor") -> Tensor:
    """All of it, on each tp_rank.  Collective over the TP_GROUP."""
    return _service[0].whole(part)


class _InThisThread(threading.local):
    called: nn.Module | None = None


_own = _InThisThread()


@contextlib.contextmanager
def own_call(module: nn.Module) -> Iterator[None]:
    """In the block the module's own parameters are this rank's slices."""
    before, _own.called = _own.called, module
    try:
        yield
    finally:
        _own.called = before


# The same of a slice and of the whole: asked for often, by optimizers and reductions.
_ALIKE = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "device",
        "dtype",
        "grad",
        "grad_fn",
        "is_cpu",
        "is_cuda",
        "is_leaf",
        "is_meta",
        "is_sparse",
        "layout",
        "ndim",
        "requires_grad",
    )
) | {Tensor.__hash__, Tensor.is_complex, torch.is_complex, Tensor.is_floating_point}


def among_slices(function: _Function) -> _Function:
    """Decorate a function of smp's own: in it each slice is a plain tensor, and as fast."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


class SplitTensor(Tensor):
    """This rank's slice of a tensor; only its owner takes the slice as such."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ALIKE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        user = "" if _are_own(args) else _user()
        with torch._C.DisableTorchFunctionSubclass():
            if not user:
                return func(*args, **kwargs)
            result = _service[0].of_slice(func, args, kwargs, user == INIT)
        if result is not NotImplemented:
            return result
        return _of_whole(func, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if _user():
            refuse(self, "pickling")
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        refuse(self, "copying")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            shown = repr(self.detach().as_subclass(Tensor))
        slices = slices_of(self)
        of = "" if slices is None else f" of {slices.size} in axis {slices.axis}"
        return f"{type(self).__name__}: this rank's part{of}:\n{shown}"


class GatheredView(Tensor):
    """A view of a gathered whole.  A write there would be lost."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        viewed: list[GatheredView] = []
        tree_map_only(GatheredView, viewed.append, (args, kwargs))
        name = getattr(func, "__name__", str(func))
        with torch._C.DisableTorchFunctionSubclass():
            if writes(name):
                refuse(getattr(viewed[0], PART), name, together=True)
            result = func(*args, **(kwargs or {}))
            return _read_only(result, viewed[0], getattr(viewed[0], PART))


class SplitParameter(SplitTensor, nn.Parameter):
    """A parameter cut by `keep_slice`."""


# Optimizers compute over lists of exactly these classes at once.
def guard(module: nn.Module, path: str) -> None:
    """Have all cut parameters in a module be such; they stay the same objects.

    A slice of one rank is the whole.

    Args:
        module: split in place, or made so by the script.
        path: of it.
    """
    patches.foreach_types.while_alive(module, SplitParameter)
    for parameter in module.parameters():
        slices = slices_of(parameter)
        is_cut = slices is not None and len(slices.ranges) > 1
        if is_cut and type(parameter) is nn.Parameter:
            set_class(parameter, SplitParameter)
    rename(module, path)


def rename(module: nn.Module, path: str) -> None:
    """Have errors name the guarded parameters of a module by its path."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, SplitParameter):
            setattr(parameter, PATH_OF_PARAMETER, f"{path}.{name}" if path else name)


def become_like(twin: nn.Parameter, parameter: Tensor) -> None:
    """Cut a parameter's stand-in like the parameter."""
    if isinstance(parameter, SplitParameter):
        set_class(twin, SplitParameter)
        twin.__dict__.update(parameter.__dict__)


def is_plain(parameter: Tensor, kind: type | None = None) -> bool:
    """Whether the parameter is of no class of a user's or another library's.

    Args:
        kind: its class, where it has another one for a time.
    """
    return (kind or type(parameter)) in (nn.Parameter, SplitParameter)


def writes(name: str) -> bool:
    """Whether an operator of that name changes its first argument."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or name.startswith("__i") and name != "__iter__"


def _of_whole(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    gathered: list[tuple[Tensor, SplitTensor]] = []

    def whole(part: SplitTensor) -> Tensor:
        gathered.append((whole_of(part), part))
        return gathered[-1][0]

    if getattr(func, "__name__", "") == "__iter__":
        return iter(_of_whole(Tensor.unbind, args, kwargs))
    args, kwargs = tree_map_only(SplitTensor, whole, (args, kwargs))
    result = func(*args, **kwargs)
    for value, part in gathered:
        result = _read_only(result, value, part)
    return result


def _read_only(result: Any, of: Tensor, part: SplitTensor) -> Any:
    """Have views of a tensor refuse writes, unless autograd sees them."""
    if of.is_meta or of.requires_grad:
        return result
    memory = of.untyped_storage().data_ptr()

    def seen(value: Tensor) -> Tensor:
        if value.layout is not torch.strided or value.untyped_storage().data_ptr() != memory:
            return value
        view = value.as_subclass(GatheredView)
        setattr(view, PART, part)
        return view

    return tree_map_only(Tensor, seen, result)


# ------------------------------------------------------------------------- the user at work


def _are_own(args: tuple) -> bool:
    """Whether the module under way uses its own parameters, and no others'."""
    module = _own.called
    if module is None:
        return False
    own = {id(parameter) for parameter in module._parameters.values()}
    return all(id(value) in own for value in args if isinstance(value, SplitTensor))


@not_traced("an operator that is given a weight that smp splits over the TP_GROUP")
def _user() -> str:
    """The Python module of the calling code; "" for smp and PyTorch's own bookkeeping."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals is globals():
        frame = frame.f_back  # type: ignore[assignment]
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == "smp" or name.startswith(_NOT_SCRIPTS):
            return ""
        if name == "torch.nn.modules.module":
            is_call = frame.f_code.co_name in ("_call_impl", "_wrapped_call_impl")
            return name if is_call else ""
        if name == INIT or not name.startswith("torch"):
            return name
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def refuse(part: Tensor, name: str, together: bool = False) -> Any:
    """Refuse an operator without service.

    Args:
        name: of it.
        together: in a call of the model, or a step.

    Raises:
        RuntimeError: the script would take this rank's slice for the whole; the text names the
            slice.
    """
    path = getattr(part, PATH_OF_PARAMETER, "a parameter")
    module = path.rpartition(".")[0]
    frame = sys._getframe(1)
    while frame is not None:  # of a function of initialization, rather than an operator in it
        if frame.f_globals.get("__name__") == INIT:
            name = frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    elsewhere = (
        "change it outside of steps, by each element"
        if together
        else "use it in a step or a call of the model, where it is gathered, or take "
        "model.state_dict(), which is whole"
    )
    with torch._C.DisableTorchFunctionSubclass():
        raise RuntimeError(
            f"smp: {name} needs all of '{path}', of shape {whole_shape(part)}, and it is split "
            f"over the TP_GROUP: this rank has {list(part.shape)}: {elsewhere}, or leave its "
            f"module whole before smp.DistributedModel: smp.set_tensor_parallelism('{module}', "
            "False), or torch.nn's class in the place of smp.nn's"
        )
