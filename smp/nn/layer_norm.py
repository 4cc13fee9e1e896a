"""Layer normalisation: of whole channels, and of channels that are split over the TP_GROUP."""

from typing import Any

import torch
from torch import Tensor, nn

from smp.tensor_parallel import group, primitives
from smp.tensor_parallel.distributed_module import DistributedModule
from smp.tensor_parallel.linears import keep_slice
from smp.tensor_parallel.slices import Slices


class FusedLayerNorm(nn.LayerNorm):
    """Layer normalisation in one kernel, which PyTorch's own is.

    A class of its own, because scripts tell by ``isinstance`` which parameters get no
    weight decay.
    """


class DistributedLayerNorm(DistributedModule):
    """``nn.LayerNorm`` over channels of which each tp_rank has a slice.

    Args:
        normalized_shape: number of channels on all tp_ranks; it need not divide.
        eps: added to the variance.
        elementwise_affine: whether there are ``weight`` and ``bias``.

    Shapes: ``[..., own channels]``, the same samples on all tp_ranks; likewise the output.

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
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        if len(shape) != 1:
            raise ValueError(
                f"smp.nn.DistributedLayerNorm: normalized_shape={tuple(shape)}: the channels "
                "are one axis"
            )
        self.channels, self.eps = shape[0], eps
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if elementwise_affine:
            self.weight = nn.Parameter(torch.ones(self.channels, device=device, dtype=dtype))
            self.bias = nn.Parameter(torch.zeros(self.channels, device=device, dtype=dtype))
            slices = Slices.even(0, self.channels, group.size())
            keep_slice(self, "weight", slices)
            keep_slice(self, "bias", slices)

    def forward(self, hidden: Tensor) -> Tensor:
        own = group.shares(self.channels)[group.rank()]
        if hidden.size(-1) != own:
            raise ValueError(
                f"smp.nn.DistributedLayerNorm: input of shape {list(hidden.shape)}: tp_rank "
                f"{group.rank()} has {own} of {self.channels} channels"
            )
        mean = _sum_for_all(hidden.sum(-1, keepdim=True)) / self.channels
        centred = hidden - mean
        squares = _sum_for_all(centred.square().sum(-1, keepdim=True))
        out = centred * torch.rsqrt(squares / self.channels + self.eps)
        if self.weight is not None and self.bias is not None:
            out = out * self.weight + self.bias
        return out


def _sum_for_all(x: Tensor) -> Tensor:
    """The sum over the tp_ranks, which each uses for its own channels."""
    return primitives.bwd_allreduce_for_tp(primitives.fwd_allreduce_for_tp(x))
