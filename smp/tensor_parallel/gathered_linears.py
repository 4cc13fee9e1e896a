"""Linears that are cut by their outputs and share a gathered input.

What such a linear needs in its backward is the tokens of all tp_ranks.  They are kept, or
gathered once more: T times less memory for one more collective.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from smp.tensor_parallel import group, primitives
from smp.tensor_parallel.chain import defined, keep_shape, linked, next_token


def gathered_linears(
    x: Tensor, lengths: list[int], linears: Sequence[nn.Linear], keep: bool
) -> list[Tensor]:
    """Each linear of the tokens of all tp_ranks.  Collective over the TP_GROUP.

    Args:
        x: this tp_rank's own tokens, ``[tokens, channels]``.
        lengths: how many tokens each tp_rank has.
        linears: with slices of their outputs.
        keep: the gathered tokens, for the backward; else they are gathered again there.

    Returns:
        for each linear ``[all tokens, its outputs on this tp_rank]``.
    """
    if group.size() == 1 or not torch.is_grad_enabled():
        gathered = primitives.gather(x, 0, lengths)
        return [linear(gathered) for linear in linears]
    parameters = [p for linear in linears for p in (linear.weight, linear.bias)]
    dtype = _computed_in(x)
    out = linked(_GatheredLinears, x, lengths, keep, dtype, *parameters)
    return out if isinstance(out, list) else [out]


def _computed_in(x: Tensor) -> torch.dtype:
    """The dtype of a linear's result: autocast's, where that is on."""
    kind = x.device.type
    on = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if on else x.dtype


class _GatheredLinears(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        token: Tensor | None,
        lengths: list[int],
        keep: bool,
        dtype: torch.dtype,
        *parameters: Tensor | None,
    ) -> tuple:
        ctx.call, ctx.lengths, ctx.keep, ctx.given = group.begin_call(), lengths, keep, x.dtype
        gathered = primitives.all_gather_rows(x.to(dtype), lengths, ctx.call)
        weights, biases = parameters[::2], parameters[1::2]
        out = [
            F.linear(gathered, w.to(dtype), None if b is None else b.to(dtype))  # type: ignore[union-attr]
            for w, b in zip(weights, biases, strict=True)
        ]
        ctx.save_for_backward(gathered if keep else x.to(dtype), *weights)
        keep_shape(ctx, *out)
        return *out, next_token(token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        *given, token = gradients
        kept, *weights = ctx.saved_tensors
        call = ctx.call.backward()
        gathered = kept if ctx.keep else primitives.all_gather_rows(kept, ctx.lengths, call)
        of_x, of_parameters = None, []
        for i, (gradient, weight) in enumerate(zip(given, weights, strict=True)):
            gradient = defined(ctx, gradient, i)
            of_weight = of_bias = None
            if ctx.needs_input_grad[5 + 2 * i]:
                of_weight = (gradient.t() @ gathered).to(weight.dtype)
            if ctx.needs_input_grad[6 + 2 * i]:
                of_bias = gradient.sum(0).to(weight.dtype)
            of_parameters += [of_weight, of_bias]
            part = gradient @ weight.to(gradient.dtype)
            of_x = part if of_x is None else of_x.add_(part)
        assert of_x is not None
        own = primitives.reduce_scatter_rows(of_x, ctx.lengths, call).to(ctx.given)
        return own, token, None, None, None, *of_parameters
