"""What transformers before 4.27 has: state dicts with buffers, arguments, an encoder of ViT.

``tests/hf_trainer`` trains with version 4.26.1 itself; here its names and signatures are
written down.
"""

import copy
import importlib
import inspect
import itertools
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Optional, Union

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.compat import forms
from smp.nn.huggingface import bert, gpt2, gptj, gptneo, gptneox, vit
from smp.tensor_parallel.splits import in_place
from tests.ranks import on_ranks
from tests.reference.whole_job import assert_near, split_over_all_ranks

SIZE, INNER, HEADS, WORDS, PLACES = 6, 10, 2, 7, 5

Shapes = dict[str, tuple[int, ...]]


def linear(name: str, inputs: int, outputs: int, bias: bool = True) -> Shapes:
    own: Shapes = {f"{name}.weight": (outputs, inputs)}
    return own | {f"{name}.bias": (outputs,)} if bias else own


def conv(name: str, inputs: int, outputs: int) -> Shapes:
    """A ``Conv1D`` of GPT-2."""
    return {f"{name}.weight": (inputs, outputs), f"{name}.bias": (outputs,)}


def norm(name: str) -> Shapes:
    return {f"{name}.weight": (SIZE,), f"{name}.bias": (SIZE,)}


def gpt2_block(cross: bool = False) -> Shapes:
    own = {
        **norm("ln_1"), **conv("attn.c_attn", SIZE, 3 * SIZE), **norm("ln_2"),
        **conv("attn.c_proj", SIZE, SIZE), **conv("mlp.c_fc", SIZE, INNER),
        **conv("mlp.c_proj", INNER, SIZE),
    }  # fmt: skip
    if not cross:
        return own
    return {
        **own, **norm("ln_cross_attn"), **conv("crossattention.c_attn", SIZE, 2 * SIZE),
        **conv("crossattention.q_attn", SIZE, SIZE),
        **conv("crossattention.c_proj", SIZE, SIZE),
    }  # fmt: skip


def gptj_block() -> Shapes:
    out = {**norm("ln_1"), **linear("mlp.fc_in", SIZE, INNER)}
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        out |= linear(f"attn.{name}", SIZE, SIZE, bias=False)
    return out | linear("mlp.fc_out", INNER, SIZE)


def gptneo_block() -> Shapes:
    out = {**norm("ln_1"), **norm("ln_2"), **linear("mlp.c_fc", SIZE, INNER)}
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        bias = name == "out_proj"
        out |= linear(f"attn.attention.{name}", SIZE, SIZE, bias)
    return out | linear("mlp.c_proj", INNER, SIZE)


def gptneox_block() -> Shapes:
    return {
        **norm("input_layernorm"), **norm("post_attention_layernorm"),
        **linear("attention.query_key_value", SIZE, 3 * SIZE),
        **linear("attention.dense", SIZE, SIZE), **linear("mlp.dense_h_to_4h", SIZE, INNER),
        **linear("mlp.dense_4h_to_h", INNER, SIZE),
    }  # fmt: skip


def encoder_block(before: str = "", after: str = "") -> Shapes:
    """BERT's; of ViT, which normalises before, with those names."""
    attention = "attention.attention" if before else "attention.self"
    out = {**norm(before or "attention.output.LayerNorm"), **norm(after or "output.LayerNorm")}
    for name in ("query", "key", "value"):
        out |= linear(f"{attention}.{name}", SIZE, SIZE)
    return {
        **out, **linear("attention.output.dense", SIZE, SIZE),
        **linear("intermediate.dense", SIZE, INNER), **linear("output.dense", INNER, SIZE),
    }  # fmt: skip


def decoder(layer: Shapes, buffers: Shapes, outside: Shapes, row: str) -> tuple[Shapes, Shapes]:
    """Parameters and buffers, of two layers."""
    parameters, beside = dict(outside), {}
    for index in range(2):
        parameters |= {f"{row}.{index}.{name}": shape for name, shape in layer.items()}
        beside |= {f"{row}.{index}.{name}": shape for name, shape in buffers.items()}
    return parameters, beside


