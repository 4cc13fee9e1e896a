"""``DistributedTransformerLayer`` and ``DistributedTransformer``: layers, and a row of them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from smp.nn.layer_norm import FusedLayerNorm
from smp.nn.transformer.attention import DistributedAttentionLayer
from smp.nn.transformer.options import Options, takes
from smp.nn.transformer.output_layer import DistributedTransformerOutputLayer
from smp.nn.transformer.stream_access import check_hidden, given_stream, travelling
from smp.nn.transformer.token_stream import TokenStream
from smp.tensor_parallel.splits.distributed_module import DistributedModule

Stream = tuple[Any, ...]  # a layer's input and output, hidden first

_OF_A_LAYER = (
    "num_attention_heads", "attention_head_size", "hidden_size", "intermediate_size",
    "attention_dropout_prob", "hidden_dropout_prob", "activation", "layernorm_epsilon",
    "initializer_range", "use_normal_initialization", "causal_mask_size",
    "add_cross_attention", "pre_layernorm", "post_layernorm", "use_qkv_bias",
    "use_attn_dense_bias", "use_alibi", "alibi_bias_max", "rotary_dim", "rotary_base",
    "rotary_pairs", "parallel_attn_output", "single_pre_layernorm", "attention_in_fp32",
    "query_key_layer_scaling", "scale_attention_scores", "scale_attn_by_layer_idx",
    "mask_value", "window_size", "fp32_residual_addition", "fused_softmax", "fused_dropout",
    "fused_bias_gelu", "flash_attention", "optimize",
)  # fmt: skip


@takes(*_OF_A_LAYER, "layer_idx")
class DistributedTransformerLayer(DistributedModule):
    """Attention, cross-attention if there is, and an output layer.

    Its options are those of :class:`smp.nn.transformer.options.Options`.

    ``forward`` takes one tuple, ``(hidden, mask)``, or with ``add_cross_attention`` ``(hidden,
    cross_states, mask, cross_mask)``, and returns it with another ``hidden``.  The longer tuple
    with None for ``cross_states`` goes with every layer.

    Raises:
        ValueError: an option out of range, or at odds with another; the text names it.
    """

    options: Options

    def build(self, options: Options) -> None:
        """Make the modules inside.  Collective over the TP_GROUP.

        Args:
            options: those given to ``__init__``.
        """
        attention: tuple[str, ...] = DistributedAttentionLayer.TAKES  # type: ignore[attr-defined]
        output: tuple[str, ...] = DistributedTransformerOutputLayer.TAKES  # type: ignore[attr-defined]
        self.attention = DistributedAttentionLayer(**options.of(attention))
        self.cross_attention: DistributedAttentionLayer | None = None
        if options.add_cross_attention:
            self.cross_attention = DistributedAttentionLayer(
                **options.of(
                    attention, cross_attention=True, causal_mask_size=None, window_size=None
                )
            )
        self.output = DistributedTransformerOutputLayer(**options.of(output))

    def forward(self, inputs: Stream) -> Stream:
        """The hidden states, one layer on.  Collective over the TP_GROUP.

        Args:
            inputs: ``(hidden, mask)``, or with ``add_cross_attention`` ``(hidden, cross_states,
                mask, cross_mask)``.  hidden is ``[samples, positions, hidden_size]``;
                cross_states are ``[samples, others, hidden_size]``, or None on all tp_ranks,
                for no cross-attention.  A layer without cross-attention takes this tuple, too.
                Masks are ``[samples, 1, 1, positions]`` and ``[samples, 1, 1, others]``, or
                broadcast to the scores and are added to them; or None.  Samples and positions
                may differ by tp_rank.

        Returns:
            the same tuple with the new hidden.

        Raises:
            TypeError: another number of inputs, or a bool mask.
            ValueError: hidden or a mask of another shape; cross_states without
                ``add_cross_attention``.
        """
        given, stream = given_stream(inputs)
        if stream is not None:
            return self._through(given, stream), *inputs[1:]
        _check(self, given)
        inside = travelling(self, tuple(given))
        if inside is None:
            return self._through(given, None), *inputs[1:]
        *own, stream = inside
        return stream.leave(self._through(own, stream)), *inputs[1:]

    def _through(self, given: Sequence[Tensor | None], stream: TokenStream | None) -> Tensor:
        hidden, *states, mask = given[:3] if len(given) == 4 else given
        assert hidden is not None
        behind = () if stream is None else (stream,)
        attended = self.attention((hidden, mask, *behind))
        if self.options.parallel_attn_output:
            x = hidden
            if self.options.single_pre_layernorm:
                assert self.attention.pre_layernorm is not None
                x = self.attention.pre_layernorm(hidden)
            return self.output((x, attended, *behind))
        if self.cross_attention is not None and states[0] is not None:
            crossed = () if stream is None else (stream.crossed,)
            attended = self.cross_attention((attended, states[0], given[3], *crossed))
        return self.output((attended, attended, *behind) if behind else attended)


class _LayerStack(nn.Sequential):
    """Layers in a row, with a tuple from one to the next."""


@takes("num_layers", *_OF_A_LAYER, "embedding_dropout_prob")
class DistributedTransformer(DistributedModule):
    """``DistributedTransformerLayer``s in a row, ``seq_layers``.

    Its options are those of :class:`smp.nn.transformer.options.Options`.

    ``forward`` takes and returns a layer's tuple.  With ``pre_layernorm`` and
    ``post_layernorm`` its input and output are normalised, too.  ``embedding_dropout_prob`` is
    accepted for scripts with it; the embeddings are outside.

    Raises:
        ValueError: an option out of range, or at odds with another; the text names it.
    """

    IS_CONTAINER = True
    options: Options

    def build(self, options: Options) -> None:
        """Make the modules inside.  Collective over the TP_GROUP.

        Args:
            options: those given to ``__init__``.
        """
        both = options.pre_layernorm and options.post_layernorm
        size, eps = options.hidden_size, options.layernorm_epsilon
        self.input_layernorm = FusedLayerNorm(size, eps) if both else None
        layers = [
            DistributedTransformerLayer(
                **options.of(_OF_A_LAYER, window_size=window), layer_idx=i
            )
            for i, window in enumerate(_windows(options))
        ]
        self.seq_layers = _LayerStack(*layers)
        self.output_layernorm = FusedLayerNorm(size, eps) if both else None

    def forward(self, inputs: Stream) -> Stream:
        """The hidden states behind the last layer.  Collective over the TP_GROUP.

        Args:
            inputs: as for `DistributedTransformerLayer.forward`, with the same shapes.

        Returns:
            the same tuple with the new hidden, ``[samples, positions, hidden_size]``.

        Raises:
            as `DistributedTransformerLayer.forward`.
        """
        _check(self, inputs)
        hidden, *others = inputs
        if self.input_layernorm is not None:
            hidden = self.input_layernorm(hidden)
        inside = travelling(self, (hidden, *others))
        if inside is None:
            hidden, *others = self.seq_layers((hidden, *others))
        else:
            hidden = inside[-1].leave(self.seq_layers(inside)[0])
        if self.output_layernorm is not None:
            hidden = self.output_layernorm(hidden)
        return hidden, *others


def _check(module: Any, given: Any) -> None:
    """Refuse any input but a layer's tuple.

    Args:
        module: a layer, or a row of them.
        given: to its ``forward``.

    Raises:
        as `DistributedTransformerLayer.forward`.
    """
    crossing, name = module.options.add_cross_attention, type(module).__name__
    if not isinstance(given, tuple | list) or len(given) not in (4 if crossing else 2, 4):
        names = "(hidden, cross_states, mask, cross_mask)" if crossing else "(hidden, mask)"
        count = (
            f"one of {len(given)}" if isinstance(given, tuple | list) else type(given).__name__
        )
        raise TypeError(f"smp.nn.{name} takes one tuple {names}, not {count}")
    if not crossing and len(given) == 4 and given[1] is not None:
        raise ValueError(
            f"smp.nn.{name}: cross_states are given, and it is made without "
            "add_cross_attention=True"
        )
    check_hidden(module, given[0])


def _windows(options: Options) -> list[int | None]:
    """Each layer's window."""
    windows = options.window_size
    if windows is None or isinstance(windows, int):
        return [windows] * options.num_layers
    if not isinstance(windows, Sequence) or len(windows) != options.num_layers:
        raise ValueError(
            f"smp.nn.DistributedTransformer: window_size={windows!r}: one number, or one (or "
            f"None) for each of num_layers={options.num_layers}"
        )
    return list(windows)
