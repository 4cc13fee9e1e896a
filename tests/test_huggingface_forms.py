"""Hugging Face's models with distributed modules in their place, and their state dicts."""

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from smp.nn.huggingface.translation import Translation, part
from smp.tensor_parallel import replacement
from tests.ranks import on_ranks
from tests.reference.whole_job import assert_near, split_over_all_ranks

transformers = pytest.importorskip("transformers")


def gpt2(**config: Any) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=37, n_positions=16, n_embd=12, n_layer=3, n_head=3,
            bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **config,
        )
    )  # fmt: skip


FAMILIES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gpt2": (gpt2, "gpt2"),
    "gpt2, untied": (lambda: gpt2(tie_word_embeddings=False), "gpt2"),
    "gpt2, scaled": (
        lambda: gpt2(
            scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=False, n_inner=20
        ),
        "gpt2",
    ),
}


def family(kind: str) -> tuple[Callable, Callable]:
    """To Hugging Face's names, and from them."""
    name = FAMILIES[kind][1]
    module = importlib.import_module(f"smp.nn.huggingface.{name}")
    return (
        getattr(module, f"translate_state_dict_to_hf_{name}"),
        getattr(module, f"translate_hf_state_dict_to_smdistributed_{name}"),
    )


def texts(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, 37, (2, 5 + rank), generator=generator)
    seen = torch.ones_like(ids)
    seen[0, 4:] = 0
    labels = ids.clone()
    labels[seen == 0] = -100
    return {"input_ids": ids, "attention_mask": seen, "labels": labels}


def loss_of(plain: nn.Module, labels: Tensor, **batch: Tensor) -> Tensor:
    """That of the model itself is in float32."""
    logits = plain(**batch).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def check_training(kind: str, steps: int = 3) -> smp.DistributedModel:
    """Losses, norms and, by Hugging Face's names, parameters equal the plain model's."""
    to_hf, _ = family(kind)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    with smp.tensor_parallelism(replace=True):
        net = FAMILIES[kind][0]()
    plain = copy.deepcopy(net)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    plain_optimizer = torch.optim.SGD(plain.parameters(), 0.1)

    @smp.step
    def train(model, batch):
        loss = model(**batch)["loss"]
        model.backward(loss)
        return loss

    for step in range(steps):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        loss = train(model, texts(smp.dp_rank(), step)).reduce_mean()
        every = [loss_of(plain, **texts(rank, step)) for rank in range(smp.dp_size())]
        (sum(every) / len(every)).backward()
        assert_near(loss, every[smp.dp_rank()], f"loss of step {step}")
        want = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert_near(model.clip_grad_norm_(0.5), want, f"norm of step {step}")
        optimizer.step()
        plain_optimizer.step()
    got, wanted = to_hf(model.state_dict()), plain.state_dict()
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        assert_near(got[name], value, name)
    plain.load_state_dict(got)
    return model


@pytest.mark.parametrize("kind", FAMILIES)
@on_ranks(2)
def test_a_replaced_model_trains_as_the_plain_one(kind):
    split_over_all_ranks()
    model = check_training(kind)
    assert any(isinstance(m, smp.nn.DistributedTransformer) for m in model.modules())


@pytest.mark.stress
@pytest.mark.parametrize("kind", FAMILIES)
@on_ranks(3)
def test_a_replaced_model_on_more_ranks(kind):
    split_over_all_ranks()
    check_training(kind)


@on_ranks(4)
def test_a_replaced_model_in_a_pipeline():
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2})
    check_training("gpt2", steps=2)


@on_ranks(2)
def test_what_scripts_reach_for():
    split_over_all_ranks()
    model = check_training("gpt2", steps=1)
    inner = model.get_module()
    assert isinstance(inner, smp.nn.DistributedTransformerLMHead)
    assert model.config.n_head == 3
    layer = inner.transformer.seq_layers[0]
    assert isinstance(layer, smp.nn.DistributedTransformerLayer)
    assert layer.attention.query.weight.size(0) == (8, 4)[smp.tp_rank()]
    assert layer.output.dense2.weight.size(1) == 24
    smp.set_activation_checkpointing(inner.transformer.seq_layers, pack_args_as_tuple=True)
    model.eval()
    with torch.no_grad():
        out = model(**texts(smp.tp_rank(), 0))
    assert out.logits.shape == (2, 5 + smp.tp_rank(), 37) and out["loss"].dim() == 0
    with pytest.raises(NotImplementedError, match="output_hidden_states.*replace=False"):
        model(**texts(0, 0), output_hidden_states=True)
    ((to_hf, to_ours),) = smp.state.module_manager.translate_functions
    state = model.state_dict()
    assert all(torch.equal(state[k], v) for k, v in to_ours(to_hf(state)).items())


