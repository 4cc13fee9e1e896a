"""``DistributedAttentionLayer``: attention whose heads are split over the TP_GROUP."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp.nn.layer_norm import FusedLayerNorm
from smp.nn.transformer import positions
from smp.nn.transformer.options import Options, takes
from smp.nn.transformer.token_stream import (
    Source,
    add_to_stream,
    cut_linear,
    has_stream_of_all,
    is_sharded,
    join,
    lead_out,
    meet,
    new_seed,
)
from smp.tensor_parallel import group, kernels, primitives, same_samples
from smp.tensor_parallel.distributed_module import DistributedModule
from smp.tensor_parallel.kernels import Dropout


class FlashAttentionLayer(nn.Module):
    """Attention that never has all scores in memory, by PyTorch's own kernels.

    Shapes: q ``[samples, heads, queries, channels]``, k and v ``[samples, heads, keys,
    channels]``; mask, added to the scores, broadcasts to ``[samples, heads, queries, keys]``.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
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
    """Attention, a linear behind it, dropout, the residual connection; see ``Options``.

    ``forward`` takes one tuple, ``(hidden, mask)``, or with ``cross_attention``
    ``(hidden, cross_states, mask)``, and returns a tensor like ``hidden``.

    Shapes: hidden ``[samples, positions, hidden_size]``; cross_states likewise, of other
    positions; mask ``[samples, 1, 1, keys]``, or what broadcasts to ``[samples, 1, positions,
    keys]``, added to the scores; or None.  Samples and positions may differ by tp_rank.
    """

    options: Options

    def build(self, options: Options) -> None:
        """Make what is in it.  Collective over the TP_GROUP."""
        width = options.num_attention_heads * options.attention_head_size
        hidden, eps = options.hidden_size, options.layernorm_epsilon
        self.pre_layernorm = FusedLayerNorm(hidden, eps) if options.pre_layernorm else None
        self.query = nn.Linear(hidden, width, options.use_qkv_bias)
        self.key = nn.Linear(hidden, width, options.use_qkv_bias)
        self.value = nn.Linear(hidden, width, options.use_qkv_bias)
        self.dense = nn.Linear(width, hidden, options.use_attn_dense_bias)
        self.layernorm = FusedLayerNorm(hidden, eps) if options.post_layernorm else None
        self.flash_attention = FlashAttentionLayer() if options.flash_attention else None
        options.initialize(self)
        for linear in (self.query, self.key, self.value):
            cut_linear(linear, True, options.attention_head_size)
        cut_linear(self.dense, False, options.attention_head_size)
        shares = group.shares(options.num_attention_heads)
        first = sum(shares[: group.rank()])
        self.heads = range(first, first + shares[group.rank()])

    def forward(self, inputs: tuple[Tensor | None, ...]) -> Tensor:
        hidden, states, mask = self._arguments(inputs)
        options = self.options
        x = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        drops = self.training and options.attention_dropout_prob > 0
        own = Source(
            samples=x.size(0),
            positions=x.size(1),
            keys=states.size(1) if states is not None else x.size(1),
            mask=None if mask is None else tuple(mask.shape),
            seed=new_seed() if drops else 0,
            required=(_requires_grad(x), _requires_grad(states), _requires_grad(mask)),
        )
        sharded, of_all = is_sharded(self), has_stream_of_all(self)
        if of_all:
            same_samples.check(self, hidden)
        sources = meet(own, x.device, sharded)
        x = primitives.requiring(x, any(s.required[0] for s in sources))
        if states is not None:
            states = primitives.requiring(states, any(s.required[1] for s in sources))
        tokens = [source.tokens for source in sources]
        others = [source.samples * source.keys for source in sources]
        keep = options.keeps_gathered()
        if states is None:
            q, k, v = join(x, tokens, [self.query, self.key, self.value], keep, of_all)
        else:
            (q,) = join(x, tokens, [self.query], keep, of_all)
            same = group.same_samples()
            k, v = join(states, others, [self.key, self.value], keep, same)
        if sharded:
            context = self._attend_along(sources, q, k, v, mask)
        else:
            masks = _masks(mask, sources, x)
            parts = zip(q.split(tokens), k.split(others), v.split(others), masks, strict=True)
            out = [
                self._attend(source, *part) for source, part in zip(sources, parts, strict=True)
            ]
            context = torch.cat(out) if len(out) > 1 else out[0]
        y = lead_out(context, self.dense, tokens, hidden, of_all)
        counts = [source.positions for source in sources] if sharded else None
        return add_to_stream(
            y, self.dense.bias, hidden, self.layernorm, options, self.training, counts
        )

    def _attend_along(
        self, pieces: list[Source], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> Tensor:
        """The same of sequences that come in pieces, some positions of each tp_rank."""
        samples, counts = pieces[0].samples, [piece.positions for piece in pieces]
        q = _in_order(q, samples, counts)
        if not self.options.cross_attention:
            k, v = _in_order(k, samples, counts), _in_order(v, samples, counts)
        keys = pieces[0].keys if self.options.cross_attention else sum(counts)
        whole = pieces[0]._replace(positions=sum(counts), keys=keys)
        (mask,) = _masks(mask, [whole], q)
        context = self._attend(whole, q, k, v, mask)
        by_sample = context.view(samples, sum(counts), context.size(-1))
        return torch.cat([piece.flatten(0, 1) for piece in by_sample.split(counts, 1)])

    def _arguments(
        self, inputs: tuple[Tensor | None, ...]
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
        if hidden is None or hidden.dim() != 3 or hidden.size(-1) != self.options.hidden_size:
            shape = None if hidden is None else list(hidden.shape)
            raise ValueError(
                f"smp.nn.DistributedAttentionLayer: hidden of shape {shape}: must be "
                f"[samples, positions, {self.options.hidden_size}]"
            )
        if mask is not None and mask.dim() != 4:
            raise ValueError(
                f"smp.nn.DistributedAttentionLayer: mask of shape {list(mask.shape)}: must be "
                "[samples, 1, 1, keys], added to the scores"
            )
        return hidden, states[0] if states else None, mask

    def _attend(
        self, source: Source, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> Tensor:
        """A source's tokens, ``[tokens, own heads * channels]``, of this tp_rank's heads."""
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


def _in_order(x: Tensor, samples: int, counts: list[int]) -> Tensor:
    """From pieces, each of all samples, to samples one behind the other."""
    pieces = x.split([samples * count for count in counts])
    by_sample = [p.view(samples, n, x.size(-1)) for p, n in zip(pieces, counts, strict=True)]
    return torch.cat(by_sample, 1).flatten(0, 1)


def _masks(mask: Tensor | None, sources: list[Source], like: Tensor) -> list[Tensor | None]:
    """Each source's mask."""
    if mask is not None and mask.dtype == torch.bool:
        raise TypeError(
            "smp.nn: the attention mask is bool: it is added to the scores, so give 0 where a "
            "position is seen and a large negative number where it is not"
        )
    dtype = torch.get_autocast_dtype(like.device.type) if _autocasts(like) else like.dtype
    mask = None if mask is None else mask.to(dtype)
    if len(sources) == 1:
        if mask is not None and mask.requires_grad and group.same_samples():
            mask = primitives.bwd_allreduce_for_tp(mask)
        return [mask]
    lengths = [math.prod(s.mask) if s.mask is not None else 0 for s in sources]
    if not any(lengths):
        return [None] * len(sources)
    own = like.new_zeros(0, dtype=dtype) if mask is None else mask.reshape(-1)
    own = primitives.requiring(own, any(source.required[2] for source in sources))
    parts = primitives.gather(own, 0, lengths).split(lengths)
    return [
        None if source.mask is None else part.view(source.mask)
        for source, part in zip(sources, parts, strict=True)
    ]


def _autocasts(like: Tensor) -> bool:
    return torch.is_autocast_enabled(like.device.type) and like.dtype != torch.float64


def _hidden(source: Source, window: int | None, value: float, like: Tensor) -> Tensor:
    """What hides later positions, and earlier ones than the window's, ``[queries, keys]``."""
    at = torch.arange(source.positions, device=like.device)
    behind = at[:, None] - at[None, :]
    seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return torch.zeros_like(seen, dtype=like.dtype).masked_fill(~seen, value)


def _requires_grad(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad and torch.is_grad_enabled()


def _kind(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"one of {len(value)}"
    return type(value).__name__
