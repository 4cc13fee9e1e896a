"""Random models for tensor parallelism: what scripts do to modules whose weights are split.

Subclasses with a forward of their own, ties, reads of weights, hooks, norms over channels,
parametrizations, instances that were changed, and blocks of PyTorch's and transformers'.  All
of it treats each sample by itself, so that ranks may have other ones.
"""

import random
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import smp
from tests.models.modules import module_of

WORDS, WIDTH = 11, 8
INNER = (8, 9, 12)

# ---------------------------------------------------------------- linears and embeddings


class ScaledLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 1.5


class WeightNormed(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, F.normalize(self.weight, dim=1), self.bias)


class ColumnNormed(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, F.normalize(self.weight, dim=0), self.bias)


class InputCentered(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input - input.mean(-1, keepdim=True))


class OutputNormed(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        return out / (1 + out.norm(dim=-1, keepdim=True))


class Gained(nn.Linear):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.gain


class Sized(nn.Linear):
    """Counts its channels by itself."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / self.out_features + self.weight.size(1)


class ScaledEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embedding_dim**0.5


class RowNormed(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, F.normalize(self.weight, dim=1))


class TableCentered(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) - self.weight.mean(0)


LINEARS = [ScaledLinear, WeightNormed, ColumnNormed, InputCentered, OutputNormed, Gained, Sized]
EMBEDDINGS = [ScaledEmbedding, RowNormed, TableCentered]


def linear(draw: random.Random, inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    kind = draw.choice(LINEARS) if draw.random() < 0.3 else nn.Linear
    return kind(inputs, outputs, bias=bias)


def embedding(draw: random.Random) -> nn.Embedding:
    kind = draw.choice(EMBEDDINGS) if draw.random() < 0.4 else nn.Embedding
    return kind(WORDS, WIDTH, padding_idx=draw.choice([None, 3]))


# --------------------------------------------------------------------- what lies between

INSIDE: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda inner: nn.ReLU(),
    "gelu": lambda inner: nn.GELU(),
    "layer norm": nn.LayerNorm,
    "softmax": lambda inner: nn.Softmax(-1),
    "rms norm": lambda inner: nn.RMSNorm(inner, eps=1e-5),
    "prelu": lambda inner: nn.PReLU(),
    "nothing": lambda inner: nn.Identity(),
}


class Mlp(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        inner = draw.choice(INNER)
        self.first = linear(draw, WIDTH, inner, bias=draw.random() < 0.7)
        self.inside = INSIDE[draw.choice(list(INSIDE))](inner)
        self.second = linear(draw, inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.inside(self.first(x)))


READS: list[Callable[[nn.Linear, nn.Linear, Tensor], Tensor]] = [
    lambda a, b, x: torch.tanh(F.linear(x, a.weight, a.bias)) @ a.weight,
    lambda a, b, x: b(torch.tanh(a(x))) + a.weight.norm() * 0.1,
    lambda a, b, x: b(torch.tanh(a(x))) / b.weight.norm(dim=1),
    lambda a, b, x: b(a(x)) + a.bias.sum() + b.bias,
    lambda a, b, x: b(a(x)) * a.weight.abs().max().detach(),
    lambda a, b, x: x @ (b.weight @ a.weight),
    lambda a, b, x: b(a(x)) + F.linear(x, torch.cat([a.weight[:4], b.weight.t()[:4]])),
    lambda a, b, x: b(torch.tanh(a(x))) * (a.out_features / b.in_features),
    lambda a, b, x: b(torch.tanh(a(x))) + a.weight.shape[0] + b.weight.numel() / 100,
    lambda a, b, x: b(a(x)) + sum(row.norm() for row in b.weight),
]


class Reader(nn.Module):
    """Uses weights without their modules' calls."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        inner = draw.choice(INNER)
        self.first = linear(draw, WIDTH, inner)
        self.second = linear(draw, inner, WIDTH)
        self.read = draw.choice(READS)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.read(self.first, self.second, x)


class Tied(nn.Module):
    """Linears, of perhaps other classes, that have one weight."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.one = linear(draw, WIDTH, WIDTH)
        self.other = linear(draw, WIDTH, WIDTH)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.other(torch.tanh(self.one(x)))


class Adapted(nn.Module):
    """As LoRA, around a linear that is frozen perhaps."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.base = linear(draw, WIDTH, WIDTH)
        self.base.requires_grad_(draw.random() < 0.5)
        self.down = nn.Parameter(torch.randn(WIDTH, 2) * 0.3)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(x @ self.down)


@module_of(lambda draw: {"attention": nn.MultiheadAttention(WIDTH, 2, batch_first=True)})
def Attention(self, x: Tensor) -> Tensor:
    return x + self.attention(x, x, x, need_weights=False)[0]


def encoder(draw: random.Random) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)


def of_transformers(draw: random.Random) -> nn.Module:
    """A planned MLP, or a subclass of one that looks at inner channels."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    class InnerNormed(LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
            return self.down_proj(inner / (1 + inner.norm(dim=-1, keepdim=True)))

    class Doubled(LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    kind = draw.choice([LlamaMLP, InnerNormed, Doubled])
    return kind(LlamaConfig(hidden_size=WIDTH, intermediate_size=12, num_attention_heads=2))


BLOCKS: list[Callable[[random.Random], nn.Module]] = [
    Mlp, Mlp, Reader, Reader, Tied, Adapted, Attention, encoder, of_transformers,
]  # fmt: skip


# ------------------------------------------------------------------ changed instances


@module_of()
def Centered(self, weight: Tensor) -> Tensor:
    return weight - weight.mean()


def _mixed(self: nn.Module, *args: Any) -> Tensor:
    out = type(self).forward(self, *args)
    return out - out.mean(-1, keepdim=True)


def _patched(module: nn.Module) -> None:
    module.forward = types.MethodType(_mixed, module)  # type: ignore[method-assign]


CHANGES: list[Callable[[nn.Module], Any]] = [
    lambda m: m.register_forward_hook(lambda module, args, out: out * 1.25),
    lambda m: m.register_forward_hook(lambda module, args, out: out - out.mean(-1, True)),
    lambda m: m.register_forward_hook(lambda module, args, out: out.softmax(-1)),
    lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    lambda m: parametrize.register_parametrization(m, "weight", Centered()),
    lambda m: parametrizations.weight_norm(m),
    lambda m: m.requires_grad_(False),
    _patched,
]


class Model(nn.Module):
    """Ids to logits.

    Args:
        seed: of its modules, their changes and marks.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.words = embedding(draw)
        self.blocks = nn.ModuleList(
            draw.choice(BLOCKS)(draw) for _ in range(draw.randint(1, 3))
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = linear(draw, WIDTH, WORDS)
        if draw.random() < 0.4:
            self.head.weight = self.words.weight
        leaves = [m for m in self.modules() if type(m) in (nn.Linear, *LINEARS)]
        uses = Counter(id(m.weight) for m in (self.words, *leaves))
        for module in leaves:
            # A parametrization makes a parameter of its own over the memory of a tied weight.
            if draw.random() < 0.2 and uses[id(module.weight)] == 1:
                draw.choice(CHANGES)(module)
        self._mark(draw)

    def _mark(self, draw: random.Random) -> None:
        for module in self.modules():
            if draw.random() < 0.6:
                by_rows = draw.random() < 0.4
                smp.set_tensor_parallelism(module, by_outputs=by_rows, vocab_parallel=by_rows)
            elif draw.random() < 0.3:
                smp.set_tensor_parallelism(module, False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
