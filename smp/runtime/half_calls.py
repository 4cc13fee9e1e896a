"""Calls of a model in half precision: its arguments and results are cast."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from smp.modules.live_models import LiveModel
from smp.precision.conversion import WIDE
from smp.runtime import failures, microbatches


def call(
    model: LiveModel,
    dtype: torch.dtype,
    forward: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Call a half model: floating arguments cast to half, half results to float32."""
    narrow = _Cast(lambda t: t.to(dtype) if t.dtype in WIDE else t)
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
