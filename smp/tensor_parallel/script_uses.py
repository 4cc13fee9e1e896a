"""The script's own operators on split parameters.

- In a call of the model, or in a step, an operator gets the whole, by a gather that counts in
  backward.
- Elsewhere the tp_ranks need not come together.  An operator for each element by itself acts on
  the slice, random values are drawn for the whole, and all else is refused.
"""

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from smp import _core
from smp.marks import GATHERS, HELD, PATH, PATH_OF_PARAMETER
from smp.runtime import collective_chain
from smp.slicing import split_parameters
from smp.slicing.slices import (
    Slices,
    is_scaled_by_module,
    mark,
    slices_of,
    whole_shape,
)
from smp.slicing.split_parameters import INIT, SplitTensor, refuse
from smp.state_mod import state
from smp.tensor_parallel import group, primitives

# Reads of the memory of a slice, or of the parameter as an object.
_METADATA = {
    "__get__", "__set__", "__hash__", "__format__", "__repr__", "backward", "data_ptr", "dim",
    "element_size", "empty_like", "full_like", "get_device", "is_complex", "is_contiguous",
    "is_floating_point", "is_pinned", "is_shared", "is_signed", "ndimension", "new_empty",
    "new_full", "new_ones", "new_tensor", "new_zeros", "ones_like",
    "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "storage_offset",
    "stride", "untyped_storage", "zeros_like",
}  # fmt: skip
_SIZES = {"__len__", "nelement", "numel", "shape", "size"}
_VIEWS = {"H", "T", "imag", "mH", "mT", "real"}  # attributes

# Names without underscores, for operators in place and reflected ones, too.
_BY_ELEMENT = {
    "abs", "add", "addcdiv", "addcmul", "bfloat16", "clamp", "clampmax", "clampmin", "clone",
    "contiguous", "copy", "cpu", "cuda", "data", "detach", "div", "double", "eq", "erfinv",
    "exp", "fill", "float", "ge", "gt", "half", "iadd", "imul", "isfinite", "isinf", "isnan",
    "isub", "itruediv", "le", "lerp", "log", "lt", "maskedfill", "maximum", "minimum", "mul",
    "ne", "neg", "pow", "radd", "reciprocal", "rmul", "rsqrt", "rsub", "rtruediv", "sign",
    "sqrt", "square", "sub", "to", "truediv", "truedivide", "type", "zero",
}  # fmt: skip
_DRAW = {
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_",
}  # fmt: skip
_DRAW_ALIKE = {"rand_like", "randint_like", "randn_like"}


def gathers_of(model: nn.Module) -> dict[str, int]:
    """By path of a split weight, the number of its gathers for the script's own code."""
    counts = ((p, getattr(p, GATHERS, 0)) for p in model.parameters())
    return {getattr(p, PATH_OF_PARAMETER): count for p, count in counts if count}


def whole_among(values: Any) -> Any:
    """The arguments of a call, with the whole in the place of each such parameter."""
    if any(isinstance(value, SplitTensor) for value in values):
        return tuple(_whole(v) if isinstance(v, SplitTensor) else v for v in values)
    return values