def replaced(net: nn.Module) -> tuple[smp.DistributedModel, nn.Module]:
    """In evaluation, and the plain one."""
    smp.set_tensor_parallelism(net, replace=True)
    plain = copy.deepcopy(net).eval()
    return smp.DistributedModel(net).eval(), plain


@on_ranks(2)
def test_arguments_of_a_trainer():
    split_over_all_ranks()
    torch.manual_seed(1)
    model, plain = replaced(gpt2())
    given = {**texts(smp.tp_rank(), 0), "num_items_in_batch": 50}
    with torch.no_grad():
        torch.testing.assert_close(model(**given).loss, plain(**given).loss)
        del given["labels"]
        for keep in (0, 2, torch.tensor([0, 3])):
            got = model(**given, logits_to_keep=keep).logits
            torch.testing.assert_close(got, plain(**given, logits_to_keep=keep).logits)


@on_ranks(2)
def test_a_replaced_decoder_without_an_encoder():
    split_over_all_ranks()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    model, plain = replaced(gpt2(add_cross_attention=True))
    given = texts(smp.tp_rank(), 0)
    with torch.no_grad():
        assert_near(model(**given).logits, plain(**given).logits, "logits")
        given["encoder_hidden_states"] = torch.randn(2, 3, 12)
        assert_near(model(**given).logits, plain(**given).logits, "logits")


@on_ranks(2)
def test_weights_that_would_be_lost_are_named():
    split_over_all_ranks()
    net = gpt2()
    net.lm_head.weight = nn.Parameter(net.lm_head.weight.detach().clone())
    net.value = nn.Linear(12, 1)
    with pytest.raises(ValueError, match=r"lm_head.weight, value.bias, value.weight, which"):
        replaced(net)


@pytest.mark.parametrize("kind", FAMILIES)
def test_state_dicts_there_and_back(kind):
    to_hf, to_ours = family(kind)
    plain = FAMILIES[kind][0]().state_dict()
    ours = to_ours(plain)
    assert any(".seq_layers." in name for name in ours) and set(ours) != set(plain)
    assert all(torch.equal(to_hf(ours)[name], value) for name, value in plain.items())
    assert set(to_ours(ours)) == set(ours)  # it is ours already
    assert set(to_hf(plain)) == set(plain)  # or is split in place


def test_parts_that_are_packed_by_heads():
    names = Translation("layer", {"qkv": part("q", "k", "v", by_heads=True)})
    whole = torch.arange(2 * 3 * 4.0).view(24, 1)
    ours = names.to_ours({"x.layer.0.qkv.weight": whole}, heads=2)
    assert ours["x.seq_layers.0.q.weight"].flatten().tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    back = names.to_hugging_face(ours, heads=2)
    assert torch.equal(back["x.layer.0.qkv.weight"], whole)
    with pytest.raises(ValueError, match="give num_attention_heads"):
        names.to_ours({"x.layer.0.qkv.weight": whole})


@on_ranks(2)
def test_blocks_that_the_script_registers():
    split_over_all_ranks()
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    from smp.nn.huggingface import gpt2 as names

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    net = gpt2()
    plain = copy.deepcopy(net)
    smp.set_tensor_parallelism(net.transformer.h, True)
    hooks = names.get_hf_gpt2_transformer_layer_hooks()
    smp.tp_register_with_module(GPT2Block, smp.nn.DistributedTransformerLayer, *hooks)
    try:
        model = smp.DistributedModel(net)
    finally:  # classes stay registered in this process, where other tests split them in place
        del replacement._registered[GPT2Block]
    kinds = {type(m).__name__ for m in model.get_module().transformer.h}
    assert kinds == {"DistributedTransformerLayer"}
    with pytest.raises(NotImplementedError, match="past_key_values.*pass use_cache=False"):
        model(**texts(smp.tp_rank(), 0), use_cache=True)
    for step in range(2):
        batch = texts(smp.tp_rank(), step)
        assert_near(model(**batch, use_cache=False).logits, plain(**batch).logits, "logits")
    whole = model.state_dict()
    block = {
        name.removeprefix("transformer.h.1."): value
        for name, value in whole.items()
        if name.startswith("transformer.h.1.")
    }
    back = names.translate_layer_state_dict_to_hf_gpt2_block(block)
    plain.transformer.h[1].load_state_dict(back)
    again = names.translate_hf_block_state_dict_to_smdistributed(back)
    assert all(torch.equal(again[name], value) for name, value in block.items())
