"""Linears of which each tp_rank has a slice, for a `TokenStream` to call."""

import torch.nn.functional as F
from torch import Tensor, nn

from smp.tensor_parallel import group
from smp.tensor_parallel.linears import cut_weights, keep_slice
from smp.tensor_parallel.slices import Slices


class PartOfSum(nn.Linear):
    """A linear that is cut by its inputs: what it returns is this tp_rank's part of a sum.

    The bias comes on top of the sum, by who adds up.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Own inputs to all outputs, without the bias."""
        return F.linear(input, self.weight)


def cut_by_outputs(linear: nn.Linear, unit: int = 1) -> None:
    """Keep this tp_rank's outputs.  Collective over the TP_GROUP.

    Args:
        linear: an ``nn.Linear``.
        unit: channels that stay together: the size of a head.
    """
    slices = Slices.even(0, linear.out_features, group.size(), unit)
    cut_weights(linear, slices, cut_bias=True)
    linear.out_features = slices.local_size(group.rank())


def cut_by_inputs(linear: PartOfSum, unit: int = 1) -> None:
    """Keep this tp_rank's inputs, and the whole bias.  Collective over the TP_GROUP.

    Args:
        linear: what is cut.
        unit: channels that stay together: the size of a head.
    """
    slices = Slices.even(1, linear.in_features, group.size(), unit)
    keep_slice(linear, "weight", slices)
    linear.in_features = slices.local_size(group.rank())
