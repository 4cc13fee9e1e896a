"""Families of transformers split over the TP_GROUP equal the plain models.

The reference is ``tests/reference/whole_job.py``, in float64.
"""

import importlib
import types
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from tests.ranks import on_ranks
from tests.reference.whole_job import WholeJob, assert_near, split_over_all_ranks
from tests.test_tensor_parallel_families2 import attend_in_packed_sequences

VOCABULARY = 61
HEADS = 5
WIDTH = 8 * HEADS
NO_DROPOUT = dict.fromkeys(
    [
        "attn_pdrop",
        "embd_pdrop",
        "resid_pdrop",
        "attention_dropout",
        "embed_dropout",
        "resid_dropout",
        "hidden_dropout",
        "attention_probs_dropout_prob",
        "hidden_dropout_prob",
    ],
    0.0,
)


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


def bert_like(folder: str, name: str, decoder: str) -> Family:
    options = {
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "intermediate_size": 37,
        "max_position_embeddings": 24,
        "pad_token_id": 0,
    }
    layer = f"{folder}.encoder.layer.%d"
    split = [layer, f"{layer}.attention"]
    return Family(folder, f"{name}Config", f"{name}ForMaskedLM", options, split, decoder)


FAMILIES = {
    "gpt2": Family(
        "gpt2",
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": WIDTH, "n_head": HEADS, "n_inner": 37, "n_positions": 24},
        ["transformer.h.%d.attn", "transformer.h.%d.mlp"],
        "GPT2LMHeadModel",
    ),
    "gptj": Family(
        "gptj",
        "GPTJConfig",
        "GPTJForCausalLM",
        {"n_embd": WIDTH, "n_head": HEADS, "rotary_dim": 4, "n_inner": 37, "n_positions": 24},
        ["transformer.h.%d.attn", "transformer.h.%d.mlp"],
    ),
    "gptneo": Family(
        "gpt_neo",
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            "hidden_size": WIDTH,
            "num_heads": HEADS,
            "intermediate_size": 37,
            "max_position_embeddings": 24,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 3,
        },
        ["transformer.h.%d.attn.attention", "transformer.h.%d.mlp"],
    ),
    "gptneox": Family(
        "gpt_neox",
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {
            "hidden_size": WIDTH,
            "num_attention_heads": HEADS,
            "intermediate_size": 37,
            "max_position_embeddings": 24,
        },
        ["gpt_neox.layers.%d.attention", "gpt_neox.layers.%d.mlp"],
    ),
    "bert": bert_like("bert", "Bert", "BertLMHeadModel"),
    "roberta": bert_like("roberta", "Roberta", "RobertaForCausalLM"),
}
WITHOUT_SDPA = {"gptj", "gptneo"}

CASES = [
    (name, attention)
    for name in FAMILIES
    for attention in ("eager", "sdpa")
    if attention == "eager" or name not in WITHOUT_SDPA
]


def small(
    name: str, attention: str = "eager", decoder: bool = False, **options: Any
) -> nn.Module:
    """The model, marked, in float64; as a decoder with cross-attention, by default."""
    import transformers

    family = FAMILIES[name]
    if decoder:
        options = {"is_decoder": True, "add_cross_attention": True, **options}
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    config = getattr(transformers, family.config)(
        vocab_size=VOCABULARY,
        num_hidden_layers=2,
        attn_implementation=attention,
        bos_token_id=0,
        eos_token_id=0,
        **{**NO_DROPOUT, **family.options, **options},
    )
    with smp.tensor_parallelism():
        return getattr(transformers, family.decoder if decoder else family.model)(config)


def in_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a family compute all attention weights in float64: some do in float32."""
    folder = FAMILIES[name].folder
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    double = types.SimpleNamespace(**{**vars(torch), "float32": torch.float64})
    monkeypatch.setattr(modeling, "torch", double)


def tokens(rank: int, step: int) -> dict[str, Tensor]:
    """Other numbers of samples on each rank, and something else in each of four steps.

    Step 0: other lengths, padding on odd ranks.  1: padding alone.  2: other lengths, padding
    in front on even ranks, which count positions from behind it.  3: neither.
    """
    generator = torch.Generator().manual_seed(100 * step + rank)
    length = 6 + rank if step % 2 == 0 else 6
    ids = torch.randint(1, VOCABULARY, (1 + 2 * rank, length), generator=generator)
    mask = torch.ones_like(ids)
    batch = {"input_ids": ids, "attention_mask": mask}
    if rank % 2 and step < 2:
        mask[:, -2:] = 0
    if rank % 2 == 0 and step == 2:
        mask[0, :2] = 0
        batch["position_ids"] = mask.cumsum(1)
    return batch


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of each position's logits against the next id; transformers' own is in float32."""
    logits, ids = model(**batch).logits[:, :-1], batch["input_ids"][:, 1:]
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), ids.reshape(-1))


def whole_job(model: nn.Module) -> WholeJob:
    return WholeJob(model, token_loss, lambda rank, step: (tokens(rank, step),))


def equals_the_plain_model(name: str, attention: str, **config: Any) -> None:
    split_over_all_ranks(**config)
    job = whole_job(small(name, attention))
    wanted = [path % layer for layer in (0, 1) for path in FAMILIES[name].split]
    assert [one.path for one in job.model._smp_split if not one.reason] == wanted
    for step in range(4):
        job.step(step, max_norm=0.3)
    job.check_parameters()
    whole = job.model.state_dict()
    for key, value in job.plain.state_dict().items():
        assert_near(whole[key], value, key)
    small(name, attention).load_state_dict(whole)


