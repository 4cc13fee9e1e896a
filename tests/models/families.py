"""Small models of transformers' families that are split, their batches and their loss."""

import importlib
import types
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from tests.reference.whole_job import WholeJob

VOCABULARY = 61
CLASSES = 5
TEXTS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = dict.fromkeys(
    ["attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "embed_dropout"]
    + ["resid_dropout", "hidden_dropout", "attention_probs_dropout_prob", "dropout"]
    + ["hidden_dropout_prob", "dropout_rate"],
    0.0,
)
GPT = {**TEXTS, "n_embd": 40, "n_layer": 2, "n_head": 5, "n_inner": 37, "n_positions": 24}
BERT = {
    **TEXTS,
    "hidden_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 37,
    "max_position_embeddings": 24,
}
LLAMA = {
    **TEXTS,
    "hidden_size": 24,
    "head_dim": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
}
MIXTRAL = {
    **LLAMA,
    "intermediate_size": 15,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}
T5 = {
    **TEXTS,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "d_model": 12,
    "d_kv": 4,
    "d_ff": 19,
    "num_heads": 5,
    "num_layers": 2,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 8,
}
VIT = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 20,
    "num_attention_heads": 5,
    "intermediate_size": 23,
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
    "num_labels": CLASSES,
}
GPTNEO = {
    **{key: value for key, value in BERT.items() if key != "num_attention_heads"},
    "num_hidden_layers": 2,
    "num_heads": 5,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 3,
}


class Family(NamedTuple):
    """A model of two layers.

    Attributes:
        folder: of transformers.
        config, model: names of the classes.
        options: of the config.
        split: paths of what is split in a layer.
        decoder: name of the class with cross-attention; "": there is none.
    """

    folder: str
    config: str
    model: str
    options: dict[str, Any]
    split: list[str]
    decoder: str = ""


GPT_PARTS = ["transformer.h.%d.attn", "transformer.h.%d.mlp"]
LLAMA_PARTS = ["model.layers.%d.self_attn", "model.layers.%d.mlp"]
T5_PARTS = ["encoder.block.%d.layer.0.SelfAttention", "encoder.block.%d.layer.1.DenseReluDense"]
T5_PARTS += [
    f"decoder.block.%d.layer.{number}.{part}"
    for number, part in enumerate(("SelfAttention", "EncDecAttention", "DenseReluDense"))
]


def of_bert(name: str, decoder: str) -> Family:
    folder = name.lower()
    parts = [f"{folder}.encoder.layer.%d", f"{folder}.encoder.layer.%d.attention"]
    return Family(folder, f"{name}Config", f"{name}ForMaskedLM", BERT, parts, decoder)


def of_llama(**options: Any) -> Family:
    options = {**LLAMA, **options}
    return Family("llama", "LlamaConfig", "LlamaForCausalLM", options, LLAMA_PARTS)


def of_t5(**options: Any) -> Family:
    model = "T5ForConditionalGeneration"
    return Family("t5", "T5Config", model, {**T5, **options}, T5_PARTS)


def of_mixtral(**options: Any) -> Family:
    parts = [LLAMA_PARTS[0], f"{LLAMA_PARTS[1]}.experts"]
    options = {**MIXTRAL, **options}
    return Family("mixtral", "MixtralConfig", "MixtralForCausalLM", options, parts)


FAMILIES = {
    "gpt2": Family("gpt2", "GPT2Config", "GPT2LMHeadModel", GPT, GPT_PARTS, "GPT2LMHeadModel"),
    "gptj": Family(
        "gptj", "GPTJConfig", "GPTJForCausalLM", {**GPT, "rotary_dim": 4}, GPT_PARTS
    ),
    "gptneo": Family(
        "gpt_neo",
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        GPTNEO,
        ["transformer.h.%d.attn.attention", "transformer.h.%d.mlp"],
    ),
    "gptneox": Family(
        "gpt_neox",
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        BERT,
        ["gpt_neox.layers.%d.attention", "gpt_neox.layers.%d.mlp"],
    ),
    "bert": of_bert("Bert", "BertLMHeadModel"),
    "roberta": of_bert("Roberta", "RobertaForCausalLM"),
    "llama": of_llama(),
    "llama, 1 head of keys": of_llama(
        num_key_value_heads=1, attention_bias=True, mlp_bias=True
    ),
    # Of 3 ranks one has a query for the first head of keys, and two for the second.
    "llama, 2 heads of keys": of_llama(num_attention_heads=8, num_key_value_heads=2),
    "t5": of_t5(),
    "t5, gated": of_t5(feed_forward_proj="gated-gelu"),
    "vit": Family(
        "vit",
        "ViTConfig",
        "ViTForImageClassification",
        VIT,
        ["vit.layers.%d.attention", "vit.layers.%d.mlp"],
    ),
    "mixtral": of_mixtral(),
    "mixtral, batched": of_mixtral(
        experts_implementation="batched_mm", intermediate_size=80, sliding_window=4
    ),
}
WITHOUT_SDPA = {"gptj", "gptneo"}

