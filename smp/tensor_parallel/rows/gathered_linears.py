"""Linears cut by their outputs, with one gathered input.

The backward of such a linear needs the tokens of all tp_ranks.  They are kept, or gathered once
more: T times less memory for one more collective.

A linear with hooks, on this rank alone maybe, is called as a module: the hooks see its input
and output.  This rank then keeps the gathered tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from smp.runtime.collective_chain import linked, new_token
from smp.tensor_parallel import group, primitives
from smp.tensor_parallel.backward.unused_collectives import defined, keep_shape
from smp.tensor_parallel.rows.autocast import computed_in
from smp.tensor_parallel.rows.second_derivatives import refused, refused_of_values


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
    dtype = computed_in(x)
    if any(map(is_hooked, linears)):
        # The others come to the backward's collectives where a parameter trains, too.
        x = primitives.requiring(x, any(p is not None and p.requires_grad for p in parameters))
        gathered = linked(_GatherBesideLinears, x.to(dtype), lengths, keep)
        return [linear(gathered) for linear in linears]
    out = linked(_GatheredLinears, x, lengths, keep, dtype, *parameters)
    return out if isinstance(out, list) else [out]


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks on its calls."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


class _GatherBesideLinears(Function):
    """A gather, with the collectives of the other ranks' ``_GatheredLinears``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: list[int], keep: bool) -> tuple:
        ctx.call, ctx.lengths = group.begin_call(), lengths
        gathered = primitives.all_gather_slices(x, lengths, ctx.call)
        ctx.save_for_backward(*([] if keep else [x]))
        keep_shape(ctx, gathered)
        return gathered, new_token()

    @staticmethod
    @refused
    def backward(ctx: Any, gradient: Tensor | None, _: Any) -> tuple:  # type: ignore[override]
        call, gradient = ctx.call.backward(), defined(ctx, gradient)
        for x in ctx.saved_tensors:
            primitives.all_gather_slices(x, ctx.lengths, call)  # for the others
        own = primitives.reduce_scatter_slices(gradient, ctx.lengths, call)
        return own, None, None


class _GatheredLinears(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        lengths: list[int],
        keep: bool,
        dtype: torch.dtype,
        *parameters: Tensor | None,
    ) -> tuple:
        ctx.call, ctx.lengths, ctx.keep, ctx.given = group.begin_call(), lengths, keep, x.dtype
        gathered = primitives.all_gather_slices(x.to(dtype), lengths, ctx.call)
        weights, biases = parameters[::2], parameters[1::2]
        out = [
            F.linear(gathered, w.to(dtype), None if b is None else b.to(dtype))  # type: ignore[union-attr]
            for w, b in zip(weights, biases, strict=True)
        ]
        ctx.save_for_backward(gathered if keep else x.to(dtype), *weights)
        keep_shape(ctx, *out)
        return *out, new_token()

    @staticmethod
    @refused_of_values
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        *given, _ = gradients
        kept, *weights = ctx.saved_tensors
        call = ctx.call.backward()
        gathered = kept if ctx.keep else primitives.all_gather_slices(kept, ctx.lengths, call)
        of_x, of_parameters = None, []
        for i, (gradient, weight) in enumerate(zip(given, weights, strict=True)):
            gradient = defined(ctx, gradient, i)
            of_weight = of_bias = None
            if ctx.needs_input_grad[4 + 2 * i]:
                of_weight = (gradient.t() @ gathered).to(weight.dtype)
            if ctx.needs_input_grad[5 + 2 * i]:
                of_bias = gradient.sum(0).to(weight.dtype)
            of_parameters += [of_weight, of_bias]
            part = gradient @ weight.to(gradient.dtype)
            of_x = part if of_x is None else of_x.add_(part)
        assert of_x is not None
        own = primitives.reduce_scatter_slices(of_x, ctx.lengths, call).to(ctx.given)
        return own, None, None, None, *of_parameters
