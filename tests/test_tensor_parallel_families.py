"""Families of transformers split over the TP_GROUP equal the plain models over all samples.

The reference is ``tests/reference/whole_job.py``, in float64.
"""

import importlib
import importlib.util
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from smp.nn.huggingface import mixtral as mixtral_plan
from smp.nn.huggingface.llama import shared_heads
from smp.slicing.slices import slices_of
from smp.tensor_parallel import group
from tests.models.families import (
    FAMILIES,
    TIED,
    VOCABULARY,
    WITHOUT_SDPA,
    batch_of,
    compute_in_float64,
    decoder,
    loss,
    made,
    tokens,
    unmarked,
    whole_job,
)
from tests.ranks import on_ranks
from tests.reference.whole_job import WholeJob, assert_near, split_over_all_ranks

# ------------------------------------------------------------------------------ equality

CASES = [
    (name, attention)
    for name in FAMILIES
    for attention in ("eager", "sdpa")
    if attention == "eager" or name not in WITHOUT_SDPA
]
EACH = pytest.mark.parametrize(("name", "attention"), CASES)


def equals_the_plain_model(
    monkeypatch: pytest.MonkeyPatch, name: str, attention: str, **config: Any
) -> None:
    """Losses, gradients, norms, parameters, state; uneven samples, lengths, heads, padding."""
    compute_in_float64(monkeypatch, name)
    split_over_all_ranks(**config)
    job = whole_job(name, made(name, attn_implementation=attention))
    wanted = {path % layer for layer in (0, 1) for path in FAMILIES[name].split}
    assert {one.path for one in job.model._smp_split if not one.reason} == wanted
    job.run(4, max_norm=0.3)
    made(name, attn_implementation=attention).load_state_dict(job.check_state())


@EACH
@pytest.mark.sample(20)
@on_ranks(2, timeout_s=120)
def test_a_family_equals_the_plain_model(name, attention, monkeypatch):
    equals_the_plain_model(monkeypatch, name, attention)


@EACH
@pytest.mark.sample(10)
@pytest.mark.stress
@on_ranks(3, 4, timeout_s=240)
def test_a_family_equals_the_plain_model_on_more_ranks(name, attention, monkeypatch):
    equals_the_plain_model(monkeypatch, name, attention)


@EACH
@pytest.mark.sample(4)
@on_ranks(4, timeout_s=120)
def test_a_family_in_a_pipeline_equals_the_plain_model(name, attention, monkeypatch):
    degrees = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}
    equals_the_plain_model(monkeypatch, name, attention, **degrees)


@pytest.mark.parametrize("prescaled", [False, True])
@pytest.mark.parametrize("name", TIED)
@pytest.mark.sample(5)
@on_ranks(2, timeout_s=120)
def test_an_embedding_with_a_factor_that_is_tied_is_split(name, prescaled, monkeypatch):
    compute_in_float64(monkeypatch, name)
    split_over_all_ranks(prescaled_batch=prescaled)
    net = made(name, attn_implementation="eager")
    head, embedding = net.get_output_embeddings(), net.get_input_embeddings()
    assert type(embedding) is not nn.Embedding and head.weight is embedding.weight
    job = whole_job(name, net, same=prescaled)
    assert head.weight is embedding.weight and len(head.weight) < VOCABULARY
    job.run(2, max_norm=0.3)


@pytest.mark.parametrize("name", ["gpt2", "llama, 1 head of keys", "t5", "vit", "mixtral"])
@on_ranks(2, timeout_s=120)
def test_a_family_on_ranks_that_are_fed_the_same_batch(name, monkeypatch):
    compute_in_float64(monkeypatch, name)
    split_over_all_ranks(prescaled_batch=True)
    whole_job(name, same=True).run(2, max_norm=0.3)


@pytest.mark.parametrize("name", [name for name in FAMILIES if "," not in name])
@on_ranks(2, timeout_s=120)
def test_gradients_are_the_same_with_layers_checkpointed(name, monkeypatch):
    """Layers that run again in backward gather again."""
    compute_in_float64(monkeypatch, name)
    split_over_all_ranks()
    job = whole_job(name)
    job.net.gradient_checkpointing_enable()
    calls: list[str] = []
    path = FAMILIES[name].split[-1] % 0
    job.net.get_submodule(path).register_forward_pre_hook(lambda *_: calls.append(path))
    job.step(0)
    assert len(calls) == 2, "forward, and again in backward"
    job.step(1)