def called_with_slices(
    module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """A call of a split module, where ``torch.func.functional_call`` may have given it wholes.

    Raises:
        NotImplementedError: it has, on ranks with other samples: each may have given another
            whole.
    """
    given = _wholes_in(module)
    if not given:
        return forward(module, *args, **kwargs)
    if not group.same_samples():
        name, whole = next(iter(given.items()))
        path = module.__dict__.get(PATH, type(module).__name__)
        raise NotImplementedError(
            f"smp: '{path}' is split over the TP_GROUP, and was called with a tensor of "
            f"shape {list(whole.shape)} in the place of its '{name}', on different "
            f"samples: leave it whole, smp.set_tensor_parallelism('{path}', False)"
        )
    slices = module.__dict__[HELD]
    try:
        for name, whole in given.items():
            cut = slices[name]
            lengths = [cut.local_size(rank) for rank in range(group.size())]
            part = primitives.own_part(cut.by_rank(whole), cut.axis, lengths)
            module._parameters[name] = part  # type: ignore[assignment]
        return forward(module, *args, **kwargs)
    finally:
        module._parameters.update(given)


def _wholes_in(module: nn.Module) -> dict[str, nn.Parameter]:
    found: dict[str, nn.Parameter] = {}
    if group.size() == 1:
        return found
    for name, slices in module.__dict__.get(HELD, {}).items():
        value = module._parameters.get(name)
        if value is None or isinstance(value, SplitTensor):
            continue
        if value.size(slices.axis) == slices.size:
            found[name] = value
    return found


def _come_together() -> bool:
    """Whether the tp_ranks run the same code now: a call of the model, or a step."""
    rt = state.runtime
    if rt is None:
        return False
    return collective_chain.is_open() or rt.step.is_under_way or _core.current() is not None


def _of_slice(func: Any, args: tuple, kwargs: dict[str, Any], initializes: bool) -> Any:
    """The result of a script's function; NotImplemented: it is for the whole value.

    Raises:
        RuntimeError: no result is to be had.
    """
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        attribute = getattr(func.__self__, "__name__", name)
        if name == "__set__" and attribute == "data":
            return _set_data(args[0], args[1])
        if attribute in _VIEWS or attribute in _SIZES or attribute == "data":
            name = attribute
    together = _come_together() and not _hook.under_way
    first = args[0] if args else kwargs.get("tensor")  # functions of torch.nn.init
    first = first if isinstance(first, SplitTensor) else None
    if name in _SIZES and first is not None:
        if not (together or initializes):
            return func(*args, **kwargs)
        whole = torch.empty(whole_shape(first), device="meta")
        return func(whole, *args[1:], **kwargs)
    if name in _METADATA:
        return func(*args, **kwargs)
    if name == "register_hook" and isinstance(first, nn.Parameter):
        return func(first, _on_slices(first, *args[1:], **kwargs))
    if first is not None:
        if name in _DRAW or getattr(func, "__module__", "") == INIT:
            return _draw(func, first, args[1:], kwargs)
        if name in _DRAW_ALIKE:
            return _slice_like(first, func(_empty_whole(first), *args[1:], **kwargs))
        if initializes and name == "view_as":
            return _slice_like(first, None)
    writes = split_parameters.writes(name)
    is_by_element = name.strip("_").replace("_", "") in _BY_ELEMENT
    if is_by_element or name.startswith("_foreach_") and "norm" not in name:
        stays = not together or name in ("data", "detach")
        if stays or writes and not torch.is_grad_enabled():
            return _by_element(func, name, args, kwargs)
    if not together or writes or "out" in kwargs:
        refuse(_first_of(args, kwargs), name, together)
    return NotImplemented


class _Hook(threading.local):
    under_way = False


_hook = _Hook()


def _on_slices(part: SplitTensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """A script's hook on gradients: autograd calls it where the ranks do not come together."""
    slices = slices_of(part)
    assert slices is not None

    @functools.wraps(hook)
    def called(gradient: Tensor) -> Tensor | None:
        _hook.under_way, before = True, _hook.under_way
        try:
            result = hook(_marked(gradient, part, slices))
        finally:
            _hook.under_way = before
        return result.as_subclass(Tensor) if isinstance(result, SplitTensor) else result

    return called


def _first_of(args: tuple, kwargs: dict[str, Any]) -> SplitTensor:
    found: list[SplitTensor] = []
    tree_map_only(SplitTensor, found.append, (args, kwargs))
    return found[0]


def _whole(part: SplitTensor) -> Tensor:
    """All of it, on each tp_rank.  Collective over the TP_GROUP."""
    slices = slices_of(part)
    with torch._C.DisableTorchFunctionSubclass():
        if slices is None:
            return part.as_subclass(Tensor)
        _refuse_in_function(part)
        path = getattr(part, PATH_OF_PARAMETER)
        if isinstance(part, nn.Parameter) and not part.is_meta:
            setattr(part, GATHERS, getattr(part, GATHERS, 0) + 1)
        before = group.call_of(path)
        lengths = [slices.local_size(rank) for rank in range(group.size())]
        try:
            if group.same_samples():
                joined = primitives.gather_alike(part, slices.axis, lengths)
            else:
                joined = primitives.gather(part, slices.axis, lengths)
        finally:
            group.call_of(before)
        if joined.requires_grad and is_scaled_by_module(part):
            factor = 1.0 / group.size()
            joined.register_hook(lambda gradient: gradient * factor)
        return slices.in_order(joined)


_APPLY = "torch.autograd.function", "apply"


def _refuse_in_function(part: Tensor) -> None:
    """Refuse a parameter given to an autograd function: the gradient would be the whole's."""
    if torch.is_grad_enabled() or not part.requires_grad:
        return
    frame = sys._getframe(1)
    while frame is not None:
        code, values = frame.f_code, frame.f_locals
        if (frame.f_globals.get("__name__"), code.co_name) == _APPLY:
            cls, given = values["cls"], values.get("args", ())
        elif (
            code.co_name == "forward"
            and code.co_varnames
            and isinstance(ctx := values.get(code.co_varnames[0]), torch._C._FunctionBase)
        ):  # PyTorch 2.15 applies without a frame
            cls, given = getattr(ctx, "_forward_cls", type(ctx)), tuple(values.values())
        else:
            given = ()
        if any(value is part for value in given):
            refuse(part, f"{cls.__name__}.apply", together=True)
        frame = frame.f_back  # type: ignore[assignment]


def _slice_like(part: SplitTensor, whole: Tensor | None) -> Tensor:
    """This rank's slice of a tensor, or an alias of the part, marked as one."""
    slices = slices_of(part)
    assert slices is not None
    value = part.detach() if whole is None else slices.take(whole, group.rank())
    return _marked(value, part, slices)


def _marked(value: Tensor, like: SplitTensor, slices: Slices) -> SplitTensor:
    out = value.as_subclass(SplitTensor)
    mark(out, slices, scaled_batch=True)
    setattr(out, PATH_OF_PARAMETER, getattr(like, PATH_OF_PARAMETER))
    return out


def _empty_whole(part: SplitTensor) -> Tensor:
    return torch.empty(whole_shape(part), dtype=part.dtype, device=part.device)


def _draw(func: Any, part: SplitTensor, rest: tuple, kwargs: dict[str, Any]) -> Any:
    """Values as drawn for the whole, from this rank's generator."""
    slices = slices_of(part)
    assert slices is not None
    whole = _empty_whole(part)
    kwargs = {k: v for k, v in kwargs.items() if v is not part}  # tensor=
    func(whole, *rest, **kwargs)
    initializes = getattr(func, "__module__", "") == INIT  # without autograd, as torch's do
    with torch.set_grad_enabled(torch.is_grad_enabled() and not initializes):
        part.copy_(slices.take(whole, group.rank()))
    return part


def _set_data(part: SplitTensor, data: Tensor) -> None:
    part.data = _operand(part, data, "data")  # type: ignore[assignment]


def _by_element(func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Act on each element of slices alike; operands of the whole's shape are cut.

    Raises:
        RuntimeError: an operand is neither.
    """
    part = _first_of(args, kwargs)
    slices = slices_of(part)
    assert slices is not None
    if name.startswith("_foreach_"):
        args = tuple(_operands_of_lists(part, values, name, args[0]) for values in args)
    else:
        args, kwargs = tree_map_only(
            Tensor, lambda value: _operand(part, value, name), (args, kwargs)
        )
    out = func(*args, **kwargs)
    if type(out) is Tensor and out.shape == part.shape:
        return _marked(out, part, slices)
    return out


def _operands_of_lists(part: SplitTensor, values: Any, name: str, first: Any) -> Any:
    if not isinstance(values, list | tuple) or not isinstance(first, list | tuple):
        return values
    pairs = zip(values, first, strict=True)
    return [
        _operand(like, value, name)
        if isinstance(value, Tensor) and isinstance(like, SplitTensor)
        else value
        for value, like in pairs
    ]


def _operand(part: SplitTensor, value: Tensor, name: str) -> Tensor:
    slices = slices_of(part)
    assert slices is not None
    if isinstance(value, SplitTensor):
        if slices_of(value) != slices:
            refuse(part, name)
    elif list(value.shape) == whole_shape(part):
        return slices.take(value, group.rank())
    elif value.dim() and value.shape != part.shape:
        refuse(part, name)
    return value


split_parameters.serve(split_parameters.Service(_of_slice, _whole))
