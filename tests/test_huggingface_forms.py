"""Hugging Face's models with distributed modules in their place, and their state dicts."""

import copy
import functools
import importlib
import os
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from smp.compat.translation import Translation, part
from smp.tensor_parallel.splits import replacement
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


def small(config: str, model: str, **options: Any) -> nn.Module:
    """A model whose sizes do not divide by 2."""
    made = getattr(transformers, config)(
        vocab_size=37, num_hidden_layers=3, num_attention_heads=3, hidden_size=12,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=0, pad_token_id=0, **options,
    )  # fmt: skip
    return getattr(transformers, model)(made)


NO_DROPS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
gptj = functools.partial(
    small, "GPTJConfig", "GPTJForCausalLM", **NO_DROPS, rotary_dim=2, layer_norm_epsilon=1e-2
)
gptneo = functools.partial(
    small, "GPTNeoConfig", "GPTNeoForCausalLM", intermediate_size=20, window_size=3,
    resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0,
    attention_types=[[["global", "local", "local"], 1]], layer_norm_epsilon=1e-2,
)  # fmt: skip
gptneox = functools.partial(
    small, "GPTNeoXConfig", "GPTNeoXForCausalLM", intermediate_size=20, rotary_pct=0.5,
    layer_norm_eps=1e-2, attention_dropout=0.0, hidden_dropout=0.0,
)  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
bert = functools.partial(
    small, "BertConfig", "BertForMaskedLM", intermediate_size=20, **NO_DROPOUT
)
roberta = functools.partial(
    small, "RobertaConfig", "RobertaForMaskedLM", intermediate_size=20, **NO_DROPOUT
)

FAMILIES: dict[str, tuple[Callable[..., nn.Module], str]] = {
    "gpt2": (gpt2, "gpt2"),
    "gpt2, untied": (lambda: gpt2(tie_word_embeddings=False), "gpt2"),
    "gpt2, scaled": (
        lambda: gpt2(
            scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=False, n_inner=20
        ),
        "gpt2",
    ),
    "gptj": (gptj, "gptj"),
    "gptneo": (gptneo, "gptneo"),
    "gptneox": (gptneox, "gptneox"),
    "gptneox, in a row": (
        functools.partial(
            gptneox, use_parallel_residual=False, attention_bias=False, rotary_pct=1.0,
            tie_word_embeddings=True, rotary_emb_base=100, hidden_act="relu",
        ),
        "gptneox",
    ),
    "bert": (bert, "bert"),
    "bert, eager": (
        functools.partial(bert, attn_implementation="eager", hidden_act="gelu_new"),
        "bert",
    ),
    "bert, causal": (
        lambda: small(
            "BertConfig", "BertLMHeadModel", intermediate_size=20, is_decoder=True,
            use_cache=False, **NO_DROPOUT,
        ),
        "bert",
    ),
    "roberta": (roberta, "roberta"),
}  # fmt: skip
CACHE = "(cache|past_key_values)"  # from transformers 5.24, and before
COMPUTE_IN_FLOAT32 = {"gptj": "gptj", "gptneo": "gpt_neo"}  # their scores


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
    masked = {} if step == 1 else {"attention_mask": seen}
    return {"input_ids": ids, "labels": labels, **masked}


