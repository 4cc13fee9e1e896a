"""Linears and layer norms with a slice on each tp_rank, for a `TokenStream` to call."""

import torch.nn.functional as F
from torch import Tensor, nn

from smp.nn.layer_norm import DistributedLayerNorm, FusedLayerNorm
from smp.nn.transformer.options import Options
from smp.slicing.slices import Slices
from smp.tensor_parallel import group
from smp.tensor_parallel.rows.linears import cut_weights, keep_slice


class PartOfSum(nn.Linear):
    """A linear cut by its inputs: its result is this tp_rank's part of a sum.

    The bias comes on top of the sum, by the ranks adding up.

    Attributes:
        kept: where the residual stream is split by channels, the number of outputs of the sum
            kept by each tp_rank.  Its part of the bias is that of these outputs.
    """

    kept: list[int]

    def forward(self, input: Tensor) -> Tensor:
        """Own inputs to all outputs, without the bias."""
        return F.linear(input, self.weight)


def first_linear(options: Options, outputs: int, bias: bool = True) -> nn.Linear:
    """A linear with the residual stream as its input; not cut yet."""
    kind = PartOfSum if options.splits_channels() else nn.Linear
    return kind(options.hidden_size, outputs, bias)


def cut_first(linear: nn.Linear, unit: int = 1) -> None:
    """Keep this tp_rank's slice of such a linear.  Collective over the TP_GROUP.

    Args:
        linear: from `first_linear`.
        unit: outputs to keep together: the size of a head.
    """
    if isinstance(linear, PartOfSum):
        _cut_by_inputs(linear)
        _keep_outputs(linear, unit)
        return
    slices = Slices.even(0, linear.out_features, group.size(), unit)
    cut_weights(linear, slices, cut_bias=True)
    linear.out_features = slices.local_size(group.rank())


def cut_last(linear: PartOfSum, options: Options, unit: int = 1) -> None:
    """Keep this tp_rank's slice of a linear back to the residual stream.

    Collective over the TP_GROUP.

    Args:
        linear: not cut yet.
        options: of the module.
        unit: inputs to keep together: the size of a head.
    """
    _cut_by_inputs(linear, unit)
    if options.splits_channels():
        _keep_outputs(linear)


def _cut_by_inputs(linear: PartOfSum, unit: int = 1) -> None:
    slices = Slices.even(1, linear.in_features, group.size(), unit)
    keep_slice(linear, "weight", slices)
    linear.in_features = slices.local_size(group.rank())


def _keep_outputs(linear: PartOfSum, unit: int = 1) -> None:
    linear.kept = [count * unit for count in group.shares(linear.out_features // unit)]
    if linear.bias is not None:
        keep_slice(linear, "bias", Slices.even(0, linear.out_features, group.size(), unit))


def layer_norm(options: Options) -> FusedLayerNorm | DistributedLayerNorm:
    """A layer norm of the residual stream; where that is split by channels, collective."""
    kind = DistributedLayerNorm if options.splits_channels() else FusedLayerNorm
    return kind(options.hidden_size, options.layernorm_epsilon)
