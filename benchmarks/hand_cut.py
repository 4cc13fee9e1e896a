"""Models of transformers, and the two stages of each as one cuts them by hand."""

import copy

from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB = 256


class Family(nn.Module):
    """A model that computes its loss, and its stages, with parameters in common.

    Args:
        width: of the hidden states.
        layers: of each stage.
        length: of a sequence.
        loss_of: the loss, of logits and token ids.
    """

    def __init__(self, width: int, layers: int, length: int, loss_of) -> None:
        super().__init__()
        self.whole = self.make(width, layers, length)
        self.loss_of = loss_of

    def forward(self, ids):
        return self.loss_of(self.whole(ids)["logits"], ids)

    def part(self, of: nn.Module, name: str, layers: nn.ModuleList, **others) -> nn.Module:
        """The model ``of`` with some of its layers, and other modules in places of its own."""
        part = copy.copy(of)
        part._modules = dict(of._modules) | {name: layers} | others
        return part


class Decoder(Family):
    """Embedding and some of the layers, the next ones, and the last ones with the head."""

    names = "model", "layers", "norm"

    @property
    def layers(self) -> nn.ModuleList:
        body, layers, _ = self.names
        return getattr(getattr(self.whole, body), layers)

    def there(self) -> list[nn.Module]:
        """The modules on rank 1."""
        body, _, norm = self.names
        last = getattr(getattr(self.whole, body), norm)
        return [*self.layers[len(self.layers) // 2 :], last, self.whole.lm_head]

    def stages(self, count: int) -> list[nn.Module]:
        body, layers, norm = self.names
        whole = getattr(self.whole, body)
        parts = in_parts(self.layers, count)
        bodies = [self.part(whole, layers, part, **{norm: nn.Identity()}) for part in parts]
        bodies[-1]._modules[norm] = getattr(whole, norm)
        heads = [nn.Identity() for _ in parts[1:]] + [self.whole.lm_head]
        return [Stage(*both, not i) for i, both in enumerate(zip(bodies, heads, strict=True))]


def in_parts(layers: nn.ModuleList, count: int) -> list[nn.ModuleList]:
    bounds = [i * len(layers) // count for i in range(count + 1)]
    return [layers[at:to] for at, to in zip(bounds, bounds[1:], strict=False)]


class Stage(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Module, is_first: bool) -> None:
        super().__init__()
        self.body, self.head = body, head
        self.name = "input_ids" if is_first else "inputs_embeds"

    def forward(self, x):
        return self.head(self.body(**{self.name: x}).last_hidden_state)


def sizes(config, **named):
    config.update({"use_cache": False, "tie_word_embeddings": False, **named})
    return config


class GPT2(Decoder):
    names = "transformer", "h", "ln_f"

    def make(self, width: int, layers: int, length: int) -> nn.Module:
        config = GPT2Config(
            n_embd=width, n_layer=2 * layers, n_head=4, n_positions=length, vocab_size=VOCAB
        )
        no_drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2LMHeadModel(sizes(config, **no_drop))


class Llama(Decoder):
    def make(self, width: int, layers: int, length: int) -> nn.Module:
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=8 * width // 3,
            num_hidden_layers=2 * layers,
            num_attention_heads=4,
            max_position_embeddings=length,
            vocab_size=VOCAB,
        )
        return LlamaForCausalLM(sizes(config))


class T5(Family):
    """The encoder, then the decoder: of its blocks, 7 have the operations of 5 here."""

    def make(self, width: int, layers: int, length: int) -> nn.Module:
        config = T5Config(
            d_model=width,
            d_kv=width // 4,
            d_ff=4 * width,
            num_heads=4,
            num_layers=layers + 1,
            num_decoder_layers=layers - 1,
            dropout_rate=0.0,
            vocab_size=VOCAB,
            decoder_start_token_id=0,
            tie_word_embeddings=False,
        )
        return T5ForConditionalGeneration(sizes(config, scale_decoder_outputs=False))

    def forward(self, ids):
        return self.loss_of(self.whole(ids, decoder_input_ids=ids)["logits"], ids)

    def there(self) -> list[nn.Module]:
        return [*self.whole.decoder.block]

    def stages(self, count: int) -> list[nn.Module]:
        return [Encoder(self.whole), DecoderAndHead(self.whole)]


class Encoder(nn.Module):
    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.encoder, self.shared = whole.encoder, whole.decoder.embed_tokens

    def forward(self, ids):
        return self.encoder(ids).last_hidden_state, self.shared(ids)


class DecoderAndHead(nn.Module):
    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.decoder, self.head = whole.decoder, whole.lm_head

    def forward(self, states, x):
        out = self.decoder(inputs_embeds=x, encoder_hidden_states=states)
        return self.head(out.last_hidden_state)


FAMILIES = {"gpt2": GPT2, "llama": Llama, "t5": T5}