def loss_of(model: nn.Module, labels: Tensor, **batch: Tensor) -> Tensor:
    """That of the model itself is in float32."""
    logits = model(**batch).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def in_float64(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a family compute scores in float64, too."""
    folder = COMPUTE_IN_FLOAT32.get(FAMILIES[kind][1])
    if folder is not None:
        modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        double = types.SimpleNamespace(**{**vars(torch), "float32": torch.float64})
        monkeypatch.setattr(modeling, "torch", double)


class Pair:
    """A replaced model and the plain one, each with its optimizer."""

    def __init__(
        self,
        kind: str,
        make: Callable[[nn.Module], torch.optim.Optimizer],
        delayed: bool = False,
        **options: Any,
    ) -> None:
        """``delayed`` and ``options``: as of ``check_training``."""
        self.to_hf, self.to_ours = family(kind)
        torch.set_default_dtype(torch.float32)  # angles of rotations are
        torch.manual_seed(1)
        self.plain = FAMILIES[kind][0]()
        torch.manual_seed(1 + smp.tp_rank() * delayed)
        with (
            smp.tensor_parallelism(replace=True, **options),
            smp.delay_param_initialization(enabled=delayed),
        ):
            net = FAMILIES[kind][0]()
        torch.set_default_dtype(torch.float64)
        for model in (self.plain, net):
            model.double()
        self.model = smp.DistributedModel(net)
        self.optimizer = smp.DistributedOptimizer(make(self.model))
        self.plain_optimizer = make(self.plain)
        own_loss = isinstance(self.model.get_module(), smp.nn.DistributedTransformerLMHead)

        @smp.step
        def train(model: Any, batch: Any) -> Tensor:
            loss = model(**batch)["loss"] if own_loss else loss_of(model, **batch)
            model.backward(loss)
            return loss

        self._train = train

    def step(self, step: int, max_norm: float | None = None) -> None:
        self.optimizer.zero_grad()
        self.plain_optimizer.zero_grad()
        loss = self._train(self.model, texts(smp.dp_rank(), step)).reduce_mean()
        every = [loss_of(self.plain, **texts(rank, step)) for rank in range(smp.dp_size())]
        (sum(every) / len(every)).backward()
        assert_near(loss, every[smp.dp_rank()], f"loss of step {step}")
        if max_norm is not None:
            want = nn.utils.clip_grad_norm_(self.plain.parameters(), max_norm)
            assert_near(self.model.clip_grad_norm_(max_norm), want, f"norm of step {step}")
        self.optimizer.step()
        self.plain_optimizer.step()

    def check(self) -> None:
        """Parameters are the same by Hugging Face's names, and the plain model takes them."""
        got, wanted = self.to_hf(self.model.state_dict()), self.plain.state_dict()
        assert set(got) == set(wanted)
        for name, value in wanted.items():
            assert_near(got[name], value, name)
        self.plain.load_state_dict(got)


def check_training(
    kind: str, steps: int = 3, delayed: bool = False, **options: Any
) -> smp.DistributedModel:
    """Losses, norms and, by Hugging Face's names, parameters equal the plain model's.

    Args:
        delayed: the split model gets its values when it is partitioned.
        options: of the distributed modules.
    """
    pair = Pair(
        kind, lambda model: torch.optim.SGD(model.parameters(), 0.1), delayed, **options
    )
    for step in range(steps):
        pair.step(step, max_norm=0.5)
    pair.check()
    return pair.model


@pytest.mark.parametrize("kind", FAMILIES)
@on_ranks(2)
def test_a_replaced_model_trains_as_the_plain_one(kind, monkeypatch):
    in_float64(kind, monkeypatch)
    split_over_all_ranks()
    model = check_training(kind)
    assert any(isinstance(m, smp.nn.DistributedTransformer) for m in model.modules())


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.sample(4)
@on_ranks(1, 2)
def test_a_replaced_model_on_one_rank(kind, monkeypatch):
    """As on more: scripts reach for the names of what is in its place, at any degree."""
    in_float64(kind, monkeypatch)
    smp.init({"pipeline_parallel_degree": int(os.environ["OMPI_COMM_WORLD_SIZE"])})
    model = check_training(kind, steps=2, optimize="channels")
    assert any(isinstance(m, smp.nn.DistributedTransformer) for m in model.modules())
    assert "TP_GROUP" not in str(model.partition_report())
    if smp.pp_size() == 1:  # nothing is split
        assert model.get_module().state_dict().keys() == model.state_dict().keys()
    smp.DistributedOptimizer(smp.optimizers.FusedLAMB(model.parameters()))


@pytest.mark.stress
@pytest.mark.parametrize("kind", FAMILIES)
@on_ranks(3)
def test_a_replaced_model_on_more_ranks(kind, monkeypatch):
    in_float64(kind, monkeypatch)
    split_over_all_ranks()
    check_training(kind)


@pytest.mark.parametrize(
    "kind",
    [
        "gpt2",
        *(pytest.param(kind, marks=pytest.mark.stress) for kind in FAMILIES if kind != "gpt2"),
    ],
)
@on_ranks(4)
def test_a_replaced_model_in_a_pipeline(kind, monkeypatch):
    in_float64(kind, monkeypatch)
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2})
    check_training(kind, steps=2)


@pytest.mark.parametrize("kind", ["gpt2", "gptj", "gptneo", "gptneox"])
@pytest.mark.sample(2)
@on_ranks(4)
def test_a_replaced_model_whose_values_are_delayed(kind, monkeypatch):
    in_float64(kind, monkeypatch)
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2})
    check_training(kind, steps=2, delayed=True)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.sample(4)
@on_ranks(2, 3)
def test_a_replaced_model_whose_residual_stream_is_split_by_channels(kind, monkeypatch):
    in_float64(kind, monkeypatch)
    split_over_all_ranks()
    model = check_training(kind, steps=2, optimize="channels")
    kinds = {type(m).__name__ for m in model.modules()}
    assert "DistributedLayerNorm" in kinds


