"""``DistributedAttentionLayer``: attention with its heads split over the TP_GROUP."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp.nn.transformer import positions
from smp.nn.transformer.options import Options, takes
from smp.nn.transformer.seeds import new_seed
from smp.nn.transformer.split_parts import (
    PartOfSum,
    cut_first,
    cut_last,
    first_linear,
    layer_norm,
)
from smp.nn.transformer.stream_access import given_stream, meet
from smp.nn.transformer.token_stream import Source, TokenStream
from smp.tensor_parallel import group
from smp.tensor_parallel.backward import gradients
from smp.tensor_parallel.rows import kernels
from smp.tensor_parallel.rows.kernels import Dropout
from smp.tensor_parallel.splits.distributed_module import DistributedModule


class FlashAttentionLayer(nn.Module):
    """Attention without all scores in memory at once, by PyTorch's own kernels."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
        """Softmax of the scores, times the values.

        Args:
            q: queries, ``[samples, heads, queries, channels]``.
            k: keys, ``[samples, heads, keys, channels]``.
            v: values, ``[samples, heads, keys, channels]``.
            mask: added to the scores; broadcasts to ``[samples, heads, queries, keys]``.
            causal: hide later positions from each; to be given without a mask.
            scale: the factor of the scores.

        Returns:
            ``[samples, heads, queries, channels]``.
        """
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale
        )


