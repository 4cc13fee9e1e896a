"""``DistributedTransformerOutputLayer``: two linears, split by the channels between them."""

from typing import Any

from torch import Tensor

from smp.nn.transformer.options import Options, takes
from smp.nn.transformer.split_parts import (
    PartOfSum,
    cut_first,
    cut_last,
    first_linear,
    layer_norm,
)
from smp.nn.transformer.stream_access import given_stream, meet
from smp.nn.transformer.token_stream import TokenStream
from smp.tensor_parallel.backward import gradients
from smp.tensor_parallel.rows.activations import ACTIVATIONS
from smp.tensor_parallel.splits.distributed_module import DistributedModule


@takes(
    "hidden_size", "intermediate_size", "hidden_dropout_prob", "activation",
    "layernorm_epsilon", "initializer_range", "use_normal_initialization", "pre_layernorm",
    "post_layernorm", "parallel_attn_output", "single_pre_layernorm",
    "fp32_residual_addition", "fused_dropout", "fused_bias_gelu", "optimize",
)  # fmt: skip
class DistributedTransformerOutputLayer(DistributedModule):
    """Linear, activation, linear, dropout, the residual connection.

    Its options are those of :class:`smp.nn.transformer.options.Options`.

    ``forward`` takes hidden, or ``(hidden, residual)`` to add to another tensor than hidden.
    With ``single_pre_layernorm`` hidden is normalised already.

    Raises:
        ValueError: an option out of range, or at odds with another; the text names it.
    """

    options: Options

    def build(self, options: Options) -> None:
        """Make the modules inside.  Collective over the TP_GROUP.

        Args:
            options: those given to ``__init__``.
        """
        hidden = options.hidden_size
        normalises = options.pre_layernorm and not options.single_pre_layernorm
        self.pre_layernorm = layer_norm(options) if normalises else None
        self.dense1 = first_linear(options, options.intermediate_size)
        self.dense2 = PartOfSum(options.intermediate_size, hidden)
        self.layernorm = layer_norm(options) if options.post_layernorm else None
        options.initialize(self)
        cut_first(self.dense1)
        cut_last(self.dense2, options)
        if options.optimizes() == "memory":
            gradients.mark_partial(self)
        self.activation = ACTIVATIONS[options.activation]

    def forward(self, inputs: Any) -> Tensor:
        """The linears' result for hidden, added to it.  Collective over the TP_GROUP.

        Args:
            inputs: hidden, ``[samples, positions, hidden_size]``; or ``(hidden, residual)``,
                both of that shape: the result is added to residual.  Samples and positions may
                differ by tp_rank.

        Returns:
            ``[samples, positions, hidden_size]``.
        """
        given, stream = given_stream(inputs)
        hidden, residual = (given, given) if isinstance(given, Tensor) else given
        if stream is not None:
            return self._through(stream, hidden, residual)
        stream = meet(self, hidden)
        own = stream.enter(hidden)
        beside = own if residual is hidden else stream.enter(residual)
        return stream.leave(self._through(stream, own, beside))

    def _through(self, stream: TokenStream, hidden: Tensor, residual: Tensor) -> Tensor:
        x = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        (y,) = stream.first(x, [self.dense1])
        y = stream.last(self.activation(y), self.dense2, residual)
        return stream.add(y, self.dense2.bias, residual, self.layernorm, self.training)