class Translator(nn.Module):
    """A decoder that sees the states of a source, one vector for each of its ids."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, 40)
        self.decoder = decoder

    def forward(self, source: Tensor, source_mask: Tensor, **batch: Tensor) -> Any:
        return self.decoder(
            encoder_hidden_states=self.source(source),
            encoder_attention_mask=source_mask,
            **batch,
        )


def pairs(rank: int, step: int) -> tuple[dict[str, Tensor], Tensor]:
    """Sources are shorter where the rest is longer, and padded on tp_rank 0 in step 1."""
    given, ids = tokens(rank, step)
    generator = torch.Generator().manual_seed(step + rank)
    shape = len(ids), 5 - rank if step % 2 == 0 else 4
    source = torch.randint(1, VOCABULARY, shape, generator=generator)
    source_mask = torch.ones_like(source)
    if rank == 0 and step == 1:
        source_mask[:, -1] = 0
    return {**given, "source": source, "source_mask": source_mask}, ids


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].decoder])
@on_ranks(2, timeout_s=120)
def test_a_decoder_with_cross_attention_equals_the_plain_model(name, attention, monkeypatch):
    compute_in_float64(monkeypatch, name)
    split_over_all_ranks()
    job = WholeJob(Translator(decoder(name, attn_implementation=attention)), loss, pairs)
    assert any("crossattention" in one.path for one in job.model._smp_split)
    job.run(4)


# -------------------------------------------------------------------------------- adapters


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


def adapted(name: str) -> nn.Module:
    net = made(name)
    net.requires_grad_(False)
    torch.manual_seed(4)
    for layer in net.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for part, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and part != "k_proj":
                    setattr(parent, part, Adapted(child, in_dict=part == "q_proj"))
    return net


@pytest.mark.parametrize("prescaled", [False, True], ids=["own samples", "same samples"])
@pytest.mark.parametrize("name", ["llama", "llama, 1 head of keys"])
@on_ranks(2, 3, timeout_s=120)
def test_adapted_linears_of_a_region_are_split_with_it(name, prescaled, monkeypatch):
    """LoRA: only small linears train, around frozen ones that lead in and out."""
    compute_in_float64(monkeypatch, name)
    split_over_all_ranks(prescaled_batch=prescaled)
    job = whole_job(name, adapted(name), same=prescaled)
    assert not any(one.reason for one in job.model._smp_split)
    for linear in job.net.modules():
        if isinstance(linear, nn.Linear):
            assert linear.weight.shape == (linear.out_features, linear.in_features)
    job.run(2, max_norm=0.3).check_state()


@on_ranks(2, timeout_s=120)
def test_another_wrapper_of_a_regions_linear_is_named():
    split_over_all_ranks()
    net = adapted("llama")
    wrapper = net.model.layers[1].mlp.up_proj
    wrapper.magnitude = nn.Parameter(torch.ones(29))
    with pytest.raises(NotImplementedError, match=r"'model.layers.1.mlp.up_proj' .* magnit"):
        smp.DistributedModel(net)


PEFT_TARGETS = {
    "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
}


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("name", PEFT_TARGETS)
@on_ranks(4, timeout_s=120)
def test_adapters_of_peft(name, pipeline, monkeypatch, tmp_path):
    """They train, what they are around does not, and peft writes and reads them."""
    peft = importlib.import_module("peft")
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": pipeline})
    compute_in_float64(monkeypatch, name)
    config = peft.LoraConfig(
        r=2,
        target_modules=PEFT_TARGETS[name],
        init_lora_weights=False,
        fan_in_fan_out=name == "gpt2",
        task_type="CAUSAL_LM",
    )
    job = whole_job(name, peft.get_peft_model(made(name), config))
    assert not any(one.reason for one in job.model._smp_split)
    every = job.plain.named_parameters(remove_duplicate=False)
    frozen = {key: p.clone() for key, p in every if not p.requires_grad}
    job.run(2, max_norm=0.3)
    whole = job.model.state_dict()
    assert all(torch.equal(whole[key], value) for key, value in frozen.items())
    assert all("lora_" in key for key in whole.keys() - frozen.keys())
    if smp.rank() == 0:
        job.model.save_pretrained(tmp_path, state_dict=whole)
        again = peft.PeftModel.from_pretrained(made(name), tmp_path).state_dict()
        for key, value in job.plain.state_dict().items():
            assert_near(again[key], value, key)


# ------------------------------------------------------------------------------- outputs


@pytest.mark.parametrize("name", ["llama", "t5"])
@on_ranks(2, timeout_s=120)
def test_a_rank_whose_sequences_have_ended_goes_on_until_all_have(name, monkeypatch):
    plain, model = both(monkeypatch, name)
    given = prompts(smp.rank())
    options = {**given, "max_new_tokens": 7, "do_sample": False}
    longest = plain.generate(eos_token_id=[], **options)
    # The first rank's end after two tokens, those of the other do not.
    ends = longest[:, -6].tolist() if smp.rank() == 0 else []
    options |= {"eos_token_id": ends, "pad_token_id": 0}
    want = plain.generate(**options)
    assert want.size(1) < longest.size(1) or smp.rank() == 1
    assert torch.equal(model.generate(**options), want)


def both(
    monkeypatch: pytest.MonkeyPatch, name: str, whole: bool = False
) -> tuple[nn.Module, smp.DistributedModel]:
    """The plain model and the split one, whose attentions are whole if so asked for."""
    compute_in_float64(monkeypatch, name)
    split_over_all_ranks()
    net = made(name).eval()
    for layer in net.model.layers if whole else ():
        smp.set_tensor_parallelism(layer.self_attn, False)
    return made(name).eval(), smp.DistributedModel(net)


def prompts(rank: int) -> dict[str, Tensor]:
    """Two of them, of one length on all ranks, without padding."""
    given, _ = tokens(rank, 3, samples=2)
    return given


SEARCHES = {
    "beam search": ({"num_beams": 2}, 2),
    "assisted decoding": ({"prompt_lookup_num_tokens": 2}, 1),
}
BEAMS = {"num_beams": 2, "max_new_tokens": 4, "min_new_tokens": 4}


@pytest.mark.parametrize("name", ["llama", "t5"])
@on_ranks(2, timeout_s=120)
def test_searches_that_rearrange_caches_are_refused(name, monkeypatch):
    """They know their own samples; without a cache beams are the plain model's."""
    plain, model = both(monkeypatch, name)
    ids = prompts(smp.rank())["input_ids"]
    for search, (options, samples) in SEARCHES.items():
        refused = rf"by {search} .* TP_GROUP: pass use_cache=False"
        with pytest.raises(NotImplementedError, match=refused):
            model.generate(ids[:samples], max_new_tokens=3, **options)
    options = {**BEAMS, "use_cache": False}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