@on_ranks(4)
def test_a_replaced_model_of_channels_in_a_pipeline():
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2})
    check_training("gpt2", steps=2, optimize="channels", delayed=True)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("way", ["model_creation", "tensor_parallelism"])
@on_ranks(2)
def test_a_replaced_model_has_flash_attention_if_that_is_asked_for(way, flash):
    """Scripts look for the class; the logits are those of the plain model."""
    split_over_all_ranks()
    torch.manual_seed(1)
    plain = gpt2().double().eval()
    torch.manual_seed(1)
    options = {"replace": True, "flash_attention": flash, "zero_init": True}
    if way == "model_creation":
        context = smp.model_creation(tensor_parallelism=True, **options)
    else:
        context = smp.tensor_parallelism(**options)
    with context:
        net = gpt2()
    model = smp.DistributedModel(net.double()).eval()
    found = [
        m for m in model.get_module().modules() if isinstance(m, smp.nn.FlashAttentionLayer)
    ]
    assert len(found) == (3 if flash else 0)
    batch = {"input_ids": texts(smp.tp_rank(), 1)["input_ids"]}
    with torch.no_grad():
        assert_near(model(**batch).logits, plain(**batch).logits, "logits")


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
        given["encoder_attention_mask"] = torch.tensor([[1, 1, 0], [1, 1, 1]])
        assert_near(model(**given).logits, plain(**given).logits, "with a mask")
    model, _ = replaced(gpt2())
    with pytest.raises(ValueError, match="encoder_hidden_states are passed to a model without"):
        model(**given)


def test_what_a_model_is_marked_with_comes_before_its_configuration():
    """And what no distributed module takes is of other kinds of splitting."""
    form = importlib.import_module("smp.nn.huggingface.gpt2").FORMS["GPT2LMHeadModel"]
    net = gpt2()
    marks = {"attention_dropout_prob": 0.7, "optimize": "memory", "zero_init": True}
    made = form._make(net, marks)
    options = made.options
    assert (options.attention_dropout_prob, options.optimize) == (0.7, "memory")
    assert options.hidden_dropout_prob == 0.0 and made.config is net.config


@on_ranks(2)
def test_weights_that_would_be_lost_are_named():
    split_over_all_ranks()
    net = gpt2()
    net.lm_head.weight = nn.Parameter(torch.zeros(38, 12))  # no embedding's
    net.value = nn.Linear(12, 1)
    lost = (
        "GPT2LMHeadModel is .*'lm_head.weight' would be lost; .*'value.bias' would be lost: its"
    )
    with pytest.raises(ValueError, match=lost):
        replaced(net)


@on_ranks(2)
def test_layers_keep_the_activation_that_they_were_made_with():
    """Scripts change the configuration of a model that is there already."""
    split_over_all_ranks()
    torch.set_default_dtype(torch.float64)
    for made, changed in (("gelu", "gelu_new"), ("relu", "gelu"), ("gelu_new", "silu")):
        torch.manual_seed(1)
        net = gpt2(activation_function=made)
        for name, parameter in net.named_parameters():
            if "mlp" in name:
                parameter.data.mul_(20)
        net.config.activation_function = changed
        model, plain = replaced(net)
        batch = {"input_ids": texts(smp.tp_rank(), 1)["input_ids"]}
        with torch.no_grad():
            assert_near(model(**batch).logits, plain(**batch).logits, made)


