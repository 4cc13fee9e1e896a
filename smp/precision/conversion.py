"""Models in half precision (``bf16``, ``fp16``): their tensors, arguments and results.

The model's parameters and buffers become half; its arguments are cast on the way in, its
results back to float32 on the way out.  Gradients of half parameters add up in float32
(``grad_dtype``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from smp.modules.live_models import LiveModel
from smp.modules.remote_tensors import RemoteTensor
from smp.runtime import failures, microbatches
from smp.slicing.split_parameters import among_slices

if TYPE_CHECKING:
    from smp.job.config import Config

HALF = (torch.bfloat16, torch.float16)
_WIDE = (torch.float32, torch.float64)
HAS_MASTER = "_smp_has_master"  # in a parameter's __dict__: optimizers update a float32 twin


def dtype_of_models(cfg: "Config") -> torch.dtype | None:
    """The half dtype of all models; None: each model keeps its own."""
    return torch.bfloat16 if cfg.bf16 else torch.float16 if cfg.fp16 else None


def convert(module: nn.Module, cfg: "Config") -> None:
    """Make the floating parameters and buffers half; parameters stay the same objects.

    Integers, complex numbers and float8 stay.  ``fp16_params`` alone makes them float16; all
    else is the script's then.
    """
    dtype = dtype_of_models(cfg) or (torch.float16 if cfg.fp16_params else None)
    if dtype is None:
        return
    kinds = (*HALF, *_WIDE)
    module._apply(lambda tensor: tensor.to(dtype) if tensor.dtype in kinds else tensor)


@among_slices
def accumulate_in_float32(model: LiveModel, cfg: "Config") -> None:
    """Have gradients of this rank's half parameters add up in float32, from now on.

    Copies of a parameter, and exchanges of the tensor behind it, lose this.
    """
    converted = dtype_of_models(cfg) is not None
    if not converted and not cfg._fp32_grad_accumulation:
        return
    for parameter in model.local_parameters():
        if parameter.dtype not in HALF or isinstance(parameter, RemoteTensor):
            continue
        if parameter.grad_dtype is not torch.float32:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = torch.float32
            if gradient is not None:
                parameter.grad = gradient.float()
        if converted:
            setattr(parameter, HAS_MASTER, True)


def call(
    model: LiveModel,
    dtype: torch.dtype,
    forward: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Call a half model: floating arguments cast to half, half results to float32."""
    narrow = _Cast(lambda t: t.to(dtype) if t.dtype in _WIDE else t)
    widen = _Cast(lambda t: t.float() if t.dtype is dtype else t)
    given = [narrow.of(one) for one in args]
    named = {name: narrow.of(one) for name, one in kwargs.items()}
    with _explained(model, dtype):
        return widen.of(forward(*given, **named))


class _Cast:
    """A function of tensors, for all tensors in values; a repeated tensor stays one."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        self._changed = False

    def of(self, value: Any) -> Any:
        """The value with cast tensors; else the same object: a model may change it."""
        self._changed = False
        result = microbatches.map_tensors(value, self._once)
        return result if self._changed else value

    def _once(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, self._function(tensor)
        cast = self._made[id(tensor)][1]
        self._changed = self._changed or cast is not tensor
        return cast


@contextmanager
def _explained(model: LiveModel, dtype: torch.dtype) -> Iterator[None]:
    """Have an error about the half dtype name the module, and the parameter behind it."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        name = str(dtype).removeprefix("torch.")
        spellings = {"bfloat16": "BFloat16", "float16": "Half"}
        if spellings[name] in str(error) or name in str(error):
            path = failures.module_of(error, [model])
            where = "the model" if not path else f"module '{path}'"
            key = "bf16" if dtype is torch.bfloat16 else "fp16"
            error.add_note(
                f"smp: {where} was called in half precision ({key}=True: parameters, buffers "
                f"and arguments are {name}).  If it makes float32 tensors, make them with the "
                f"dtype of its input; if an operator has no {name} kernel for this device, "
                f"leave out {key} and use torch.autocast"
            )
        raise
