"""Llama, T5, ViT and Mixtral, split in place, equal the plain models over all samples.

The reference is ``tests/reference/whole_job.py``, in float64.
"""

import importlib
import importlib.util
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from smp.nn.huggingface import mixtral as mixtral_plan
from smp.nn.huggingface.llama import shared_heads
from smp.slicing.slices import slices_of
from smp.tensor_parallel import group
from tests.ranks import on_ranks
from tests.reference.whole_job import WholeJob, assert_near, split_over_all_ranks

VOCABULARY = 61
CLASSES = 5


class TorchInFloat64(types.ModuleType):
    """torch for files of transformers that compute norms, softmax or routes in float32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def compute_in_float64(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Have a rank compute all of a family in float64."""
    folder = (FAMILIES | TIED)[family].folder
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    monkeypatch.setattr(modeling, "torch", TorchInFloat64("torch"))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)


# ------------------------------------------------------------------------------ families


def llama(heads: int = 6, shared: int = 3, **options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=24,
            head_dim=4,
            num_attention_heads=heads,
            num_key_value_heads=shared,
            intermediate_size=29,
            num_hidden_layers=2,
            initializer_range=0.2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **options,
        )
    )


def t5(**options: Any) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=12,
            d_kv=4,
            d_ff=19,
            num_heads=5,
            num_layers=2,
            relative_attention_num_buckets=6,
            relative_attention_max_distance=8,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            **options,
        )
    )


def vit(**options: Any) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=4,
            hidden_size=20,
            num_attention_heads=5,
            intermediate_size=23,
            num_hidden_layers=2,
            initializer_range=0.2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=CLASSES,
            **options,
        )
    )


def mixtral(channels: int = 15, **options: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=24,
            head_dim=4,
            num_attention_heads=6,
            num_key_value_heads=3,
            intermediate_size=channels,
            num_local_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            initializer_range=0.2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **options,
        )
    )


def tokens(rank: int, step: int, uneven: bool = True) -> tuple[Tensor, Tensor]:
    """Ids and mask; other numbers of samples, lengths and padding on each rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    samples, length = (1 + 2 * rank, 6 + 2 * rank) if uneven else (2, 6)
    ids = torch.randint(3, VOCABULARY, (samples, length), generator=generator)
    mask = torch.ones_like(ids)
    if uneven and rank % 2:
        mask[:, -2:] = 0
    return ids, mask


def two_sequences(rank: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and mask of the encoder, and ids of the decoder, longer on other ranks."""
    ids, mask = tokens(rank, step)
    return ids, mask, ids.flip(1)[:, : 5 - rank % 2]