@pytest.mark.parametrize("delayed", [False, True])
@on_ranks(2)
def test_a_head_is_tied_as_the_configuration_says(delayed, monkeypatch):
    """Scripts switch off what ties it, since the distributed module makes the weights."""
    monkeypatch.setattr(transformers.PreTrainedModel, "init_weights", lambda self: None)
    split_over_all_ranks()
    torch.manual_seed(1)
    plain = gpt2().eval()
    assert plain.lm_head.weight is not plain.transformer.wte.weight
    plain.lm_head.weight = plain.transformer.wte.weight
    torch.manual_seed(1)
    with (
        smp.model_creation(tensor_parallelism=True, replace=True),
        smp.delay_param_initialization(enabled=delayed),
    ):
        net = gpt2()
    with pytest.warns(UserWarning, match="GPT2LMHeadModel has a head .*=True: the embedding's"):
        model = smp.DistributedModel(net).eval()
    given = texts(smp.tp_rank(), 0)
    with torch.no_grad():
        torch.testing.assert_close(model(**given).loss, plain(**given).loss)
    assert not any("lm_head" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("kind", FAMILIES)
def test_state_dicts_there_and_back(kind):
    to_hf, to_ours = family(kind)
    if FAMILIES[kind][1] == "gptneox":
        with pytest.raises(ValueError, match="give num_attention_heads"):
            to_ours(FAMILIES[kind][0]().state_dict())
        to_hf, to_ours = (
            functools.partial(one, num_attention_heads=3) for one in (to_hf, to_ours)
        )
    plain = FAMILIES[kind][0]().state_dict()
    ours = to_ours(plain)
    assert any(".seq_layers." in name for name in ours) and set(ours) != set(plain)
    back = to_hf(ours)
    assert all(torch.equal(back[name], value) for name, value in plain.items())
    # As it is saved: not as a view of something larger.
    assert all(value.is_contiguous() for value in (*ours.values(), *back.values()))
    assert set(to_ours(ours)) == set(ours)  # it is ours already
    assert set(to_hf(plain)) == set(plain)  # or is split in place


def test_parts_that_are_packed_by_heads():
    names = Translation("layer", {"qkv": part("q", "k", "v", by_heads=True)})
    whole = torch.arange(2 * 3 * 4.0).view(24, 1)
    ours = names.to_ours({"x.layer.0.qkv.weight": whole}, heads=2)
    assert ours["x.seq_layers.0.q.weight"].flatten().tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    back = names.to_hugging_face(ours, heads=2)
    assert torch.equal(back["x.layer.0.qkv.weight"], whole)
    added = {"x.layer.0.extra": whole}  # the script's own, in a layer
    assert names.to_ours(added).keys() == {"x.seq_layers.0.extra"}
    assert names.to_hugging_face(names.to_ours(added)) == added
    with pytest.raises(ValueError, match="give num_attention_heads"):
        names.to_ours({"x.layer.0.qkv.weight": whole})


@on_ranks(2)
def test_blocks_that_the_script_registers(monkeypatch):
    monkeypatch.setattr(replacement, "_registered", {})  # other tests have blocks, too
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
    with pytest.raises(NotImplementedError, match=f"smp: {CACHE} of .*pass use_cache=False"):
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


@on_ranks(2)
def test_registered_blocks_with_an_encoder_and_without(monkeypatch):
    """Without, they skip their cross-attention; states that none looks at are an error."""
    monkeypatch.setattr(replacement, "_registered", {})
    split_over_all_ranks()
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    from smp.nn.huggingface import gpt2 as names

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    net = nn.ModuleList([gpt2(add_cross_attention=True), gpt2()])
    plain = copy.deepcopy(net)
    for one in net:
        smp.set_tensor_parallelism(one.transformer.h, True)
    hooks = names.get_hf_gpt2_transformer_layer_hooks()
    smp.tp_register_with_module(GPT2Block, smp.nn.DistributedTransformerLayer, *hooks)
    inner = smp.DistributedModel(net).get_module()
    batch = {**texts(smp.tp_rank(), 0), "use_cache": False}
    states, seen = torch.randn(2, 3, 12), torch.tensor([[1, 1, 0], [1, 1, 1]])
    for crosses in (False, True):
        if crosses:
            batch |= {"encoder_hidden_states": states, "encoder_attention_mask": seen}
        assert_near(inner[0](**batch).logits, plain[0](**batch).logits, f"{crosses=}")
        if crosses:
            with pytest.raises(ValueError, match="without add_cross_attention=True"):
                inner[1](**batch)
        else:
            assert_near(
                inner[1](**batch).logits, plain[1](**batch).logits, "no cross-attention"
            )


def wrapped(net: nn.Module) -> tuple[smp.DistributedModel, nn.Module]:
    """A model with distributed modules, and a copy without."""
    smp.set_tensor_parallelism(net, True, replace=True)
    plain = copy.deepcopy(net)
    return smp.DistributedModel(net), plain


DROPS = {  # what each is of: attention, hidden, embedding
    "gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "gptj": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "gptneo": ("attention_dropout", "resid_dropout", "embed_dropout"),
    "gptneox": ("attention_dropout", "hidden_dropout", "hidden_dropout"),
    "bert": ("attention_probs_dropout_prob", "hidden_dropout_prob", None),
    "roberta": ("attention_probs_dropout_prob", "hidden_dropout_prob", None),
}


@on_ranks(2)
def test_dropout_is_as_the_configuration_has_it():
    split_over_all_ranks()
    for kind, (attention, hidden, embedding) in DROPS.items():
        values = {attention: 0.1, embedding: 0.3, hidden: 0.2}
        values.pop(None, None)
        net = FAMILIES[kind][0]()
        for option, value in values.items():
            setattr(net.config, option, value)
        net = type(net)(net.config)
        model, _ = wrapped(net)
        found: dict[str, set[float]] = {"attention": set(), "hidden": set(), "embedding": set()}
        for module in model.get_module().modules():
            options = getattr(module, "options", None)
            if isinstance(module, smp.nn.DistributedAttentionLayer):
                found["attention"].add(options.attention_dropout_prob)
            if isinstance(module, smp.nn.DistributedTransformerLMHead):
                found["embedding"].add(options.embedding_dropout_prob)
            elif options is not None:
                found["hidden"].add(options.hidden_dropout_prob)
        assert found == {
            "attention": {values[attention]},
            "hidden": {values[hidden]},
            "embedding": set() if embedding is None else {values[embedding]},
        }, kind


@on_ranks(2)
def test_what_cannot_be_had_is_refused():
    split_over_all_ranks()
    batch = {"input_ids": texts(0, 0)["input_ids"]}

    def refuses(model: Any, words: str, **given: Any) -> None:
        with pytest.raises(NotImplementedError, match=f"{words}.*replace=False"):
            model(**batch, **given)

    model, plain = wrapped(gptj().eval())
    counted = torch.arange(5)[None]
    wanted = plain(**batch).logits
    found = model(**batch, position_ids=counted, logits_to_keep=2).logits
    torch.testing.assert_close(found, wanted[:, -2:], atol=1e-5, rtol=1e-5)
    refuses(model, "position_ids that do not count from 0", position_ids=counted + 1)
    refuses(model, "token_type_ids", token_type_ids=batch["input_ids"])

    model, _ = wrapped(bert())
    refuses(model, "output_hidden_states", output_hidden_states=True)
    model, _ = wrapped(FAMILIES["bert, causal"][0]())
    refuses(model, f"smp: {CACHE} of .*pass use_cache=False", use_cache=True)

    crossing = {"is_decoder": True, "add_cross_attention": True, "intermediate_size": 20}
    for net, words in (
        (bert(output_hidden_states=True), "output_hidden_states"),
        (small("BertConfig", "BertLMHeadModel", **crossing), "add_cross_attention=True"),
        (gptneox(rope_scaling={"rope_type": "linear", "factor": 2.0}), "rope_type='linear'"),
    ):
        with pytest.raises(NotImplementedError, match=f"{words}.*replace=False"):
            wrapped(net)


class Two(nn.Module):
    """Models of several families, at other paths than their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = gpt2()
        self.encoder = bert()
        self.layer = nn.ModuleList([gptneox(), nn.Linear(2, 2)])


@on_ranks(2)
def test_state_dicts_of_several_models_in_one():
    split_over_all_ranks()
    torch.manual_seed(1)
    model, plain = wrapped(Two())
    ours, wanted = model.state_dict(), plain.state_dict()
    assert "encoder.bert.encoder.seq_layers.0.attention.query.weight" in ours
    pairs = smp.state.module_manager.translate_functions
    assert len(pairs) == 3
    found = dict(ours)
    for to_hf, _ in pairs:
        found = to_hf(found)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    for _, to_ours in pairs:
        found = to_ours(found)
    assert set(found) == set(ours)
    assert all(torch.equal(found[name], value) for name, value in ours.items())


def test_families_that_are_split_in_place_keep_their_names():
    for name in ("t5", "llama"):
        family = importlib.import_module(f"smp.nn.huggingface.{name}")
        state = {"model.layers.0.self_attn.q_proj.weight": torch.ones(2)}
        assert getattr(family, f"translate_state_dict_to_hf_{name}")(state, 7) == state
        there = getattr(family, f"translate_hf_state_dict_to_smdistributed_{name}")
        assert there(state) == state
        there(state).clear()
        assert len(state) == 1  # which is the caller's


@on_ranks(2)
def test_the_heads_of_the_wrapped_model_are_known():
    split_over_all_ranks()
    from smp.nn.huggingface import gptneox as names

    model, plain = wrapped(gptneox())
    back = names.translate_state_dict_to_hf_gptneox(model.state_dict())
    assert all(torch.equal(back[name], value) for name, value in plain.state_dict().items())
    back["embed_out.weight"] = back.pop("lm_head.weight")  # as transformers before 5 saves it
    ours = names.translate_hf_state_dict_to_smdistributed_gptneox(back)
    assert set(ours) == set(model.state_dict())