@on_ranks(2, timeout_s=120)
def test_beams_of_a_model_whose_attentions_are_whole(monkeypatch):
    """Caches are of own samples there."""
    plain, model = both(monkeypatch, "llama", whole=True)
    ids = prompts(smp.rank())["input_ids"]
    assert torch.equal(model.generate(ids, **BEAMS), plain.generate(ids, **BEAMS))


@pytest.mark.parametrize("name", [name for name in FAMILIES if "," not in name])
@on_ranks(2, timeout_s=120)
def test_what_a_family_records_is_of_own_samples(name, monkeypatch):
    compute_in_float64(monkeypatch, name)
    split_over_all_ranks()
    job = whole_job(name)
    given, _ = batch_of(name, smp.rank(), 0)
    got, want = (model(**given, output_hidden_states=True) for model in (job.model, job.plain))
    recorded = [key for key in want if "states" in key or key == "router_logits"]
    assert recorded
    for key in recorded:
        if isinstance(want[key], Tensor):
            assert_near(got[key], want[key], key)
        elif isinstance(want[key], tuple):
            assert len(got[key]) == len(want[key]) > 1
            for one, other in zip(got[key], want[key], strict=True):
                assert one.shape == other.shape
                assert_near(one, other, key)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name < "gptz"])
@on_ranks(2, timeout_s=120)
def test_attention_weights_are_refused_by_name(name):
    split_over_all_ranks()
    model = smp.DistributedModel(made(name, attn_implementation="eager"))
    with pytest.raises(NotImplementedError, match=r"'.*\.0\.att.*' is split, and output_att"):
        model(**tokens(smp.rank(), 0)[0], output_attentions=True)