def images(rank: int, step: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Pixels, a mask of the class and 4 patches on some ranks only, and labels."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    samples = 1 + 2 * rank
    pixels = torch.randn(samples, 3, 8, 8, generator=generator)
    mask = torch.tensor([[1, 1, 0, 1, 0]]).expand(samples, -1) if rank % 2 else None
    return pixels, mask, torch.randint(0, CLASSES, (samples,), generator=generator)


def next_token_loss(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


def balanced_loss(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """With how evenly the experts get this rank's tokens."""
    out = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
    logits = out.logits[:, :-1].reshape(-1, VOCABULARY)
    return F.cross_entropy(logits, ids[:, 1:].reshape(-1)) + 0.5 * out.aux_loss


def translation_loss(model: nn.Module, ids: Tensor, mask: Tensor, to: Tensor) -> Tensor:
    out = model(input_ids=ids, attention_mask=mask, decoder_input_ids=to)
    return F.cross_entropy(out.logits[:, :-1].reshape(-1, VOCABULARY), to[:, 1:].reshape(-1))


def label_loss(model: nn.Module, pixels: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(pixel_values=pixels, attention_mask=mask).logits, labels)


class Family(NamedTuple):
    folder: str  # of transformers
    make: Callable[..., nn.Module]
    options: dict[str, Any]
    loss: Callable[..., Tensor]
    batch: Callable[[int, int], tuple]
    split: int  # modules


FAMILIES = {
    "llama": Family("llama", llama, {}, next_token_loss, tokens, 4),
    "llama, 1 head of keys": Family(
        "llama",
        llama,
        {"shared": 1, "attention_bias": True, "mlp_bias": True},
        next_token_loss,
        tokens,
        4,
    ),
    # Of 3 ranks one has a query for the first head of keys, and two for the second.
    "llama, 2 heads of keys": Family(
        "llama", llama, {"heads": 8, "shared": 2}, next_token_loss, tokens, 4
    ),
    "t5": Family("t5", t5, {}, translation_loss, two_sequences, 10),
    "t5, gated": Family(
        "t5", t5, {"feed_forward_proj": "gated-gelu"}, translation_loss, two_sequences, 10
    ),
    "vit": Family("vit", vit, {}, label_loss, images, 4),
    "mixtral": Family(
        "mixtral", mixtral, {"experts_implementation": "eager"}, balanced_loss, tokens, 4
    ),
    "mixtral, batched": Family(
        "mixtral",
        mixtral,
        {"experts_implementation": "batched_mm", "channels": 80, "sliding_window": 4},
        balanced_loss,
        tokens,
        4,
    ),
}


def tied(name: str, model: str, **options: Any) -> Callable[..., nn.Module]:
    """Makes a small model whose embedding has a factor, and shares its weight with the head."""

    def make(**more: Any) -> nn.Module:
        import transformers

        given = {
            "vocab_size": VOCABULARY,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": True,
            **options,
            **more,
        }
        return getattr(transformers, model)(getattr(transformers, f"{name}Config")(**given))

    return make


GEMMA = {
    "hidden_size": 24,
    "head_dim": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
}
XGLM = {
    "d_model": 20,
    "ffn_dim": 23,
    "num_layers": 2,
    "attention_heads": 5,
    "init_std": 0.2,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "scale_embedding": True,
}
BIOGPT = {
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 23,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "scale_embedding": True,
}

TIED = {
    folder: Family(folder, tied(name, model, **options), {}, next_token_loss, tokens, 0)
    for folder, name, model, options in (
        ("gemma", "Gemma", "GemmaForCausalLM", GEMMA),
        ("gemma2", "Gemma2", "Gemma2ForCausalLM", GEMMA),
        ("gemma3", "Gemma3Text", "Gemma3ForCausalLM", GEMMA),
        ("xglm", "XGLM", "XGLMForCausalLM", XGLM),
        ("biogpt", "BioGpt", "BioGptForCausalLM", BIOGPT),
    )
}


def made(family: str, **options: Any) -> nn.Module:
    """A family's small model, to be split, in training mode."""
    torch.manual_seed(3)
    one = (FAMILIES | TIED)[family]
    with smp.tensor_parallelism():
        net = one.make(**one.options, **options)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() == 1:  # biases and norms: zero or one so far
                parameter += torch.randn_like(parameter) / 8
    return net.train()


# ------------------------------------------------------------------------------ equality


def check_equality(
    monkeypatch: pytest.MonkeyPatch, family: str, attention: str, **config: Any
) -> None:
    compute_in_float64(monkeypatch, family)
    split_over_all_ranks(**config)
    net = made(family, attn_implementation=attention)
    job = WholeJob(net, FAMILIES[family].loss, FAMILIES[family].batch)
    split = [one for one in job.model._smp_split if not one.reason]
    assert len(split) == FAMILIES[family].split, split
    for step in range(2):
        job.step(step, max_norm=0.3)
    job.check_parameters()
    whole = job.model.state_dict()
    for name, value in job.plain.state_dict().items():
        assert_near(whole[name], value, name)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(10)
@on_ranks(2, timeout_s=120)
def test_a_family_equals_the_plain_model(family, attention, monkeypatch):
    """Losses, gradients, norms, parameters, state; uneven samples, lengths, heads, padding."""
    check_equality(monkeypatch, family, attention)


@pytest.mark.parametrize("prescaled", [False, True])
@pytest.mark.parametrize("family", TIED)
@pytest.mark.sample(5)
@on_ranks(2, timeout_s=120)
def test_an_embedding_with_a_factor_that_is_tied_is_split(family, prescaled, monkeypatch):
    compute_in_float64(monkeypatch, family)
    split_over_all_ranks(prescaled_batch=prescaled)
    net = made(family, attn_implementation="eager")
    head, embedding = net.get_output_embeddings(), net.get_input_embeddings()
    assert type(embedding) is not nn.Embedding and head.weight is embedding.weight
    job = WholeJob(
        net, next_token_loss, lambda rank, step: tokens(rank * (not prescaled), step)
    )
    assert head.weight is embedding.weight and len(head.weight) < VOCABULARY
    for step in range(2):
        job.step(step, max_norm=0.3)
    job.check_parameters()


@pytest.mark.stress
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(3, 4, timeout_s=240)
def test_a_family_equals_the_plain_model_on_more_ranks(family, attention, monkeypatch):
    check_equality(monkeypatch, family, attention)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(4)
@on_ranks(4, timeout_s=120)
def test_a_family_in_a_pipeline_equals_the_plain_model(family, attention, monkeypatch):
    check_equality(
        monkeypatch,
        family,
        attention,
        tensor_parallel_degree=2,
        pipeline_parallel_degree=2,
    )


@pytest.mark.parametrize("family", ["llama, 1 head of keys", "t5", "vit", "mixtral"])
@on_ranks(2, timeout_s=120)
def test_a_family_on_ranks_that_are_fed_the_same_batch(family, monkeypatch):
    compute_in_float64(monkeypatch, family)
    split_over_all_ranks(prescaled_batch=True)
    one = FAMILIES[family]
    job = WholeJob(made(family), one.loss, lambda rank, step: one.batch(1, step))
    for step in range(2):
        job.step(step, max_norm=0.3)
    job.check_parameters()


@on_ranks(2, timeout_s=120)
def test_a_cache_of_prompts_of_different_lengths_is_refused(monkeypatch):
    compute_in_float64(monkeypatch, "llama")
    split_over_all_ranks()
    model = smp.DistributedModel(made("llama")).eval()
    ids = torch.ones(1, 6 - 3 * smp.rank(), dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="different lengths .* together with a cache"):
        model.get_module().generate(ids, max_new_tokens=2, min_new_tokens=2)


@pytest.mark.parametrize("prescaled", [False, True], ids=["own samples", "same samples"])
@on_ranks(2)
def test_a_cache_that_the_script_has_filled_is_refused(prescaled):
    split_over_all_ranks(prescaled_batch=prescaled)
    model = smp.DistributedModel(made("llama")).eval()
    config = model.get_module().config
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    cache = importlib.import_module("transformers").DynamicCache()
    cache.update(torch.zeros(2, heads, 3, width), torch.zeros(2, heads, 3, width), 0)
    wanted = "this rank's heads" if prescaled else "the 4 samples of all ranks"
    match = rf"0.self_attn' is split .* shape \[2, {heads}, 3, {width}\] instead of {wanted}"
    ids = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=match), torch.no_grad():
        model(input_ids=ids, past_key_values=cache)


@on_ranks(2)
def test_a_cache_that_prefixes_train_through_is_refused():
    """Each rank would have the gradient of its own heads, where they share one head of keys."""
    split_over_all_ranks(prescaled_batch=True)
    model = smp.DistributedModel(made("llama, 1 head of keys"))
    config = model.get_module().config
    width = config.hidden_size // config.num_attention_heads
    prefix = torch.zeros(2, 1, 3, width, requires_grad=True)
    cache = importlib.import_module("transformers").DynamicCache()
    cache.update(prefix, prefix, 0)
    match = r"0.self_attn' is split .* shape \[2, 1, 3"
    with pytest.raises(NotImplementedError, match=match):
        model(input_ids=torch.ones(2, 3, dtype=torch.int64), past_key_values=cache)


@pytest.mark.parametrize("family", ["llama", "t5", "vit", "mixtral"])
@on_ranks(2, timeout_s=120)
def test_a_checkpointed_family_equals_the_plain_model(family, monkeypatch):
    """Layers that run again in backward gather again."""
    compute_in_float64(monkeypatch, family)
    split_over_all_ranks()
    job = WholeJob(made(family), FAMILIES[family].loss, FAMILIES[family].batch)
    job.net.gradient_checkpointing_enable()
    ran: list[nn.Module] = []
    names = ("q_proj", "SelfAttention.q")
    path = next(name for name, _ in job.net.named_modules() if name.endswith(names))
    first = job.net.get_submodule(path.rpartition(".")[0])
    first.register_forward_hook(lambda module, *_: ran.append(module))
    job.step(0)
    assert len(ran) == 2


class Adapted(nn.Module):
    """LoRA: a frozen linear, and a product of two small ones that trains."""

    def __init__(self, base: nn.Linear, in_dict: bool = False) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        down, up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features)
        self.lora_A = nn.ModuleDict({"default": down}) if in_dict else down
        self.lora_B = nn.ModuleDict({"default": up}) if in_dict else up

    def forward(self, x: Tensor) -> Tensor:
        down, up = self.lora_A, self.lora_B
        if isinstance(down, nn.ModuleDict):
            down, up = down["default"], up["default"]
        return self.base_layer(x) + 2.0 * up(down(x))


def adapted(family: str) -> nn.Module:
    net = made(family)
    net.requires_grad_(False)
    torch.manual_seed(4)
    for layer in net.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and name != "k_proj":
                    setattr(parent, name, Adapted(child, in_dict=name == "q_proj"))
    return net


@pytest.mark.parametrize("prescaled", [False, True], ids=["own samples", "same samples"])
@pytest.mark.parametrize("family", ["llama", "llama, 1 head of keys"])
@on_ranks(2, 3, timeout_s=120)
def test_adapted_linears_of_a_region_are_split_with_it(family, prescaled, monkeypatch):
    """LoRA: only small linears train, around frozen ones that lead in and out."""
    compute_in_float64(monkeypatch, family)
    split_over_all_ranks(prescaled_batch=prescaled)
    net = adapted(family)
    job = WholeJob(
        net, next_token_loss, lambda rank, step: tokens(1 if prescaled else rank, step)
    )
    assert not any(one.reason for one in job.model._smp_split)
    for linear in job.net.modules():
        if isinstance(linear, nn.Linear):
            assert linear.weight.shape == (linear.out_features, linear.in_features)
    for step in range(2):
        job.step(step, max_norm=0.3)
    job.check_parameters()
    whole = job.model.state_dict()
    for name, value in job.plain.state_dict().items():
        assert_near(whole[name], value, name)


@on_ranks(2, timeout_s=120)
def test_another_wrapper_of_a_regions_linear_is_named():
    split_over_all_ranks()
    net = adapted("llama")
    wrapper = net.model.layers[1].mlp.up_proj
    wrapper.magnitude = nn.Parameter(torch.ones(29))
    with pytest.raises(NotImplementedError, match=r"'model.layers.1.mlp.up_proj' .* magnit"):
        smp.DistributedModel(net)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {
        "vocab_size": VOCABULARY,
        "n_positions": 16,
        "n_embd": 12,
        "n_layer": 2,
        "n_head": 3,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, **ends))


