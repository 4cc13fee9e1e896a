"""Layer normalisation: of whole channels, and of channels split over the TP_GROUP."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from smp.runtime.collective_chain import linked, new_token
from smp.slicing.slices import Slices
from smp.tensor_parallel import group, primitives
from smp.tensor_parallel.backward.order import Call
from smp.tensor_parallel.backward.unused_collectives import defined, keep_shape
from smp.tensor_parallel.rows import autocast
from smp.tensor_parallel.rows.linears import keep_slice
from smp.tensor_parallel.rows.second_derivatives import refused_of_values
from smp.tensor_parallel.splits.distributed_module import DistributedModule


class FusedLayerNorm(nn.LayerNorm):
    """Layer normalisation in one kernel, PyTorch's own.

    The class is separate because scripts exclude its parameters from weight decay by
    ``isinstance``.

    Args:
        normalized_shape: number of channels, or the last axes, normalised together.
        eps: added to the variance.
        elementwise_affine, bias: whether there are a ``weight`` and a ``bias``.
        device, dtype: of these.

    Shapes: ``[..., channels]``, output likewise.
    """


class DistributedLayerNorm(nn.LayerNorm, DistributedModule):
    """``nn.LayerNorm`` over channels, with a slice on each tp_rank.

    The ranks exchange two numbers a token: mean and variance of their own channels; in the
    backward two sums.

    Args:
        normalized_shape: number of channels on all tp_ranks; it need not divide.
        eps: added to the variance.
        elementwise_affine: whether there are ``weight`` and ``bias``.
        device, dtype: of these.

    Raises:
        ValueError: several axes.

    Source: the SageMaker paper, appendix F.2.
    """

    def __init__(
        self,
        normalized_shape: int | tuple[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        if len(shape) != 1:
            raise ValueError(
                f"smp.nn.DistributedLayerNorm: normalized_shape={tuple(shape)}: the channels "
                "are one axis"
            )
        super().__init__(shape, eps, elementwise_affine, device=device, dtype=dtype)
        self.channels = shape[0]
        if elementwise_affine:
            slices = Slices.even(0, self.channels, group.size())
            keep_slice(self, "weight", slices)
            keep_slice(self, "bias", slices)

    def forward(self, input: Tensor) -> Tensor:
        """Own channels, by mean and variance of all.  Collective over the TP_GROUP.

        Args:
            input: ``[..., own channels]``, the same tokens on all tp_ranks.

        Returns:
            ``[..., own channels]``.

        Raises:
            ValueError: another number of channels than this tp_rank has.
        """
        shares = group.shares(self.channels)
        own = shares[group.rank()]
        if input.size(-1) != own:
            raise ValueError(
                f"smp.nn.DistributedLayerNorm: input of shape {list(input.shape)}: tp_rank "
                f"{group.rank()} has {own} of {self.channels} channels"
            )
        if group.size() == 1:
            return F.layer_norm(input, (own,), self.weight, self.bias, self.eps)
        return linked(_SplitNorm, input, self.weight, self.bias, shares, self.eps)


class _SplitNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shares: list[int],
        eps: float,
    ) -> tuple:
        ctx.call, ctx.channels = group.begin_call(), sum(shares)
        wide = _wide(x)
        moments = torch.stack(torch.var_mean(wide, -1, correction=0))
        variances, means = _everyones(moments, ctx.call).unbind(1)
        # Sums of squares would cancel where the mean is large.
        weights = wide.new_full((len(shares), *[1] * (x.dim() - 1)), shares[-1] / ctx.channels)
        weights[: ctx.channels % len(shares)] = shares[0] / ctx.channels  # one channel more
        mean = (weights * means).sum(0)
        variance = (weights * (variances + (means - mean).square())).sum(0)
        rstd = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, rstd)
        out = _normed(wide, mean, rstd)
        if weight is not None and bias is not None:
            out = torch.addcmul(_wide(bias), out, _wide(weight))
        # The dtype of torch's own: autocast has it in float32.
        out = out if autocast.is_on(x.device) else out.to(x.dtype)
        keep_shape(ctx, out)
        return out, new_token()

    @staticmethod
    @refused_of_values
    def backward(ctx: Any, gradient: Tensor | None, _: Any) -> tuple:  # type: ignore[override]
        x, weight, mean, rstd = ctx.saved_tensors
        gradient = _wide(defined(ctx, gradient))
        normed = _normed(_wide(x), mean, rstd)
        of_normed = gradient if weight is None else gradient * _wide(weight)
        parts = torch.stack([of_normed.sum(-1), (of_normed * normed).sum(-1)])
        sums = _everyones(parts, ctx.call.backward()).sum(0).div_(ctx.channels)
        along_one, along_normed = sums.unsqueeze(-1)
        of_x = (of_normed - along_one - normed * along_normed) * rstd.unsqueeze(-1)
        of_weight = of_bias = None
        if weight is not None:
            of_weight = (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype)
            of_bias = gradient.flatten(0, -2).sum(0).to(weight.dtype)
        return of_x.to(x.dtype), of_weight, of_bias, None, None


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _normed(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return (x - mean.unsqueeze(-1)).mul_(rstd.unsqueeze(-1))


def _everyones(numbers: Tensor, call: Call) -> Tensor:
    """The tp_ranks' numbers, of one shape, stacked."""
    return primitives.all_gather_slices(numbers[None], [1] * group.size(), call)