# ---------------------------------------------------------------------------------- caches


def model_and_cache(
    name: str, prescaled: bool, trains: bool = False
) -> tuple[smp.DistributedModel, Any, list[int]]:
    """A model, and a cache that the script has filled with tensors of that shape."""
    split_over_all_ranks(prescaled_batch=prescaled)
    model = smp.DistributedModel(made(name).train(trains))
    config = model.get_module().config
    width = config.hidden_size // config.num_attention_heads
    prefix = torch.zeros(2, config.num_key_value_heads, 3, width, requires_grad=trains)
    cache = importlib.import_module("transformers").DynamicCache()
    cache.update(prefix, prefix, 0)
    return model, cache, list(prefix.shape)


@pytest.mark.parametrize(
    ("name", "prescaled", "trains", "wanted"),
    [
        ("llama", False, False, "the 4 samples of all ranks"),
        ("llama", True, False, "this rank's heads"),
        ("llama, 1 head of keys", True, True, ""),
    ],
    ids=["own samples", "same samples", "prefixes that train"],
)
@on_ranks(2)
def test_a_cache_that_the_script_has_filled_is_refused(name, prescaled, trains, wanted):
    """Of prefixes each rank would have the gradient of its own heads alone."""
    model, cache, shape = model_and_cache(name, prescaled, trains)
    match = rf"0.self_attn' is split .* shape \{shape}".replace("]", r"\]")
    match += f" instead of {wanted}" if wanted else ""
    ids = torch.ones(2, 3, dtype=torch.int64)
    with (
        pytest.raises(NotImplementedError, match=match),
        torch.set_grad_enabled(trains),
    ):
        model(input_ids=ids, past_key_values=cache)


@on_ranks(2, timeout_s=120)
def test_a_cache_of_prompts_of_different_lengths_is_refused(monkeypatch):
    _, model = both(monkeypatch, "llama")
    ids = torch.ones(1, 6 - 3 * smp.rank(), dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="different lengths .* together with a cache"):
        model.get_module().generate(ids, max_new_tokens=2, min_new_tokens=2)


# ------------------------------------------------------------------------ masks, positions


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


@pytest.mark.parametrize("name", ["gpt2", "gptneox", "llama", "mixtral"])
@on_ranks(2, timeout_s=120)
def test_positions_of_packed_sequences_are_gathered(name, monkeypatch):
    """Some attention functions of transformers find by them where a sequence begins."""
    from transformers import AttentionInterface

    AttentionInterface.register("packed", attend_in_packed_sequences)
    compute_in_float64(monkeypatch, name)
    split_over_all_ranks()

    def batch(rank: int, step: int) -> tuple[dict[str, Tensor], Tensor]:
        _, ids = tokens(rank, 1)
        positions = torch.cat([torch.arange(n) for n in (2 + rank, 4 - rank)])
        return {"input_ids": ids, "position_ids": positions.expand(len(ids), -1)}, ids

    net = made(name, attn_implementation="packed")
    with pytest.warns(UserWarning, match="attention function 'packed' of the script's own"):
        job = WholeJob(net, loss, batch)
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
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@on_ranks(2)
def test_padding_is_not_seen_where_a_layer_gets_no_mask(name, attention, monkeypatch):
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("of one's own", sdpa_attention_forward)
    split_over_all_ranks()
    net = made(name)
    compute_in_float64(monkeypatch, "llama")
    net.config._attn_implementation = attention

    def batch(rank: int, step: int, uneven: bool = True) -> tuple[Tensor]:
        draw = torch.Generator().manual_seed(rank)
        width = net.config.hidden_size
        return (torch.randn(2 + rank, 4 + 3 * rank * uneven, width, generator=draw),)

    job = WholeJob(Block(net), lambda model, x: model(x).square().mean(), batch)
    if attention == "of one's own":
        with pytest.raises(ValueError, match=r"no attention_mask on tp_rank 0, .* \[4, 7\]"):
            job.model(*batch(smp.rank(), 0))
        job.batch = lambda rank, step: batch(rank, step, uneven=False)
    job.step(0)


