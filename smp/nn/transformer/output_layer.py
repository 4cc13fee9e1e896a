"""``DistributedTransformerOutputLayer``: two linears, split by the channels between them."""

from torch import Tensor, nn

from smp.nn.layer_norm import FusedLayerNorm
from smp.nn.transformer.options import ACTIVATIONS, Options, takes
from smp.nn.transformer.token_stream import (
    add_to_stream,
    cut_linear,
    has_stream_of_all,
    is_sharded,
    join,
    lead_out,
)
from smp.tensor_parallel import primitives, same_samples
from smp.tensor_parallel.distributed_module import DistributedModule


@takes(
    "hidden_size", "intermediate_size", "hidden_dropout_prob", "activation",
    "layernorm_epsilon", "initializer_range", "use_normal_initialization", "pre_layernorm",
    "post_layernorm", "parallel_attn_output", "single_pre_layernorm",
    "fp32_residual_addition", "fused_dropout", "fused_bias_gelu", "optimize",
)  # fmt: skip
class DistributedTransformerOutputLayer(DistributedModule):
    """Linear, activation, linear, dropout, the residual connection; see ``Options``.

    ``forward`` takes hidden, or ``(hidden, residual)`` where something else is added to.  With
    ``single_pre_layernorm`` hidden is normalised already.

    Shapes: hidden, residual and output ``[samples, positions, hidden_size]``; samples and
    positions may differ by tp_rank.
    """

    options: Options

    def build(self, options: Options) -> None:
        """Make what is in it.  Collective over the TP_GROUP."""
        hidden, eps = options.hidden_size, options.layernorm_epsilon
        normalises = options.pre_layernorm and not options.single_pre_layernorm
        self.pre_layernorm = FusedLayerNorm(hidden, eps) if normalises else None
        self.dense1 = nn.Linear(hidden, options.intermediate_size)
        self.dense2 = nn.Linear(options.intermediate_size, hidden)
        self.layernorm = FusedLayerNorm(hidden, eps) if options.post_layernorm else None
        options.initialize(self)
        cut_linear(self.dense1, by_outputs=True)
        cut_linear(self.dense2, by_outputs=False)
        self.activation = ACTIVATIONS[options.activation]

    def forward(self, inputs: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        hidden, residual = (inputs, inputs) if isinstance(inputs, Tensor) else inputs
        x = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        of_all, counts = has_stream_of_all(self), None
        if of_all:
            same_samples.check(self, hidden)
        tokens = [x.size(0) * x.size(1)]
        if is_sharded(self):
            x, counts = primitives.entering(x, 1)
            tokens = [x.size(0) * count for count in counts]
        elif not of_all:
            x, tokens = primitives.entering(x.reshape(-1, x.size(-1)), 0)
        (y,) = join(x, tokens, [self.dense1], self.options.keeps_gathered(), of_all)
        y = lead_out(self.activation(y), self.dense2, tokens, residual, of_all)
        return add_to_stream(
            y,
            self.dense2.bias,
            residual,
            self.layernorm,
            self.options,
            self.training,
            counts,
        )