@pytest.mark.parametrize(("name", "attention"), CASES)
@on_ranks(2, timeout_s=120)
def test_a_family_equals_the_plain_model(name, attention, monkeypatch):
    """Losses, gradients, norms, parameters; uneven samples, lengths, heads, padding."""
    in_float64(name, monkeypatch)
    equals_the_plain_model(name, attention)


@pytest.mark.stress
@pytest.mark.parametrize(("name", "attention"), CASES)
@on_ranks(3, 4, timeout_s=240)
def test_a_family_equals_the_plain_model_on_more_ranks(name, attention, monkeypatch):
    in_float64(name, monkeypatch)
    equals_the_plain_model(name, attention)


@pytest.mark.parametrize(("name", "attention"), CASES)
@pytest.mark.sample(3)
@on_ranks(4, timeout_s=120)
def test_a_family_in_a_pipeline_equals_the_plain_model(name, attention, monkeypatch):
    in_float64(name, monkeypatch)
    equals_the_plain_model(
        name, attention, tensor_parallel_degree=2, pipeline_parallel_degree=2
    )


@pytest.mark.parametrize("name", FAMILIES)
@on_ranks(2, timeout_s=120)
def test_hidden_states_are_the_plain_models(name, monkeypatch):
    in_float64(name, monkeypatch)
    split_over_all_ranks()
    job = whole_job(small(name))
    got, want = (
        model(**tokens(smp.rank(), 0), output_hidden_states=True).hidden_states
        for model in (job.model, job.plain)
    )
    assert len(got) == len(want) == 3
    for layer, (one, other) in enumerate(zip(got, want, strict=True)):
        assert_near(one, other, f"hidden state {layer}")


@pytest.mark.parametrize("name", ["gpt2", "gptneox"])
@on_ranks(2, timeout_s=120)
def test_positions_of_packed_sequences_are_gathered(name):
    """Some attention functions of transformers find by them where a sequence begins."""
    from transformers import AttentionInterface

    AttentionInterface.register("packed", attend_in_packed_sequences)
    split_over_all_ranks()

    def batch(rank: int, step: int) -> tuple[dict[str, Tensor]]:
        ids = tokens(rank, 1)["input_ids"]
        positions = torch.cat([torch.arange(n) for n in (2 + rank, 4 - rank)])
        return ({"input_ids": ids, "position_ids": positions.expand(len(ids), -1)},)

    WholeJob(small(name, "packed"), token_loss, batch).step(0)


@pytest.mark.parametrize("name", FAMILIES)
@on_ranks(2, timeout_s=120)
def test_gradients_are_the_same_with_layers_checkpointed(name, monkeypatch):
    in_float64(name, monkeypatch)
    split_over_all_ranks()
    job = whole_job(small(name))
    job.net.activation_checkpointing_enable()
    calls: list[str] = []
    path = FAMILIES[name].split[-1] % 0
    job.net.get_submodule(path).register_forward_pre_hook(lambda *_: calls.append(path))
    job.step(0)
    assert len(calls) == 2, "forward, and again in backward"
    job.step(1)


@pytest.mark.parametrize("name", FAMILIES)
@on_ranks(2, timeout_s=120)
def test_attention_weights_are_refused_by_name(name):
    split_over_all_ranks()
    model = smp.DistributedModel(small(name))
    with pytest.raises(NotImplementedError, match=r"'.*\.0\.att.*' is split, and output_att"):
        model(**tokens(smp.rank(), 0), output_attentions=True)


# ------------------------------------------------------------------------ cross-attention


class Translator(nn.Module):
    """A decoder that sees the states of a source, one vector for each of its ids."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, WIDTH)
        self.decoder = decoder

    def forward(self, source: Tensor, source_mask: Tensor, **batch: Tensor) -> Any:
        return self.decoder(
            encoder_hidden_states=self.source(source),
            encoder_attention_mask=source_mask,
            **batch,
        )


def pairs(rank: int, step: int) -> tuple[dict[str, Tensor]]:
    """Sources are shorter where the rest is longer, and padded on tp_rank 0 in step 1."""
    batch = tokens(rank, step)
    samples = len(batch["input_ids"])
    generator = torch.Generator().manual_seed(step + rank)
    shape = samples, 5 - rank if step % 2 == 0 else 4
    source = torch.randint(1, VOCABULARY, shape, generator=generator)
    source_mask = torch.ones_like(source)
    if rank == 0 and step == 1:
        source_mask[:, -1] = 0
    return ({**batch, "source": source, "source_mask": source_mask},)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].decoder])
@on_ranks(2, timeout_s=120)
def test_a_decoder_with_cross_attention_equals_the_plain_model(name, attention):
    split_over_all_ranks()
    job = WholeJob(Translator(small(name, attention, decoder=True)), token_loss, pairs)
    assert any("crossattention" in one.path for one in job.model._smp_split)
    for step in range(4):
        job.step(step)
    job.check_parameters()


# -------------------------------------------------------------- what of a layer is split


@on_ranks(2, timeout_s=120)
def test_the_attention_of_a_layer_stays_whole_by_itself():
    """BERT's feed-forward part belongs to the layer, which the attention is in."""
    split_over_all_ranks()
    net = small("bert")
    first, second = net.bert.encoder.layer
    smp.set_tensor_parallelism(first.attention, False)
    smp.set_tensor_parallelism(second, False)
    smp.set_tensor_parallelism(second.attention)
    job = whole_job(net)
    assert [one.path for one in job.model._smp_split] == [
        "bert.encoder.layer.0",
        "bert.encoder.layer.1.attention",
    ]
    job.step(0)


@on_ranks(2, timeout_s=120)
def test_a_feed_forward_part_in_chunks():
    split_over_all_ranks()
    job = whole_job(small("bert", chunk_size_feed_forward=3))
    job.step(1)