@pytest.mark.parametrize("by", ["config", "call", "attribute"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@on_ranks(2, timeout_s=120)
def test_a_decoder_that_sees_all_positions(name, by, monkeypatch):
    """By an argument, which transformers 5 also takes from the config, or an attribute."""
    compute_in_float64(monkeypatch, name)
    split_over_all_ranks()
    options = {"is_causal": False} if by == "config" else {}
    given = {"is_causal": False} if by == "call" else {}

    def batch(rank: int, step: int) -> tuple[dict[str, Any], Tensor]:
        batch, ids = batch_of(name, rank, step)
        return batch | given, ids

    job = WholeJob(made(name, attn_implementation="sdpa", **options), loss, batch)
    if by == "attribute":  # made so after the wrap
        for module in [*job.net.modules(), *job.plain.modules()]:
            if hasattr(module, "is_causal"):
                module.is_causal = False
    job.run(4)
    given = {"is_causal": smp.rank() == 1}
    with pytest.raises(ValueError, match="is_causal=False on tp_rank 0 and True on tp_rank 1"):
        job.model(**batch(smp.rank(), 3)[0])


@on_ranks(2)
def test_a_mask_that_is_no_tensor_is_refused(monkeypatch):
    from torch.nn.attention.flex_attention import create_block_mask

    _, model = both(monkeypatch, "llama")
    attention = model.get_module().model.layers[0].self_attn
    mask = create_block_mask(lambda b, h, q, k: q >= k, 2, None, 6, 6, device="cpu")
    hidden, rotary = torch.ones(2, 6, 24), torch.ones(2, 6, 4)
    with pytest.raises(NotImplementedError, match="self_attn' got attention_mask as a BlockM"):
        attention(
            hidden_states=hidden, position_embeddings=(rotary, rotary), attention_mask=mask
        )


# ---------------------------------------------------------------------- what is split, how


@on_ranks(2, timeout_s=120)
def test_the_attention_of_a_layer_stays_whole_by_itself():
    """BERT's feed-forward part belongs to the layer, which the attention is in."""
    split_over_all_ranks()
    net = made("bert")
    first, second = net.bert.encoder.layer
    smp.set_tensor_parallelism(first.attention, False)
    smp.set_tensor_parallelism(second, False)
    smp.set_tensor_parallelism(second.attention)
    job = whole_job("bert", net)
    assert [one.path for one in job.model._smp_split] == [
        "bert.encoder.layer.0",
        "bert.encoder.layer.1.attention",
    ]
    job.step(0)


@on_ranks(2, timeout_s=120)
def test_a_feed_forward_part_in_chunks():
    split_over_all_ranks()
    whole_job("bert", made("bert", chunk_size_feed_forward=3)).step(1)


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
    options = {"intermediate_size": 80, "experts_implementation": "grouped_mm"}
    torch.manual_seed(3)
    plain = unmarked("mixtral", **options)
    torch.manual_seed(3)
    with smp.tensor_parallelism():
        net = unmarked("mixtral", **options)
    given, _ = tokens(smp.rank(), 0)
    got, want = (model(**given).logits for model in (smp.DistributedModel(net), plain))
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
        job = whole_job("llama", net, same=prescaled)
    warned = [str(w.message) for w in caught if "is left whole" in str(w.message)]
    reasons = {one.path: one.reason for one in job.model._smp_split}
    assert (reasons[path] == "") == is_split == (not warned)
    assert is_split or f"'{path}' is left whole: its class" in warned[0]
    job.run(2)