PEFT_TARGETS = {
    "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
}


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("family", PEFT_TARGETS)
@on_ranks(4, timeout_s=120)
def test_adapters_of_peft(family, pipeline, monkeypatch, tmp_path):
    """They train, what they are around does not, and peft writes and reads them."""
    peft = importlib.import_module("peft")
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": pipeline})
    config = peft.LoraConfig(
        r=2,
        target_modules=PEFT_TARGETS[family],
        init_lora_weights=False,
        fan_in_fan_out=family == "gpt2",
        task_type="CAUSAL_LM",
    )

    def base() -> nn.Module:
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(3)
        if family == "gpt2":
            with smp.tensor_parallelism():
                return gpt2()
        compute_in_float64(monkeypatch, family)
        return made(family)

    job = WholeJob(peft.get_peft_model(base(), config), next_token_loss, tokens)
    assert not any(one.reason for one in job.model._smp_split)
    every = job.plain.named_parameters(remove_duplicate=False)
    frozen = {name: p.clone() for name, p in every if not p.requires_grad}
    for step in range(2):
        job.step(step, max_norm=0.3)
    job.check_parameters()
    whole = job.model.state_dict()
    assert all(torch.equal(whole[name], value) for name, value in frozen.items())
    assert all("lora_" in name for name in whole.keys() - frozen.keys())
    if smp.rank() == 0:
        job.model.save_pretrained(tmp_path, state_dict=whole)
        again = peft.PeftModel.from_pretrained(base(), tmp_path).state_dict()
        for name, value in job.plain.state_dict().items():
            assert_near(again[name], value, name)


