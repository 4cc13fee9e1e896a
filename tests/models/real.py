"""Models that people train, made small: random weights, nothing is downloaded.

    model, make_batch, step, far = REAL["gpt2"](seed=0)
    rank_of = partition_by_path(model, {path: 1 for path in far}, reads)

``make_batch(batch_size, generator)`` gives the arguments of ``step(model, *batch)``,
split along their first axis.  The models of transformers compute attention eagerly and
keep their dropout.  ``far`` names about half of the model, for a second rank; the
reads of other modules' weights are those that ``weight_reads`` sees.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.modules import module_of
from tests.models.steps import own_loss

WORDS = 40  # vocabulary of all models of language
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


class Real(NamedTuple):
    model: nn.Module
    make_batch: Callable[[int, torch.Generator], tuple[Tensor, ...]]
    step: Callable
    far: tuple[str, ...]


REAL: dict[str, Callable[..., Real]] = {}


def _real(make: Callable[[], Real]) -> Callable[..., Real]:
    """Registers a model; its weights follow from the seed, of any dtype."""

    @functools.wraps(make)
    def seeded(seed: int = 0, dtype: torch.dtype = torch.float32) -> Real:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            real = make()
        real.model.to(dtype)

        def make_batch(batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
            batch = real.make_batch(batch_size, generator)
            return tuple(t.to(dtype) if t.is_floating_point() else t for t in batch)

        return real._replace(make_batch=make_batch)

    REAL[make.__name__] = seeded
    return seeded


def words(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randint(3, WORDS, shape, generator=generator)


def one_sequence(length: int) -> Callable[[int, torch.Generator], tuple[Tensor, ...]]:
    """Batches of word numbers ``[batch_size, length]``."""
    return lambda batch_size, generator: (words(batch_size, length, generator=generator),)


# Models of transformers.


@_real
def gpt2() -> Real:
    """Collects hidden states, by hooks on its layers; input and output are tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=4, n_head=2, **EAGER
    )

    def step(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        out = model(input_ids=tokens, labels=tokens, output_hidden_states=True)
        loss = out.loss + 0.01 * sum(state.square().mean() for state in out.hidden_states)
        model.backward(loss)
        return loss, out.logits

    far = ("transformer.h.2", "transformer.h.3", "transformer.ln_f")
    return Real(GPT2LMHeadModel(config), one_sequence(10), step, far)


@_real
def bert() -> Real:
    """Two segments, padding, and a head that is tied to the input."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        **EAGER,
    )

    def make_batch(batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        tokens = words(batch_size, 10, generator=generator)
        lengths = torch.randint(4, 11, (batch_size, 1), generator=generator)
        padding = (torch.arange(10) < lengths).long()
        return tokens, padding, (torch.arange(10) > 5).long().expand(batch_size, 10)

    def step(model: Any, tokens: Tensor, padding: Tensor, segments: Tensor) -> Tensor:
        out = model(
            input_ids=tokens,
            attention_mask=padding,
            token_type_ids=segments,
            labels=tokens.masked_fill(padding == 0, -100),
        )
        model.backward(out.loss)
        return out.loss

    far = ("bert.encoder.layer.2", "bert.encoder.layer.3")
    return Real(BertForMaskedLM(config), make_batch, step, far)


@_real
def t5() -> Real:
    """Encoder and decoder with one embedding; the first layer's position bias is used
    by all."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        **EAGER,
    )

    def make_batch(batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        source = words(batch_size, 8, generator=generator)
        return source, words(batch_size, 6, generator=generator)

    def step(model: Any, source: Tensor, target: Tensor) -> Tensor:
        loss = model(input_ids=source, labels=target)["loss"]
        model.backward(loss)
        return loss

    model = T5ForConditionalGeneration(config)
    return Real(model, make_batch, step, ("decoder.block", "decoder.final_layer_norm"))


@_real
def vit() -> Real:
    """Image classification by a transformer."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.1,
        **EAGER,
    )

    def make_batch(batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        images = torch.randn(batch_size, 3, 8, 8, generator=generator)
        return images, torch.randint(5, (batch_size,), generator=generator)

    def step(model: Any, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = model(pixel_values=images, labels=labels)[:2]
        model.backward(loss)
        return loss, logits.argmax(1)

    model = ViTForImageClassification(config)
    layers = next(path for path, m in model.named_modules() if isinstance(m, nn.ModuleList))
    return Real(model, make_batch, step, (f"{layers}.2", f"{layers}.3", "classifier"))


def _llama_sizes() -> dict[str, Any]:
    return {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        **EAGER,
    }


@_real
def llama() -> Real:
    """Hands a cache of keys and values to every layer, in training too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_llama_sizes(), attention_dropout=0.1, use_cache=True)

    def step(model: Any, tokens: Tensor) -> tuple[Tensor, int]:
        out = model(input_ids=tokens, labels=tokens)
        model.backward(out.loss + 0.01 * out.past_key_values.layers[-1].keys.square().mean())
        return out.loss, out.past_key_values.get_seq_length()

    far = ("model.layers.2", "model.layers.3", "model.norm", "lm_head")
    return Real(LlamaForCausalLM(config), one_sequence(9), step, far)