def mask_of(*attentions: str) -> Shapes:
    out: Shapes = {}
    for name in attentions:
        out |= {f"{name}.bias": (1, 1, PLACES, PLACES), f"{name}.masked_bias": ()}
    return out


WORD: Shapes = {"transformer.wte.weight": (WORDS, SIZE)}
PLACE: Shapes = {"transformer.wpe.weight": (PLACES, SIZE)}
TIED: Shapes = {"lm_head.weight": (WORDS, SIZE)}
LAST = norm("transformer.ln_f")
OLD: dict[str, tuple[Any, tuple[Shapes, Shapes]]] = {
    "gpt2": (
        gpt2,
        decoder(gpt2_block(), mask_of("attn"), WORD | PLACE | LAST | TIED, "transformer.h"),
    ),
    "gpt2, crossing": (
        gpt2,
        decoder(
            gpt2_block(cross=True), mask_of("attn", "crossattention"),
            WORD | PLACE | LAST | TIED, "transformer.h",
        ),
    ),
    "gptj": (
        gptj,
        decoder(
            gptj_block(), mask_of("attn"), WORD | LAST | linear("lm_head", SIZE, WORDS),
            "transformer.h",
        ),
    ),
    "gptneo": (
        gptneo,
        decoder(
            gptneo_block(), mask_of("attn.attention"), WORD | PLACE | LAST | TIED,
            "transformer.h",
        ),
    ),
    "gptneox": (
        gptneox,
        decoder(
            gptneox_block(), mask_of("attention") | {"attention.rotary_emb.inv_freq": (2,)},
            {"gpt_neox.embed_in.weight": (WORDS, SIZE), "embed_out.weight": (WORDS, SIZE),
             **norm("gpt_neox.final_layer_norm")},
            "gpt_neox.layers",
        ),
    ),
    "bert": (bert, decoder(encoder_block(), {}, {}, "layer")),
    "vit": (
        vit,
        decoder(encoder_block("layernorm_before", "layernorm_after"), {}, {}, "layer"),
    ),
}  # fmt: skip
OURS: dict[str, dict[str, Any]] = {  # what the distributed module is made with
    "gpt2": {},
    "gpt2, crossing": {"add_cross_attention": True},
    "gptj": {
        "num_positions": 0, "use_lm_head_bias": True, "use_qkv_bias": False,
        "use_attn_dense_bias": False, "parallel_attn_output": True,
        "single_pre_layernorm": True,
    },
    "gptneo": {"use_qkv_bias": False},
    "gptneox": {"num_positions": 0, "tie_input_output_embedding": False},
    "bert": {},
    "vit": {"pre_layernorm": True, "post_layernorm": False},
}  # fmt: skip


def valued(shapes: Shapes) -> dict[str, Tensor]:
    count = itertools.count(1)
    return {name: torch.randn(shape) + next(count) for name, shape in shapes.items()}


def distributed(kind: str) -> nn.Module:
    options = {
        "num_layers": 2, "num_attention_heads": HEADS, "attention_head_size": SIZE // HEADS,
        "hidden_size": SIZE, "intermediate_size": INNER, **OURS[kind],
    }  # fmt: skip
    if kind in ("bert", "vit"):
        return smp.nn.DistributedTransformer(**options)
    head = {"vocab_size": WORDS, "num_positions": PLACES, "causal_mask_size": PLACES}
    normed = {"pre_layernorm": True, "post_layernorm": False}
    return smp.nn.DistributedTransformerLMHead(**{**head, **normed, **options})