# ------------------------------------------------------------------------------- outputs


@pytest.mark.parametrize("family", ["llama", "llama, 1 head of keys", "t5", "mixtral"])
@on_ranks(2, timeout_s=120)
def test_a_family_generates_what_the_plain_model_does(family, monkeypatch):
    """With a cache, each rank from its own prompts."""
    compute_in_float64(monkeypatch, family)
    split_over_all_ranks()
    plain = made(family).eval()
    model = smp.DistributedModel(made(family).eval())
    ids, mask = tokens(smp.rank(), 0, uneven=False)
    options = {
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    want = plain.generate(ids, attention_mask=mask, **options)
    got = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        assert_near(a, b, "logits")


@pytest.mark.parametrize("family", ["llama", "t5"])
@on_ranks(2, timeout_s=120)
def test_a_rank_whose_sequences_have_ended_goes_on_until_all_have(family, monkeypatch):
    compute_in_float64(monkeypatch, family)
    split_over_all_ranks()
    plain = made(family).eval()
    model = smp.DistributedModel(made(family).eval())
    ids, mask = tokens(smp.rank(), 0, uneven=False)
    options = {"max_new_tokens": 7, "do_sample": False}
    longest = plain.generate(ids, attention_mask=mask, eos_token_id=[], **options)
    # The first rank's end after two tokens, those of the other do not.
    ends = longest[:, -6].tolist() if smp.rank() == 0 else []
    want = plain.generate(
        ids, attention_mask=mask, eos_token_id=ends, pad_token_id=0, **options
    )
    assert want.size(1) < longest.size(1) or smp.rank() == 1
    got = model.generate(ids, attention_mask=mask, eos_token_id=ends, pad_token_id=0, **options)
    assert torch.equal(got, want)


SEARCHES = {
    "beam search": ({"num_beams": 2}, 2),
    "assisted decoding": ({"prompt_lookup_num_tokens": 2}, 1),
}


@pytest.mark.parametrize("family", ["llama", "t5"])
@on_ranks(2, timeout_s=120)
def test_searches_that_rearrange_caches_are_refused(family, monkeypatch):
    """They know their own samples; without a cache beams are the plain model's."""
    compute_in_float64(monkeypatch, family)
    split_over_all_ranks()
    plain = made(family).eval()
    model = smp.DistributedModel(made(family).eval())
    for search, (options, samples) in SEARCHES.items():
        ids = tokens(smp.rank(), 0, uneven=False)[0][:samples]
        with pytest.raises(
            NotImplementedError, match=rf"by {search} .* TP_GROUP: pass use_cache=False"
        ):
            model.generate(ids, max_new_tokens=3, **options)
    options = {"num_beams": 2, "max_new_tokens": 4, "min_new_tokens": 4, "use_cache": False}
    ids = tokens(smp.rank(), 0, uneven=False)[0]
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


@on_ranks(2, timeout_s=120)
def test_beams_of_a_model_whose_attentions_are_whole(monkeypatch):
    """Caches are of own samples there."""
    compute_in_float64(monkeypatch, "llama")
    split_over_all_ranks()
    plain, net = made("llama").eval(), made("llama").eval()
    for layer in net.model.layers:
        smp.set_tensor_parallelism(layer.self_attn, False)
    model = smp.DistributedModel(net)
    options = {"num_beams": 2, "max_new_tokens": 4, "min_new_tokens": 4}
    ids = tokens(smp.rank(), 0, uneven=False)[0]
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def attend_in_packed_sequences(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float,
    position_ids: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As flash attention: a sequence begins where positions begin again."""
    number = (position_ids == 0).cumsum(-1)
    seen = number[:, None, :, None] == number[:, None, None, :]
    seen = seen & torch.ones(seen.shape[-2:], dtype=torch.bool).tril()
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)
    return out.transpose(1, 2), None


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@on_ranks(2, timeout_s=120)
def test_positions_of_packed_sequences_are_gathered(family, monkeypatch):
    from transformers import AttentionInterface

    AttentionInterface.register("packed", attend_in_packed_sequences)
    compute_in_float64(monkeypatch, family)
    split_over_all_ranks()

    def loss(model: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
        logits = model(input_ids=ids, position_ids=positions).logits[:, :-1]
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))

    def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
        ids, _ = tokens(rank, step, uneven=False)
        lengths = (2 + rank, 4 - rank)  # other ones on each rank
        return ids, torch.cat([torch.arange(n) for n in lengths]).expand(len(ids), -1)

    job = WholeJob(made(family, attn_implementation="packed"), loss, batch)
    job.step(0)


class Block(nn.Module):
    """A layer of a family in a model of a user's own, which makes no mask."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.rotary = net.model.rotary_emb if hasattr(net, "model") else None
        self.block = (net.model.layers if self.rotary else net.transformer.h)[0]

    def forward(self, x: Tensor) -> Tensor:
        options = {}
        if self.rotary is not None:
            positions = torch.arange(x.size(1))[None]
            options["position_embeddings"] = self.rotary(x, positions)
        out = self.block(x, **options)
        return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("attention", ["eager", "sdpa", "of one's own"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@on_ranks(2)
def test_padding_is_not_seen_where_a_layer_gets_no_mask(family, attention, monkeypatch):
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("of one's own", sdpa_attention_forward)
    split_over_all_ranks()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    with smp.tensor_parallelism():
        net = gpt2() if family == "gpt2" else llama()
    compute_in_float64(monkeypatch, "llama")
    net.config._attn_implementation = attention

    def batch(rank: int, step: int, uneven: bool = True) -> tuple[Tensor]:
        draw = torch.Generator().manual_seed(rank)
        width = net.config.hidden_size
        return (torch.randn(2 + rank, 4 + 3 * rank * uneven, width, generator=draw),)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    job = WholeJob(Block(net), loss, batch)
    if attention == "of one's own":
        with pytest.raises(ValueError, match=r"no attention_mask on tp_rank 0, .* \[4, 7\]"):
            job.model(*batch(smp.rank(), 0))
        job.batch = lambda rank, step: batch(rank, step, uneven=False)
    job.step(0)


@on_ranks(2)
def test_a_mask_that_is_no_tensor_is_refused(monkeypatch):
    from torch.nn.attention.flex_attention import create_block_mask

    compute_in_float64(monkeypatch, "llama")
    split_over_all_ranks()
    attention = smp.DistributedModel(made("llama")).get_module().model.layers[0].self_attn
    mask = create_block_mask(lambda b, h, q, k: q >= k, 2, None, 6, 6, device="cpu")
    hidden, rotary = torch.ones(2, 6, 24), torch.ones(2, 6, 4)
    with pytest.raises(NotImplementedError, match="self_attn' got attention_mask as a BlockM"):
        attention(
            hidden_states=hidden, position_embeddings=(rotary, rotary), attention_mask=mask
        )


@pytest.mark.parametrize("family", ["llama", "t5", "vit", "mixtral"])
@on_ranks(2, timeout_s=120)
def test_what_a_family_records_is_of_own_samples(family, monkeypatch):
    compute_in_float64(monkeypatch, family)
    split_over_all_ranks()
    plain = made(family)
    model = smp.DistributedModel(made(family))
    names = {
        "t5": ("input_ids", "attention_mask", "decoder_input_ids"),
        "vit": ("pixel_values", "attention_mask"),
    }.get(FAMILIES[family].folder, ("input_ids", "attention_mask"))
    batch = dict(zip(names, FAMILIES[family].batch(smp.rank(), 0), strict=False))
    options = {"output_router_logits": True} if FAMILIES[family].folder == "mixtral" else {}
    got = model(**batch, output_hidden_states=True, **options)
    want = plain(**batch, output_hidden_states=True, **options)
    recorded = [key for key in want if "states" in key or key == "router_logits"]
    assert recorded
    for key in recorded:
        if isinstance(want[key], Tensor):
            assert_near(got[key], want[key], key)
        elif isinstance(want[key], tuple):
            assert len(got[key]) == len(want[key]) > 1
            for a, b in zip(got[key], want[key], strict=True):
                assert a.shape == b.shape
                assert_near(a, b, key)


# -------------------------------------------------------------------------------- slices


@pytest.mark.parametrize("shared", [1, 2, 3, 5])
@pytest.mark.parametrize("together", [1, 2, 3, 4, 7])
def test_queries_find_the_heads_that_they_share(shared, together, monkeypatch):
    """In a model that has a head of keys for each ``equally`` queries of a tp_rank."""
    for size in range(1, shared * together + 1):
        monkeypatch.setattr(group, "size", lambda size=size: size)
        heads = []
        for rank in range(size):
            monkeypatch.setattr(group, "rank", lambda rank=rank: rank)
            chosen, equally = shared_heads(shared, together)
            heads += [head for head in chosen for _ in range(equally)]
        assert heads == [query // together for query in range(shared * together)]


@pytest.mark.parametrize(
    ("channels", "ranges"),
    [
        (80, [(0, 32), (32, 64), (64, 80)]), (16, [(0, 8), (8, 16)]), (15, [(0, 8), (8, 15)]),
        (24, [(0, 16), (16, 24)]), (48, [(0, 16), (16, 32), (32, 48)]),
    ],
)  # fmt: skip
def test_channels_of_experts_stay_together_where_there_are_enough(channels, ranges):
    """By 16, or what divides them; gate and up are cut alike."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=4, intermediate_size=channels, num_local_experts=2
    )
    modeling = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    experts = modeling.MixtralExperts(config)
    with group.planned(len(ranges)):
        mixtral_plan.split_experts(experts, "experts")
    down, both = slices_of(experts.down_proj), slices_of(experts.gate_up_proj)
    assert (down.axis, down.ranges) == (2, tuple((one,) for one in ranges))
    shifted = [(first + channels, last + channels) for first, last in ranges]
    assert (both.axis, both.ranges) == (1, tuple(zip(ranges, shifted, strict=True)))
    assert experts.intermediate_dim == ranges[0][1]


@pytest.mark.stress
@on_ranks(3, timeout_s=240)
def test_slices_of_experts_suit_grouped_products():
    """Which want rows of a multiple of 16 bytes; 80 channels over 3 ranks."""
    split_over_all_ranks()
    options = {"channels": 80, "experts_implementation": "grouped_mm"}
    torch.manual_seed(3)
    with smp.tensor_parallelism():
        net = mixtral(**options)
    torch.manual_seed(3)
    plain = mixtral(**options)
    model = smp.DistributedModel(net)
    ids, mask = tokens(smp.rank(), 0)
    got, want = (m(input_ids=ids, attention_mask=mask).logits for m in (model, plain))
    torch.testing.assert_close(got, want)


def class_of_users(kind: str, base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a llama's MLP or attention."""

    def forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Any:
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner / inner.pow(2).mean(-1, keepdim=True).sqrt())

    def scaled(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        return base.forward(self, hidden_states * 1.5, *args, **options)

    members = {
        "norm inside": {"forward": forward},
        "the same name": {"forward": forward},
        "scaled attention": {"forward": scaled},
        "more beside": {"more": lambda self: 1, "extra_repr": lambda self: "more"},
    }[kind]
    return type(base.__name__ if kind == "the same name" else "Own", (base,), members)


@pytest.mark.parametrize(
    "kind", ["norm inside", "the same name", "scaled attention", "more beside"]
)
@pytest.mark.parametrize("prescaled", [False, True])
@on_ranks(2, timeout_s=120)
def test_a_users_subclass_is_split_where_it_leaves_the_methods_of_the_plans_class(
    kind, prescaled, monkeypatch
):
    """... and whole where it has its own: what that does to inner channels is not known."""
    compute_in_float64(monkeypatch, "llama")
    split_over_all_ranks(prescaled_batch=prescaled)
    net = made("llama")
    part = "self_attn" if kind == "scaled attention" else "mlp"
    changed = getattr(net.model.layers[0], part)
    changed.__class__ = class_of_users(kind, type(changed))
    path, is_split = f"model.layers.0.{part}", kind == "more beside"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = WholeJob(
            net, next_token_loss, lambda rank, step: tokens(rank * (not prescaled), step)
        )
    warned = [str(w.message) for w in caught if "is left whole" in str(w.message)]
    reasons = {one.path: one.reason for one in job.model._smp_split}
    assert (reasons[path] == "") == is_split == (not warned)
    assert is_split or f"'{path}' is left whole: its class" in warned[0]
    for step in range(2):
        job.step(step)
    job.check_parameters()