@_real
def mixtral() -> Real:
    """A mixture of experts, with the loss that balances them."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **_llama_sizes(), num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    )

    def step(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        out = model(input_ids=tokens, labels=tokens)
        model.backward(out.loss)
        return out.loss, out.aux_loss

    far = ("model.layers.1", "model.layers.3", "model.norm")
    return Real(MixtralForCausalLM(config), one_sequence(9), step, far)


@_real
def whisper() -> Real:
    """Speech in, words out: convolutions, an encoder and a decoder."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=WORDS,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=10,
        max_target_positions=12,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **EAGER,
    )

    def make_batch(batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        sound = torch.randn(batch_size, 8, 20, generator=generator)
        return sound, words(batch_size, 7, generator=generator)

    def step(model: Any, sound: Tensor, text: Tensor) -> Tensor:
        loss = model(input_features=sound, labels=text).loss
        model.backward(loss)
        return loss

    model = WhisperForConditionalGeneration(config)
    far = ("model.encoder.layers", "model.encoder.layer_norm", "model.decoder.layers.1")
    return Real(model, make_batch, step, far)


# Models of PyTorch's own parts.


@module_of(
    lambda: {
        "embedding": nn.Embedding(WORDS, 16),
        "transformer": nn.Transformer(
            16,
            nhead=2,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=32,
            batch_first=True,
        ),
        "head": nn.Linear(16, WORDS),
    }
)
def Translator(self, source: Tensor, target: Tensor) -> Tensor:
    """``nn.Transformer`` between an embedding and a head."""
    mask = nn.Transformer.generate_square_subsequent_mask(
        target.size(1), dtype=self.head.weight.dtype
    )
    hidden = self.transformer(
        self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True
    )
    return self.head(hidden)


def _translator_batch(batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    source = words(batch_size, 7, generator=generator)
    return source, words(batch_size, 6, generator=generator)


@_real
def transformer() -> Real:
    def step(model: Any, source: Tensor, target: Tensor) -> Tensor:
        logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
        model.backward(loss)
        return loss

    far = ("transformer.encoder.layers.1", "transformer.decoder.layers")
    return Real(Translator(), _translator_batch, step, far)


@_real
def transformer_eval() -> Real:
    """In evaluation a layer reads the weights of its children in one fused operator."""

    def step(model: Any, source: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            return model(source, target)

    far = ("transformer.encoder.layers.1", "transformer.decoder.layers")
    return Real(Translator().eval(), _translator_batch, step, far)


class MixtureOfExperts(nn.Module):
    """Each token goes to the two experts that a router finds best for it."""

    def __init__(self, width: int, experts: int, chosen: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )
        self.chosen = chosen

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``[tokens, width]`` -> the same, and the loss that balances the experts."""
        odds = self.router(x).softmax(-1)
        best, chosen = odds.topk(self.chosen, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):  # an expert that no token needs does not run
                y = expert(x[token]) * best[token, place].unsqueeze(1)
                out = out.index_add(0, token, y)
        load = F.one_hot(chosen, len(self.experts)).to(x.dtype).mean((0, 1))
        return out, (load * odds.mean(0)).sum() * len(self.experts)


@module_of(
    lambda: {
        "embedding": nn.Embedding(WORDS, 16),
        "layers": nn.ModuleList(MixtureOfExperts(16, 4) for _ in range(2)),
        "head": nn.Linear(16, WORDS),
    }
)
def SparseLanguageModel(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
    x = self.embedding(tokens[:, :-1]).flatten(0, 1)
    balance = x.new_zeros(())
    for layer in self.layers:
        y, loss = layer(x)
        x, balance = x + y, balance + loss
    return F.cross_entropy(self.head(x), tokens[:, 1:].flatten()), balance


@_real
def mixture_of_experts() -> Real:
    def step(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        loss, balance = model(tokens)
        model.backward([loss, balance], [torch.ones_like(loss), torch.full_like(balance, 0.1)])
        return loss, balance

    far = ("layers.0.experts.1", "layers.0.experts.3", "layers.1")
    return Real(SparseLanguageModel(), one_sequence(4), step, far)


class UNet(nn.Module):
    """Down, up, and a skip connection at each resolution."""

    class Convolutions(nn.Sequential):
        def __init__(self, channels_in: int, channels: int) -> None:
            super().__init__(
                nn.Conv2d(channels_in, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(inplace=True),
                nn.Conv2d(channels, channels, 3, padding=1),
                nn.ReLU(inplace=True),
            )

    def __init__(self, widths: tuple[int, ...] = (4, 8, 12)) -> None:
        super().__init__()
        before = (3, *widths[:-1])
        self.down = nn.ModuleList(map(self.Convolutions, before, widths))
        self.pool = nn.MaxPool2d(2)
        rising = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in rising)
        self.up = nn.ModuleList(self.Convolutions(2 * b, b) for _, b in rising)
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for number, block in enumerate(self.down):
            x = block(self.pool(x) if number else x)
            skips.append(x)
        skips.pop()
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat([skips.pop(), rise(x)], dim=1))
        return self.head(x)


@_real
def unet() -> Real:
    def make_batch(batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        images = torch.randn(batch_size, 3, 8, 8, generator=generator)
        return images, torch.randint(2, (batch_size, 8, 8), generator=generator)

    def step(model: Any, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        model.backward(loss)
        return loss, logits.argmax(1)

    return Real(UNet(), make_batch, step, ("down.1", "up.0", "rise.1", "head"))


class RecurrentLanguageModel(nn.Module):
    """Two cells that are called once per word, and a head tied to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.lower = nn.LSTMCell(16, 16)
        self.upper = nn.GRUCell(16, 16)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, WORDS)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        state, top, losses = None, None, []
        for now, following in zip(tokens.t()[:-1], tokens.t()[1:], strict=True):
            state = self.lower(self.dropout(self.embedding(now)), state)
            top = self.upper(state[0], top)
            losses.append(F.cross_entropy(self.head(top), following))
        return torch.stack(losses).mean()


@_real
def rnn() -> Real:
    return Real(RecurrentLanguageModel(), one_sequence(6), own_loss, ("upper", "dropout"))


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Recommendation: sums of embeddings, and the products of each pair of features."""

    def __init__(self, rows: tuple[int, ...] = (20, 50, 30)) -> None:
        super().__init__()
        self.bottom = _mlp(6, 16, 8)
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, 8, mode="sum") for n in rows)
        features = 1 + len(rows)
        self.top = _mlp(8 + features * (features - 1) // 2, 16, 1)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """``[batch, 6]``, ``[batch, tables, words per bag]`` -> ``[batch]``."""
        x = self.bottom(dense)
        bags = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([x, *bags], dim=1)
        products = features @ features.transpose(1, 2)
        row, column = torch.tril_indices(products.size(1), products.size(1), offset=-1)
        return self.top(torch.cat([x, products[:, row, column]], dim=1)).squeeze(1)


@_real
def dlrm() -> Real:
    def make_batch(batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        dense = torch.randn(batch_size, 6, generator=generator)
        categories = torch.randint(20, (batch_size, 3, 4), generator=generator)
        return dense, categories, torch.rand(batch_size, generator=generator).round()

    def step(model: Any, dense: Tensor, categories: Tensor, clicked: Tensor) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(model(dense, categories), clicked)
        model.backward(loss)
        return loss

    return Real(DLRM(), make_batch, step, ("tables", "top.2"))


@module_of(
    lambda users=30, items=50: {
        "factors": nn.ModuleDict(
            {"user": nn.Embedding(users, 8), "item": nn.Embedding(items, 8)}
        ),
        "features": nn.ModuleDict(
            {"user": nn.Embedding(users, 8), "item": nn.Embedding(items, 8)}
        ),
        "network": _mlp(16, 16, 8),
        "score": nn.Linear(16, 1),
    }
)
def NCF(self, user: Tensor, item: Tensor) -> Tensor:
    """Collaborative filtering: a product of embeddings beside a network over others."""
    product = self.factors["user"](user) * self.factors["item"](item)
    both = [self.features["user"](user), self.features["item"](item)]
    deep = self.network(torch.cat(both, dim=-1))
    return self.score(torch.cat([product, deep], dim=-1)).squeeze(-1)


@_real
def ncf() -> Real:
    def make_batch(batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        user = torch.randint(30, (batch_size,), generator=generator)
        return user, *(torch.randint(50, (batch_size,), generator=generator) for _ in range(2))

    def step(model: Any, user: Tensor, seen: Tensor, other: Tensor) -> Tensor:
        """An item that the user has seen should score above another."""
        loss = F.softplus(model(user, other) - model(user, seen)).mean()
        model.backward(loss)
        return loss

    return Real(NCF(), make_batch, step, ("factors.item", "features", "network"))


class Retrieval(nn.Module):
    """Answers from passages that it looks up itself.

    One encoder reads the question and all passages; the best ones are read by a
    decoder, whose answer is weighted by how well they fit, so that the retriever is
    trained through the answer (REALM, RAG).
    """

    @module_of(
        lambda embedding: {
            "embedding": embedding,
            "layers": nn.Sequential(*(_encoder_layer() for _ in range(2))),
        }
    )
    def Encoder(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """``[n, words]`` -> states ``[n, words, width]``, one vector each."""
        states = self.layers(self.embedding(tokens))
        return states, F.normalize(states.mean(1), dim=-1)

    @module_of(
        lambda embedding: {
            "embedding": embedding,
            "attention": nn.MultiheadAttention(16, 2, batch_first=True),
            "network": _mlp(16, 32, 16),
        }
    )
    def Reader(self, answer: Tensor, evidence: Tensor) -> Tensor:
        """``[n, words]``, ``[n, evidence, width]`` -> logits ``[n, words, WORDS]``."""
        x = self.embedding(answer)
        x = x + self.attention(x, evidence, evidence, need_weights=False)[0]
        return F.linear(x + self.network(x), self.embedding.weight)

    def __init__(self) -> None:
        super().__init__()
        self.encoder = self.Encoder(nn.Embedding(WORDS, 16))
        self.reader = self.Reader(nn.Embedding(WORDS, 16))

    def forward(
        self, question: Tensor, passages: Tensor, answer: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``[n, words]``, ``[n, passages, words]``, ``[n, words]`` -> loss and scores."""
        asked, query = self.encoder(question)
        states, keys = self.encoder(passages.flatten(0, 1))
        scores = (keys.view(*passages.shape[:2], -1) @ query.unsqueeze(-1)).squeeze(-1) * 4
        best, found = scores.topk(2, dim=1)
        states = states.view(*passages.shape, -1)
        likelihoods = []
        for place in found.t():
            chosen = states[torch.arange(len(place)), place]
            logits = self.reader(answer[:, :-1], torch.cat([asked, chosen], dim=1))
            losses = F.cross_entropy(logits.transpose(1, 2), answer[:, 1:], reduction="none")
            likelihoods.append(-losses.mean(1))
        weighted = torch.stack(likelihoods, dim=1) + best.log_softmax(1)
        return -weighted.logsumexp(1).mean(), scores


def _encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)


@_real
def retrieval() -> Real:
    def make_batch(batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        shapes = ((batch_size, 5), (batch_size, 4, 6), (batch_size, 5))
        return tuple(words(*shape, generator=generator) for shape in shapes)

    def step(
        model: Any, question: Tensor, passages: Tensor, answer: Tensor
    ) -> dict[str, Tensor]:
        loss, scores = model(question, passages, answer)
        model.backward(loss)
        return {"loss": loss, "scores": scores}

    return Real(Retrieval(), make_batch, step, ("encoder.layers", "reader.attention"))