def functions(kind: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """To our names, and back."""
    module = OLD[kind][0]
    name = module.__name__.rpartition(".")[2]
    pair = (
        getattr(module, f"translate_hf_state_dict_to_smdistributed_{name}"),
        getattr(module, f"translate_state_dict_to_hf_{name}"),
    )
    if kind != "gptneox":
        return pair
    to_ours, to_hf = pair
    return (
        lambda state, **o: to_ours(state, num_attention_heads=HEADS, **o),
        lambda state, **o: to_hf(state, num_attention_heads=HEADS, **o),
    )


@pytest.mark.parametrize("max_seq_len", [None, PLACES])
@pytest.mark.parametrize("kind", OLD)
def test_a_state_dict_with_buffers_is_loaded_and_comes_back(kind, max_seq_len, monkeypatch):
    """The distributed module takes all of it but the buffers."""
    monkeypatch.setattr(gptneox, "_has_old_head", lambda: True)
    parameters, buffers = OLD[kind][1]
    given = valued({**buffers, **parameters})
    to_ours, to_hf = functions(kind)

    ours = to_ours(given, max_seq_len=max_seq_len)
    net = distributed(kind)
    net.load_state_dict(ours)
    back = to_hf(net.state_dict(), max_seq_len=max_seq_len)

    has_buffers = kind.startswith("gpt2") and max_seq_len
    assert back.keys() == (parameters | buffers if has_buffers else parameters).keys()
    for name in parameters.keys() - {"lm_head.weight", "transformer.wte.weight"}:
        assert torch.equal(back[name], given[name]), name
    seen = torch.tensor([[i >= j for j in range(PLACES)] for i in range(PLACES)])
    for name in buffers if has_buffers else ():
        want = torch.tensor(-1e4) if "masked" in name else seen.to(torch.uint8)[None, None]
        assert back[name].dtype == want.dtype and torch.equal(back[name], want), name


@pytest.mark.parametrize("cross", [False, True])
def test_a_blocks_state_dict_with_buffers(cross):
    buffers = mask_of("attn", "crossattention") if cross else mask_of("attn")
    given = valued(gpt2_block(cross) | buffers)
    layer = smp.nn.DistributedTransformerLayer(
        HEADS, SIZE // HEADS, SIZE, INNER, add_cross_attention=cross, causal_mask_size=PLACES,
        pre_layernorm=True, post_layernorm=False,
    )  # fmt: skip

    layer.load_state_dict(gpt2.translate_hf_block_state_dict_to_smdistributed(given))
    state = layer.state_dict()

    back = gpt2.translate_layer_state_dict_to_hf_gpt2_block(state)
    assert back.keys() == gpt2_block(cross).keys()
    assert all(torch.equal(back[name], given[name]) for name in back)
    more = gpt2.translate_layer_state_dict_to_hf_gpt2_block(state, max_seq_len=3)
    assert more.keys() == given.keys()
    assert all(more[name].shape == (1, 1, 3, 3) for name in buffers if "masked" not in name)


@pytest.mark.parametrize("module", [bert, gpt2, gptj, gptneo, gptneox, vit])
def test_translations_are_where_they_say(module):
    """So that they can be pickled, and are found in tracebacks."""
    family = module.__name__.rpartition(".")[2]
    for name in (
        f"translate_hf_state_dict_to_smdistributed_{family}",
        f"translate_state_dict_to_hf_{family}",
    ):
        assert pickle.loads(pickle.dumps(getattr(module, name))) is getattr(module, name)
        assert getattr(module, name).__name__ == name


def test_queries_keys_and_values_lie_as_each_family_packs_them():
    """One behind the other, or head by head."""
    packed = torch.arange(3.0 * SIZE)
    heads = packed.view(HEADS, 3, -1)
    for kind, name, ours in (
        ("gpt2", "transformer.h.0.attn.c_attn.bias", list(packed.chunk(3))),
        (
            "gptneox", "gpt_neox.layers.0.attention.query_key_value.bias",
            [heads[:, i].flatten() for i in range(3)],
        ),
    ):  # fmt: skip
        found = functions(kind)[0]({name: packed})
        for part, want in zip(("query", "key", "value"), ours, strict=True):
            assert torch.equal(
                found[f"transformer.seq_layers.0.attention.{part}.bias"], want
            ), (kind, part)
    both = {"transformer.h.0.crossattention.c_attn.bias": torch.arange(2.0 * SIZE)}
    crossed = functions("gpt2, crossing")[0](both)
    before = "transformer.seq_layers.0.cross_attention"
    assert crossed[f"{before}.key.bias"].tolist() == list(range(SIZE))
    assert crossed[f"{before}.value.bias"].tolist() == list(range(SIZE, 2 * SIZE))


def test_the_head_of_gptneox_has_the_installed_versions_name(monkeypatch):
    ours = {"lm_head.weight": torch.ones(1)}
    for tied, name in ((["lm_head.weight"], "lm_head.weight"), ([], "embed_out.weight")):
        installed = SimpleNamespace(GPTNeoXForCausalLM=SimpleNamespace(_tied_weights_keys=tied))
        monkeypatch.setattr(importlib, "import_module", lambda _, it=installed: it)
        assert list(gptneox.translate_state_dict_to_hf_gptneox(ours)) == [name]
    monkeypatch.setitem(vars(installed.GPTNeoXForCausalLM), "_tied_weights_keys", None)
    assert list(gptneox.translate_state_dict_to_hf_gptneox(ours)) == ["embed_out.weight"]

    def not_installed(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", not_installed)
    assert list(gptneox.translate_state_dict_to_hf_gptneox(ours)) == ["lm_head.weight"]


# ------------------------------------------------------------------- hooks of blocks


class OldBlock(nn.Module):
    """With the signature of a ``GPT2Block`` of transformers 4.26."""

    def forward(
        self,
        hidden_states: Any,
        layer_past: Any = None,
        attention_mask: Any = None,
        head_mask: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        use_cache: Any = False,
        output_attentions: Any = False,
    ) -> Union[tuple[Tensor], Optional["Tuple"]]:  # noqa: F821, UP007, UP045
        raise NotImplementedError


class NewBlock(nn.Module):
    """With that of transformers 5."""

    def forward(
        self,
        hidden_states: Any,
        cache: Any = None,
        attention_mask: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        use_cache: Any = False,
        **kwargs: Any,
    ) -> Tensor:
        raise NotImplementedError


def hooks_of(block: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> tuple:
    installed = SimpleNamespace(GPT2Block=block)
    monkeypatch.setattr(gpt2.importlib, "import_module", lambda _: installed)
    return gpt2.get_hf_gpt2_transformer_layer_hooks()


@pytest.mark.parametrize("block", [OldBlock, NewBlock])
def test_hooks_take_what_a_block_takes(block, monkeypatch):
    _, forward, returned = hooks_of(block, monkeypatch)
    wanted = list(inspect.signature(block.forward).parameters)[1:]
    assert list(inspect.signature(forward).parameters) == wanted
    x, states = torch.randn(2, 3, SIZE), torch.randn(2, 4, SIZE)
    seen, others = torch.tensor([[1, 1, 0], [1, 1, 1]]), torch.ones(2, 4)
    others[1, 2] = 0

    ((hidden, nothing, mask, no_mask),), named = forward(x, attention_mask=seen)
    assert hidden is x and nothing is no_mask is None and named == {}
    assert mask.dtype == x.dtype and mask.shape == (2, 1, 1, 3)
    assert mask.flatten().tolist() == [0, 0, -1e4, 0, 0, 0]
    ((_, got, mask, cross_mask),), _ = forward(
        x, encoder_hidden_states=states, encoder_attention_mask=others
    )
    assert got is states and mask is None
    assert cross_mask.flatten().tolist() == [0] * 6 + [-1e4, 0]
    result = (x, None)
    assert returned(result) == (x, None) if block is OldBlock else returned(result) is x


@pytest.mark.parametrize("block", [OldBlock, NewBlock])
def test_hooks_refuse_what_a_layer_does_not_have(block, monkeypatch):
    """By its own name, or among others that the block hands on."""
    _, forward, _ = hooks_of(block, monkeypatch)
    x = torch.randn(2, 3, SIZE)
    old = ("layer_past", "head_mask", "output_attentions")
    new = ("cache", "past_key_values", "output_attentions")
    for name in old if block is OldBlock else new:
        with pytest.raises(NotImplementedError, match=f"smp: {name} of a model"):
            forward(x, **{name: x})
    given = {} if block is OldBlock else {"position_ids": torch.arange(3)}
    forward(x, **given)


@pytest.mark.parametrize("layer_idx", [None, 3])
def test_a_blocks_options_are_those_of_its_configuration(layer_idx, monkeypatch):
    init, _, _ = hooks_of(OldBlock, monkeypatch)
    config = gpt2_config()
    args, made_with = init(config, layer_idx)
    assert args == () and made_with == {**GPT2_LAYER, "layer_idx": layer_idx or 0}
    assert init(config, layer_idx=layer_idx) == (args, made_with)
    config.n_inner = None
    assert init(config)[1]["intermediate_size"] == 4 * SIZE


def test_blocks_of_old_transformers_say_nothing_of_their_configuration():
    """They have to be made after they are registered."""
    config = gpt2_config()
    attention = SimpleNamespace(config=config, layer_idx=3)
    assert gpt2._made_with(SimpleNamespace(attn=attention)) == ((config, 3), {})
    assert gpt2._made_with(SimpleNamespace(attn=SimpleNamespace())) is None


def test_which_versions_are_old(monkeypatch):
    transformers = pytest.importorskip("transformers")
    for version, is_old in (
        ("3.5.1", True), ("4.26.1", True), ("4.27.0", False), ("4.100.0", False),
        ("5.0", False),
    ):  # fmt: skip
        monkeypatch.setattr(transformers, "__version__", version)
        assert in_place._are_old_transformers() == is_old, version


# ---------------------------------------------------------------------------- options


def gpt2_config(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        hidden_size=SIZE, num_attention_heads=HEADS, num_hidden_layers=2, vocab_size=WORDS,
        n_positions=PLACES, n_inner=INNER, attn_pdrop=0.1, resid_pdrop=0.2, embd_pdrop=0.3,
        activation_function="relu", layer_norm_epsilon=1e-3, initializer_range=0.5,
        add_cross_attention=True, scale_attn_weights=False,
        scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True,
        tie_word_embeddings=False, **more,
    )  # fmt: skip


OF_A_LAYER = {
    "num_attention_heads": HEADS, "attention_head_size": SIZE // HEADS, "hidden_size": SIZE,
    "initializer_range": 0.5, "use_normal_initialization": True,
}  # fmt: skip
NORMED_BEFORE = {"pre_layernorm": True, "post_layernorm": False}
GPT2_LAYER = {
    **OF_A_LAYER, **NORMED_BEFORE, "intermediate_size": INNER, "attention_dropout_prob": 0.1,
    "hidden_dropout_prob": 0.2, "activation": "relu", "layernorm_epsilon": 1e-3,
    "causal_mask_size": PLACES, "add_cross_attention": True, "scale_attention_scores": False,
    "scale_attn_by_layer_idx": True, "attention_in_fp32": True,
}  # fmt: skip
OF_A_MODEL = {
    "num_layers": 2, "vocab_size": WORDS, "tie_input_output_embedding": False,
    "embedding_dropout_prob": 0.3,
}  # fmt: skip


def test_options_of_gpt2():
    found = gpt2.FORMS["GPT2LMHeadModel"].options(SimpleNamespace(config=gpt2_config()))
    assert found == {**GPT2_LAYER, **OF_A_MODEL, "num_positions": PLACES}


def test_options_of_gptj():
    options = gptj.FORMS["GPTJForCausalLM"].options
    want = {
        **GPT2_LAYER, **OF_A_MODEL, "num_positions": 0, "parallel_attn_output": True,
        "single_pre_layernorm": True, "use_qkv_bias": False, "use_attn_dense_bias": False,
        "use_lm_head_bias": True, "rotary_dim": 2,
    }  # fmt: skip
    for name in ("add_cross_attention", "scale_attention_scores", "scale_attn_by_layer_idx"):
        del want[name]
    config = gpt2_config(rotary_dim=2)
    assert options(SimpleNamespace(config=config)) == want
    config.rotary_dim = config.n_inner = None
    whole = {"rotary_dim": SIZE // HEADS, "intermediate_size": 4 * SIZE}
    assert options(SimpleNamespace(config=config)) == {**want, **whole}
    config.rotary_dim = 64  # more than a head has: all of it, as there
    assert options(SimpleNamespace(config=config)) == {**want, **whole}


def test_options_of_gptneo():
    config = gpt2_config(
        intermediate_size=INNER, max_position_embeddings=PLACES, attention_dropout=0.1,
        resid_dropout=0.2, embed_dropout=0.3, window_size=3,
        attention_layers=["local", "global"],
    )  # fmt: skip
    want = {
        **GPT2_LAYER, **OF_A_MODEL, "num_positions": PLACES, "use_qkv_bias": False,
        "window_size": [3, None],
    }  # fmt: skip
    for name in ("add_cross_attention", "scale_attn_by_layer_idx"):
        del want[name]
    options = gptneo.FORMS["GPTNeoForCausalLM"].options
    assert options(SimpleNamespace(config=config)) == want
    config.intermediate_size = None
    found = options(SimpleNamespace(config=config))
    assert found == {**want, "intermediate_size": 4 * SIZE}


def neox(old: bool, **more: Any) -> SimpleNamespace:
    """A model: before transformers 4.30 layers have no dropouts, and before 5 other names."""
    config = gpt2_config(
        intermediate_size=INNER, hidden_act="relu", layer_norm_eps=1e-3,
        max_position_embeddings=PLACES, use_parallel_residual=True,
    )  # fmt: skip
    attention = SimpleNamespace(query_key_value=nn.Linear(2, 2), rotary_ndims=2)
    layer, inner = SimpleNamespace(attention=attention), SimpleNamespace()
    inner.layers = [layer]
    if old:
        config.rotary_emb_base = 100
    else:
        config.rope_parameters = {"rope_type": "default", "rope_theta": 200.0}
        attention.attention_dropout = 0.1
        layer.post_mlp_dropout, inner.emb_dropout = nn.Dropout(0.2), nn.Dropout(0.3)
    vars(config).update(more)
    return SimpleNamespace(config=config, gpt_neox=inner)


def test_options_of_gptneox():
    options = gptneox.FORMS["GPTNeoXForCausalLM"].options
    want = {
        **GPT2_LAYER, **OF_A_MODEL, "num_positions": 0, "parallel_attn_output": True,
        "use_qkv_bias": True, "use_attn_dense_bias": True, "rotary_dim": 2,
        "rotary_base": 200.0, "rotary_pairs": "halves",
    }  # fmt: skip
    for name in ("add_cross_attention", "scale_attention_scores", "scale_attn_by_layer_idx",
                 "attention_in_fp32"):  # fmt: skip
        del want[name]
    assert options(neox(old=False)) == want
    dropped = dict.fromkeys([name for name in want if "dropout" in name], 0.0)
    assert options(neox(old=True)) == {**want, **dropped, "rotary_base": 100}
    without = neox(old=True)
    del without.config.use_parallel_residual
    assert options(without)["parallel_attn_output"] is True
    between = neox(old=False)
    between.gpt_neox.layers[0].attention.attention_dropout = nn.Dropout(0.4)
    assert options(between)["attention_dropout_prob"] == 0.4
    for scaled, words in (
        (neox(old=True, rope_scaling={"type": "linear"}), "rope_scaling={'type': 'linear'}"),
        (
            neox(old=False, rope_parameters={"rope_type": "yarn", "rope_theta": 1.0}),
            "rope_type='yarn'",
        ),
    ):
        with pytest.raises(NotImplementedError, match=f"smp: {words}: no distributed module"):
            options(scaled)
    options(neox(old=True, rope_scaling=None))


def encoder_config(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        hidden_size=SIZE, num_attention_heads=HEADS, num_hidden_layers=2,
        intermediate_size=INNER, attention_probs_dropout_prob=0.1, hidden_dropout_prob=0.2,
        hidden_act="relu", layer_norm_eps=1e-3, initializer_range=0.5, **more,
    )  # fmt: skip


OF_AN_ENCODER = {
    **OF_A_LAYER, "num_layers": 2, "intermediate_size": INNER, "attention_dropout_prob": 0.1,
    "hidden_dropout_prob": 0.2, "activation": "relu", "layernorm_epsilon": 1e-3,
}  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
def test_options_of_vit(bias):
    made = SimpleNamespace(config=encoder_config(qkv_bias=bias))
    found = vit.FORMS["ViTEncoder"].options(made)
    assert found == {**OF_AN_ENCODER, **NORMED_BEFORE, "use_qkv_bias": bias}


def test_options_of_bert():
    def options(**more: Any) -> dict[str, Any]:
        given = {"add_cross_attention": False, "is_decoder": False, **more}
        config = encoder_config(max_position_embeddings=PLACES, **given)
        return bert.FORMS["BertEncoder"].options(SimpleNamespace(config=config))

    assert options() == {**OF_AN_ENCODER, "causal_mask_size": None}
    assert options(is_decoder=True)["causal_mask_size"] == PLACES
    assert options(position_embedding_type="absolute") == options()
    for name, value in (
        ("position_embedding_type", "relative_key"), ("add_cross_attention", True)
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=f"smp: {name}={value!r}: no distributed"):
            options(**{name: value})


def test_the_heads_are_those_given_or_the_models(monkeypatch):
    assert forms.heads_of_the_model(5) == 5
    monkeypatch.setattr(forms.state, "model", None, raising=False)
    assert forms.heads_of_the_model(None) is None
    model = SimpleNamespace(config=SimpleNamespace(num_attention_heads=7))
    monkeypatch.setattr(forms.state, "model", model, raising=False)
    assert forms.heads_of_the_model(None) == 7 and forms.heads_of_the_model(3) == 3


# ------------------------------------------------------------------ an encoder of ViT


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.attention = nn.Module()
        for name in ("query", "key", "value"):
            self.attention.add_module(name, nn.Linear(SIZE, SIZE, bias))
        self.output = nn.Module()
        self.output.dense = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            getattr(self.attention, name)(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        scores = q @ k.transpose(-1, -2) / (SIZE // HEADS) ** 0.5
        return self.output.dense((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = Attention(config.qkv_bias)
        self.intermediate, self.output = nn.Module(), nn.Module()
        self.intermediate.dense = nn.Linear(SIZE, INNER)
        self.output.dense = nn.Linear(INNER, SIZE)
        self.layernorm_before = nn.LayerNorm(SIZE, config.layer_norm_eps)
        self.layernorm_after = nn.LayerNorm(SIZE, config.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.layernorm_before(x))
        inner = self.intermediate.dense(self.layernorm_after(x)).relu()
        return x + self.output.dense(inner)


class ViTEncoder(nn.Module):
    """By the names and arguments of transformers 4.26."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.layer = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))

    def forward(
        self,
        hidden_states: Tensor,
        head_mask: Any = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> Any:
        for layer in self.layer:
            hidden_states = layer(hidden_states)
        return SimpleNamespace(last_hidden_state=hidden_states)


ViTEncoder.__module__ = "transformers.models.vit.modeling_vit"


@on_ranks(2)
def test_an_encoder_of_vit_is_replaced():
    pytest.importorskip("transformers")
    split_over_all_ranks()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    config = encoder_config(qkv_bias=False)
    config.attention_probs_dropout_prob = config.hidden_dropout_prob = 0.0
    net = nn.ModuleList([ViTEncoder(config)])
    plain = copy.deepcopy(net)
    smp.set_tensor_parallelism(net, replace=True)
    model = smp.DistributedModel(net)
    inner = model.get_module()[0]
    assert isinstance(inner, smp.nn.DistributedTransformer) and inner.config is config
    assert inspect.signature(inner.forward) == inspect.signature(plain[0].forward)
    x = torch.randn(2 + smp.tp_rank(), 4, SIZE)

    out = inner(x, return_dict=True)
    want = plain[0](x).last_hidden_state
    assert type(out).__name__ == "BaseModelOutput"
    assert_near(out.last_hidden_state, want, "hidden state")
    (alone,) = inner(x, return_dict=False)
    assert_near(alone, want, "hidden state in a tuple")
    for name in ("head_mask", "output_attentions", "output_hidden_states"):
        with pytest.raises(NotImplementedError, match=f"smp: {name} of a model"):
            inner(x, **{name: True})
    inner(x, head_mask=[None, None])

    ours, wanted = model.state_dict(), plain.state_dict()
    ((to_hf, to_ours),) = smp.state.module_manager.translate_functions
    assert all(torch.equal(to_hf(ours)[name], value) for name, value in wanted.items())
    assert to_ours(wanted).keys() == ours.keys()