OTHERS = {
    "num_layers": 2,
    "init_std": 0.2,
    "initializer_range": 0.2,
    "max_position_embeddings": 32,
    "scale_embedding": True,
}
XGLM = {**TEXTS, **OTHERS, "d_model": 20, "ffn_dim": 23, "attention_heads": 5}
BIOGPT = {**BERT, **OTHERS, "hidden_size": 20, "intermediate_size": 23}

# Those whose embedding has a factor, and shares its weight with the head.
TIED = {
    folder: Family(folder, config, model, {**options, "tie_word_embeddings": True}, [])
    for folder, config, model, options in (
        ("gemma", "GemmaConfig", "GemmaForCausalLM", LLAMA),
        ("gemma2", "Gemma2Config", "Gemma2ForCausalLM", LLAMA),
        ("gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM", LLAMA),
        ("xglm", "XGLMConfig", "XGLMForCausalLM", XGLM),
        ("biogpt", "BioGptConfig", "BioGptForCausalLM", BIOGPT),
    )
}


def unmarked(name: str, cls: str = "", **options: Any) -> nn.Module:
    """A family's model, of another class and with other options, if any are given."""
    import transformers

    one = (FAMILIES | TIED)[name]
    config = getattr(transformers, one.config)(**{**NO_DROPOUT, **one.options, **options})
    return getattr(transformers, cls or one.model)(config)


def made(name: str, cls: str = "", **options: Any) -> nn.Module:
    """The same, to be split, in training mode and in float64."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    with smp.tensor_parallelism():
        net = unmarked(name, cls, **options)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() == 1:  # biases and norms: zero or one so far
                parameter += torch.randn_like(parameter) / 8
    return net.train()


def decoder(name: str, crosses: bool = True, **options: Any) -> nn.Module:
    """A family's decoder, with cross-attention or without."""
    options |= {"is_decoder": True, "add_cross_attention": crosses}
    return made(name, FAMILIES[name].decoder, **options)


class TorchInFloat64(types.ModuleType):
    """torch for files of transformers that compute norms, softmax or routes in float32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def compute_in_float64(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have a rank compute all of a family in float64."""
    folder = (FAMILIES | TIED)[name].folder
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    monkeypatch.setattr(modeling, "torch", TorchInFloat64("torch"))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)


Batch = tuple[dict[str, Tensor], Tensor]  # what the model is given, and labels


def tokens(rank: int, step: int, samples: int | None = None) -> Batch:
    """Other numbers of samples on each rank, and something else in each of four steps.

    Step 0: other lengths, padding on odd ranks.  1: padding alone.  2: other lengths, padding
    in front on even ranks, which count positions from behind it.  3: neither.
    """
    generator = torch.Generator().manual_seed(100 * step + rank)
    shape = samples or 1 + 2 * rank, 6 + rank if step % 2 == 0 else 6
    ids = torch.randint(3, VOCABULARY, shape, generator=generator)
    mask = torch.ones_like(ids)
    given = {"input_ids": ids, "attention_mask": mask}
    if rank % 2 and step % 4 < 2:
        mask[-1, -2:] = 0
    if rank % 2 == 0 and step % 4 == 2:
        mask[0, :2] = 0
        given["position_ids"] = mask.cumsum(1)
    return given, ids


def routed(rank: int, step: int, samples: int | None = None) -> Batch:
    """With how evenly the experts get this rank's tokens, in the loss."""
    given, ids = tokens(rank, step, samples)
    return given | {"output_router_logits": True}, ids


def two_sequences(rank: int, step: int, samples: int | None = None) -> Batch:
    """Ids and mask of the encoder, and ids of the decoder, longer on other ranks."""
    given, ids = tokens(rank, step, samples)
    given.pop("position_ids", None)
    to = ids.flip(1)[:, : 5 - rank % 2]
    return given | {"decoder_input_ids": to}, to


def images(rank: int, step: int, samples: int | None = None) -> Batch:
    """Pixels, a mask of the class and 4 patches on some ranks only, and labels."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    count = samples or 1 + 2 * rank
    given = {"pixel_values": torch.randn(count, 3, 8, 8, generator=generator)}
    if rank % 2:
        given["attention_mask"] = torch.tensor([[1, 1, 0, 1, 0]]).expand(count, -1)
    return given, torch.randint(0, CLASSES, (count,), generator=generator)


BATCHES = {"t5": two_sequences, "vit": images, "mixtral": routed}


def batch_of(name: str, rank: int, step: int, samples: int | None = None) -> Batch:
    """A rank's batch for a family."""
    return BATCHES.get((FAMILIES | TIED)[name].folder, tokens)(rank, step, samples)


def loss(model: nn.Module, given: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Of classes, or of each position's next id; transformers' own is in float32."""
    out = model(**given)
    if labels.dim() == 1:
        return F.cross_entropy(out.logits, labels)
    found = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    balance = out.get("aux_loss")
    return found if balance is None else found + 0.5 * balance


def whole_job(name: str, net: nn.Module | None = None, same: bool = False) -> WholeJob:
    """A family's model, or a given one, with the family's batches; on all ranks the same."""

    def batch(rank: int, step: int) -> Batch:
        return batch_of(name, 1 if same else rank, step)

    return WholeJob(made(name) if net is None else net, loss, batch)
