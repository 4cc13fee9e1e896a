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
    """Embedding and half of the layers, then the other half and the head."""

    body, layers = "model", "layers"
    norm = "norm"

    def _body(self) -> nn.Module:
        return getattr(self.whole, self.body)

    def _second_half(self) -> nn.ModuleList:
        layers = getattr(self._body(), self.layers)
        return layers[len(layers) // 2 :]

    def there(self) -> list[nn.Module]:
        """The modules on rank 1."""
        return [*self._second_half(), getattr(self._body(), self.norm), self.whole.lm_head]

    def stages(self) -> tuple[nn.Module, nn.Module]:
        layers = getattr(self._body(), self.layers)
        first = layers[: len(layers) // 2]
        here = self.part(self._body(), self.layers, first, **{self.norm: nn.Identity()})
        there = self.part(self._body(), self.layers, self._second_half())
        return OfIds(here), OfHidden(there, self.whole.lm_head)


class OfIds(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, ids):
        return self.body(ids).last_hidden_state


class OfHidden(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x):
        return self.head(self.body(inputs_embeds=x).last_hidden_state)


def sizes(config, **named):
    config.update({"use_cache": False, "tie_word_embeddings": False, **named})
    return config


class GPT2(Decoder):
    body, layers, norm = "transformer", "h", "ln_f"

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
        )
        return T5ForConditionalGeneration(sizes(config))

    def forward(self, ids):
        return self.loss_of(self.whole(ids, decoder_input_ids=ids)["logits"], ids)

    def there(self) -> list[nn.Module]:
        decoder = self.whole.decoder
        return [*decoder.block, decoder.final_layer_norm, self.whole.lm_head]

    def stages(self) -> tuple[nn.Module, nn.Module]:
        return Encoder(self.whole), DecoderAndHead(self.whole)


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
