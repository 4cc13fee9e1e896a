"""The transformers of ``smp.nn`` written down plainly, as their documentation says.

State dicts have the names of the distributed modules.  Without dropout.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = {
    "gelu": F.gelu,
    "relu": F.relu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: (
        0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)))
    ),
}


def alibi_slopes(heads: int, most: float) -> list[float]:
    """Those of a power of 2 of heads; further heads have every other one of twice as many.

    Source: Press et al., arXiv:2108.12409, and their code.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-most * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-most * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)]
    return slopes + between[: heads - power]


def norm(wanted: bool, size: int, o: dict) -> nn.Module | None:
    return nn.LayerNorm(size, o.get("layernorm_epsilon", 1e-5)) if wanted else None


def through(module: nn.Module | None, x: Tensor) -> Tensor:
    return x if module is None else module(x)


class PlainAttention(nn.Module):
    def __init__(self, cross_attention: bool = False, **o) -> None:
        super().__init__()
        self.o, self.cross = o, cross_attention
        hidden = o["hidden_size"]
        width = o["num_attention_heads"] * o["attention_head_size"]
        bias = o.get("use_qkv_bias", True)
        self.query = nn.Linear(hidden, width, bias)
        self.key = nn.Linear(hidden, width, bias)
        self.value = nn.Linear(hidden, width, bias)
        self.dense = nn.Linear(width, hidden, o.get("use_attn_dense_bias", True))
        self.pre_layernorm = norm(o.get("pre_layernorm", False), hidden, o)
        self.layernorm = norm(o.get("post_layernorm", True), hidden, o)

    def forward(self, inputs: tuple) -> Tensor:
        o = self.o
        hidden, *states, mask = inputs
        x = through(self.pre_layernorm, hidden)
        seen = states[0] if self.cross else x
        heads, size = o["num_attention_heads"], o["attention_head_size"]

        def by_heads(linear: nn.Linear, of: Tensor) -> Tensor:
            return linear(of).view(*of.shape[:2], heads, size).transpose(1, 2)

        q, k, v = by_heads(self.query, x), by_heads(self.key, seen), by_heads(self.value, seen)
        if o.get("rotary_dim"):
            q, k = self._rotated(q), self._rotated(k)
        scores = q @ k.transpose(-1, -2)
        if o.get("scale_attention_scores", True):
            scores = scores / math.sqrt(size)
        if o.get("scale_attn_by_layer_idx", False):
            scores = scores / (o.get("layer_idx", 0) + 1)
        places, others = torch.arange(x.size(1)), torch.arange(seen.size(1))
        if o.get("use_alibi"):
            slopes = torch.tensor(alibi_slopes(heads, o.get("alibi_bias_max", 8)))
            away = (others[None, :] - places[:, None]).to(scores.dtype)
            scores = scores + slopes[:, None, None] * away
        if o.get("causal_mask_size") is not None and not self.cross:
            behind = places[:, None] - others[None, :]
            window = o.get("window_size") or x.size(1)
            unseen = (behind < 0) | (behind >= window)
            value = o.get("mask_value")
            hide = -math.inf if value is None else value
            scores = scores + torch.zeros_like(scores).masked_fill(unseen, hide)
        if mask is not None:
            scores = scores + mask
        context = scores.softmax(-1) @ v
        y = self.dense(context.transpose(1, 2).flatten(2)) + hidden
        return through(self.layernorm, y)

    def _rotated(self, x: Tensor) -> Tensor:
        """By complex numbers."""
        o = self.o
        dim = o["rotary_dim"]
        turned, rest = x[..., :dim], x[..., dim:]
        steps = torch.arange(0, dim, 2).float() / dim
        angles = torch.outer(
            torch.arange(x.size(2)).float(), 1.0 / o.get("rotary_base", 10000.0) ** steps
        )
        by = torch.polar(torch.ones_like(angles, dtype=x.dtype), angles.to(x.dtype))
        # The rotation's cosine and sine are those of float32 angles.
        by = torch.complex(angles.cos().to(x.dtype), angles.sin().to(x.dtype)).to(by.dtype)
        if o.get("rotary_pairs", "neighbours") == "neighbours":
            number = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous()) * by
            turned = torch.view_as_real(number).flatten(-2)
        else:
            number = torch.complex(*turned.chunk(2, -1)) * by
            turned = torch.cat((number.real, number.imag), -1)
        return torch.cat((turned, rest), -1)