@takes(
    "num_attention_heads", "attention_head_size", "hidden_size", "attention_dropout_prob",
    "hidden_dropout_prob", "layernorm_epsilon", "initializer_range",
    "use_normal_initialization", "cross_attention", "causal_mask_size", "pre_layernorm",
    "post_layernorm", "use_qkv_bias", "use_attn_dense_bias", "use_alibi", "alibi_bias_max",
    "rotary_dim", "rotary_base", "rotary_pairs", "attention_in_fp32",
    "query_key_layer_scaling", "scale_attention_scores", "scale_attn_by_layer_idx",
    "layer_idx", "mask_value", "window_size", "fp32_residual_addition", "fused_softmax",
    "fused_dropout", "flash_attention", "optimize",
)  # fmt: skip
class DistributedAttentionLayer(DistributedModule):
    """Attention, a linear behind it, dropout, the residual connection.

    Its options are those of :class:`smp.nn.transformer.options.Options`.

    ``forward`` takes one tuple, ``(hidden, mask)``, or with ``cross_attention``
    ``(hidden, cross_states, mask)``, and returns a tensor like ``hidden``.

    Raises:
        ValueError: an option out of range, or at odds with another; the text names it.
    """

    options: Options

    def build(self, options: Options) -> None:
        """Make the modules inside.  Collective over the TP_GROUP.

        Args:
            options: those given to ``__init__``.
        """
        if isinstance(options.window_size, Sequence):
            raise ValueError(
                f"smp.nn.DistributedAttentionLayer: window_size={options.window_size!r}: one "
                "attention has one window"
            )
        width = options.num_attention_heads * options.attention_head_size
        hidden = options.hidden_size
        self.pre_layernorm = layer_norm(options) if options.pre_layernorm else None
        self.query = first_linear(options, width, options.use_qkv_bias)
        self.key = first_linear(options, width, options.use_qkv_bias)
        self.value = first_linear(options, width, options.use_qkv_bias)
        self.dense = PartOfSum(width, hidden, options.use_attn_dense_bias)
        self.layernorm = layer_norm(options) if options.post_layernorm else None
        self.flash_attention = FlashAttentionLayer() if options.flash_attention else None
        options.initialize(self)
        for linear in (self.query, self.key, self.value):
            cut_first(linear, options.attention_head_size)
        cut_last(self.dense, options, options.attention_head_size)
        if options.optimizes() == "memory":
            gradients.mark_partial(self)
        shares = group.shares(options.num_attention_heads)
        first = sum(shares[: group.rank()])
        self.heads = range(first, first + shares[group.rank()])

    def forward(self, inputs: tuple[Any, ...]) -> Tensor:
        """The hidden states with the attended values.  Collective over the TP_GROUP.

        Args:
            inputs: ``(hidden, mask)``, or with ``cross_attention`` ``(hidden, cross_states,
                mask)``.  hidden is ``[samples, positions, hidden_size]``; cross_states are
                ``[samples, keys, hidden_size]``.  Mask is ``[samples, 1, 1, keys]``, or
                broadcasts to ``[samples, 1, positions, keys]``, added to the scores; or None.
                Samples and positions may differ by tp_rank.

        Returns:
            ``[samples, positions, hidden_size]``.

        Raises:
            TypeError: another number of inputs, or a bool mask.
            ValueError: hidden or mask of another shape; cross_states are missing.
        """
        given, stream = given_stream(inputs)
        drops = self.training and self.options.attention_dropout_prob > 0
        seed = new_seed() if drops else 0
        if stream is not None:
            hidden, *states, mask = given
            stream = stream.seeded(seed)
            return self._through(stream, hidden, states[0] if states else None, mask)
        hidden, seen, mask = self._arguments(given)
        stream = meet(self, hidden, seen, mask, seed)
        own, mask = stream.enter(hidden), stream.enter_mask(mask, hidden)
        seen = None if seen is None else stream.enter_states(seen)
        return stream.leave(self._through(stream, own, seen, mask))

    def _through(
        self, stream: TokenStream, hidden: Tensor, states: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        x = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        crosses = states is not None
        if states is None:
            q, k, v = stream.first(x, [self.query, self.key, self.value])
        else:
            (q,) = stream.first(x, [self.query])
            k, v = stream.first_of_states(states, [self.key, self.value])
        parts = zip(
            stream.batches,
            stream.sequences(q),
            stream.sequences(k, crosses),
            stream.sequences(v, crosses),
            stream.masks(mask),
            strict=True,
        )
        context = stream.joined([self._attend(*part) for part in parts])
        y = stream.last(context, self.dense, hidden)
        return stream.add(y, self.dense.bias, hidden, self.layernorm, self.training)

    def _arguments(
        self, inputs: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        wanted = 3 if self.options.cross_attention else 2
        if not isinstance(inputs, tuple | list) or len(inputs) != wanted:
            names = "(hidden, cross_states, mask)" if wanted == 3 else "(hidden, mask)"
            raise TypeError(
                f"smp.nn.DistributedAttentionLayer takes one tuple {names}, not {_kind(inputs)}"
            )
        hidden, *states, mask = inputs
        if states and states[0] is None:
            raise ValueError(
                "smp.nn.DistributedAttentionLayer: with cross_attention, cross_states is None"
            )
        return hidden, states[0] if states else None, mask

    def _attend(
        self, source: Source, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> Tensor:
        """A batch's tokens, ``[tokens, own heads * channels]``, of this tp_rank's heads."""
        options = self.options
        causal = options.causal_mask_size is not None and not options.cross_attention
        size, heads = options.attention_head_size, len(self.heads)
        q, k, v = (
            t.view(source.samples, length, heads, size).transpose(1, 2)
            for t, length in ((q, source.positions), (k, source.keys), (v, source.keys))
        )
        if options.rotary_dim:
            turn = options.rotary_dim, options.rotary_base, options.rotary_pairs
            q, k = positions.rotate(q, *turn), positions.rotate(k, *turn)
        if options.use_alibi:
            of, most = options.num_attention_heads, options.alibi_bias_max
            bias = positions.alibi(self.heads, of, source.keys, most, q)
            mask = bias if mask is None else mask + bias
        scale = 1.0 / math.sqrt(size) if options.scale_attention_scores else 1.0
        number = options.layer_idx + 1
        if options.scale_attn_by_layer_idx:
            scale /= number
        window = options.window_size if causal else None
        assert window is None or isinstance(window, int)
        if causal and options.mask_value is not None:
            later = _hidden(source, window, options.mask_value, q)
            mask, causal, window = later if mask is None else mask + later, False, None
        p = options.attention_dropout_prob if source.seed else 0.0
        if not (p or window or self._widens(q) or options.query_key_layer_scaling):
            if causal and mask is not None:
                mask, causal = mask + _hidden(source, None, -math.inf, q), False
            attention = self.flash_attention or _plain_attention
            out = attention(q, k, v, mask, causal, scale)
        else:
            drop = Dropout.of_heads(
                p, source.seed, self.heads, options.num_attention_heads, source.positions,
                source.keys,
            )  # fmt: skip
            out = self._through_scores(q, k, v, mask, causal, scale, window, drop)
        return out.transpose(1, 2).reshape(source.tokens, heads * size)

    def _widens(self, q: Tensor) -> bool:
        """Whether scores are computed in a wider dtype than the queries have."""
        return self.options.attention_in_fp32 and q.element_size() < 4

    def _through_scores(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        window: int | None,
        drop: Dropout,
    ) -> Tensor:
        options, dtype = self.options, v.dtype
        if self._widens(q):
            q, k = q.float(), k.float()
        if options.query_key_layer_scaling:
            # Small enough for half precision, and multiplied again by the softmax.
            number = options.layer_idx + 1
            scores = (q * (scale / number)) @ k.transpose(-1, -2)
            scale = float(number)
        else:
            scores = q @ k.transpose(-1, -2)
        weights = kernels.masked_softmax_dropout(
            scores, mask, scale=scale, causal=causal, window=window, drop=drop
        )
        return weights.to(dtype) @ v


_plain_attention = FlashAttentionLayer()


def _hidden(source: Source, window: int | None, value: float, like: Tensor) -> Tensor:
    """A mask of later positions, and of those before the window, ``[queries, keys]``."""
    at = torch.arange(source.positions, device=like.device)
    behind = at[:, None] - at[None, :]
    seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return torch.zeros_like(seen, dtype=like.dtype).masked_fill(~seen, value)


def _kind(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"one of {len(value)}"
    return type(value).__name__
