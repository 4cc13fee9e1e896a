"""Gradients differentiated once more (``create_graph``) are refused for split modules.

A backward with moves of tensors, or with the core's kernels, leaves no graph behind it.  A
second derivative through it would silently lack that part.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def refused(backward: Callable, of_values: bool = False) -> Callable:
    """A function's backward with results that raise when differentiated in a graph.

    As torch's ``once_differentiable``, but on the way to any tensor behind the results.  A
    tensor handed on unchanged stays so.

    Args:
        of_values: the results depend on saved tensors, not on the gradients alone.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *gradients: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        of = (*gradients, *(ctx.saved_tensors if of_values else ()))
        sources = [t for t in of if t is not None and t.requires_grad]
        with torch.no_grad():
            out = backward(ctx, *gradients)
        call = getattr(ctx, "call", None)
        where = "a kernel of smp.nn"
        if call is not None:
            where = f"module '{call.path}', which is split over the TP_GROUP"

        def marked(part: Any) -> Any:
            handed_on = any(part is gradient for gradient in gradients)
            if handed_on or not sources or not isinstance(part, Tensor):
                return part
            return _Refuse.apply(where, part, *sources)

        return tuple(map(marked, out)) if isinstance(out, tuple) else marked(out)

    return refusing


refused_of_values = functools.partial(refused, of_values=True)


class _Refuse(Function):
    @staticmethod
    def forward(ctx: Any, where: str, part: Tensor, *sources: Tensor) -> Tensor:
        ctx.where = where
        return part.detach()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"smp: a second derivative (create_graph=True) through {ctx.where}: it has the "
            "first one alone; leave the modules between the two whole, "
            "smp.set_tensor_parallelism(module, False)"
        )