class PlainOutput(nn.Module):
    def __init__(self, **o) -> None:
        super().__init__()
        hidden = o["hidden_size"]
        self.dense1 = nn.Linear(hidden, o["intermediate_size"])
        self.dense2 = nn.Linear(o["intermediate_size"], hidden)
        pre = o.get("pre_layernorm", False) and not o.get("single_pre_layernorm", False)
        self.pre_layernorm = norm(pre, hidden, o)
        self.layernorm = norm(o.get("post_layernorm", True), hidden, o)
        self.activation = ACTIVATIONS[o.get("activation", "gelu")]

    def forward(self, inputs: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        hidden, residual = (inputs, inputs) if isinstance(inputs, Tensor) else inputs
        x = self.dense1(through(self.pre_layernorm, hidden))
        return through(self.layernorm, self.dense2(self.activation(x)) + residual)


class PlainLayer(nn.Module):
    def __init__(self, **o) -> None:
        super().__init__()
        self.o = o
        self.attention = PlainAttention(**o)
        self.cross_attention = None
        if o.get("add_cross_attention"):
            self.cross_attention = PlainAttention(cross_attention=True, **o)
        self.output = PlainOutput(**o)

    def forward(self, inputs: tuple) -> tuple:
        o = self.o
        if self.cross_attention is not None:
            hidden, states, mask, cross_mask = inputs
            y = self.cross_attention((self.attention((hidden, mask)), states, cross_mask))
            return self.output(y), states, mask, cross_mask
        hidden, mask = inputs
        y = self.attention((hidden, mask))
        if o.get("parallel_attn_output"):
            single = o.get("single_pre_layernorm")
            x = self.attention.pre_layernorm(hidden) if single else hidden
            return self.output((x, y)), mask
        return self.output(y), mask


class PlainTransformer(nn.Module):
    def __init__(self, num_layers: int, **o) -> None:
        super().__init__()
        both = o.get("pre_layernorm", False) and o.get("post_layernorm", True)
        self.input_layernorm = norm(both, o["hidden_size"], o)
        self.output_layernorm = norm(both, o["hidden_size"], o)
        windows = o.pop("window_size", None)
        if windows is None or isinstance(windows, int):
            windows = [windows] * num_layers
        layers = [PlainLayer(**o, layer_idx=i, window_size=w) for i, w in enumerate(windows)]
        self.seq_layers = nn.Sequential(*layers)

    def forward(self, inputs: tuple) -> tuple:
        hidden, *others = inputs
        out = self.seq_layers((through(self.input_layernorm, hidden), *others))
        return through(self.output_layernorm, out[0]), *others


class PlainLMHead(nn.Module):
    def __init__(self, **o) -> None:
        super().__init__()
        self.o, size = o, o["hidden_size"]
        self.word_embedding = nn.Embedding(o["vocab_size"], size)
        positions, types = o["num_positions"], o.get("num_token_types", 0)
        self.position_embedding = nn.Embedding(positions, size) if positions else None
        self.token_type_embedding = nn.Embedding(types, size) if types else None
        layers = {k: v for k, v in o.items() if k not in ("vocab_size", "num_positions")}
        self.transformer = PlainTransformer(**layers)
        pre, post = o.get("pre_layernorm", False), o.get("post_layernorm", True)
        self.layernorm = norm(o.get("final_layernorm", pre and not post), size, o)
        self.lm_head = None
        if o.get("add_lm_head", True):
            self.lm_head = nn.Linear(size, o["vocab_size"], o.get("use_lm_head_bias", False))
            if o.get("tie_input_output_embedding", True):
                self.lm_head.weight = self.word_embedding.weight

    def forward(self, inputs: tuple) -> Tensor:
        ids, mask, types, places, *cross, labels = inputs
        x = self.word_embedding(ids)
        if self.position_embedding is not None:
            places = torch.arange(ids.size(1))[None] if places is None else places
            x = x + self.position_embedding(places)
        if types is not None:
            x = x + self.token_type_embedding(types)
        if mask is not None:
            mask = mask[:, None, None, :] * -1e4
        given = (x, cross[0], mask, cross[1]) if cross else (x, mask)
        x = through(self.layernorm, self.transformer(given)[0])
        if self.lm_head is None:
            return x
        logits = self.lm_head(x)
        if labels is None:
            return logits
        if self.o.get("causal_mask_size") is not None:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
