"""Options of ``smp.nn``'s transformers by themselves and together, and what is refused."""

import inspect
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from smp.nn.transformer import seeds
from smp.tensor_parallel import group
from smp.tensor_parallel.rows.activations import ACTIVATIONS
from tests.ranks import on_ranks
from tests.reference import transformer as plain
from tests.reference.whole_job import assert_near, split_over_all_ranks

# ------------------------------------------------------------------- names and defaults

HEADS = {"num_attention_heads": 32, "attention_head_size": 32}
DROPS = {"attention_dropout_prob": 0.1, "hidden_dropout_prob": 0.1}
NEW = {"initializer_range": 0.02, "use_normal_initialization": False}
NORMS = {"pre_layernorm": False, "post_layernorm": True}
WIDTH = {"hidden_size": 1024}
INNER = {"intermediate_size": 4096}
MIDDLE = {"activation": "gelu", "layernorm_epsilon": 1e-5}
CROSS = {"causal_mask_size": None, "add_cross_attention": False}
LAYER = {**HEADS, **WIDTH, **INNER, **DROPS, **MIDDLE, **NEW, **CROSS, **NORMS}
ORIGINALS: dict[str, dict[str, Any]] = {
    "DistributedTransformerLMHead": {
        "num_layers": 12, **HEADS, **WIDTH, **INNER, "vocab_size": 30522,
        "num_positions": 1024, **DROPS, **MIDDLE, "num_token_types": 0, **CROSS,
        "add_lm_head": True, **NEW, **NORMS,
    },
    "DistributedTransformer": {"num_layers": 12, **LAYER},
    "DistributedTransformerLayer": LAYER,
    "DistributedAttentionLayer": {
        **HEADS, **WIDTH, **DROPS, "layernorm_epsilon": 1e-5, **NEW, "cross_attention": False,
        "causal_mask_size": None, **NORMS,
    },
    "DistributedTransformerOutputLayer": {
        **WIDTH, **INNER, "hidden_dropout_prob": 0.1, **MIDDLE, **NEW, **NORMS,
    },
    "DistributedEmbedding": {
        "num_embeddings": inspect.Parameter.empty, "embedding_dim": inspect.Parameter.empty,
        "padding_idx": None, "max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False,
        "sparse": False, "weight": None, "initializer_range": 0.02, "skip_allgather": False,
        "skip_scatter_and_merge": False, "vocab_parallel": False,
    },
}  # fmt: skip
OTHERS = {
    "embedding_dropout_prob": 0.1, "tie_input_output_embedding": True,
    "use_lm_head_bias": False, "final_layernorm": None, "use_qkv_bias": True,
    "use_attn_dense_bias": True, "use_alibi": False, "alibi_bias_max": 8, "rotary_dim": None,
    "rotary_base": 10000.0, "rotary_pairs": "neighbours", "parallel_attn_output": False,
    "single_pre_layernorm": False, "attention_in_fp32": False,
    "query_key_layer_scaling": False, "scale_attention_scores": True,
    "scale_attn_by_layer_idx": False, "layer_idx": 0, "mask_value": None, "window_size": None,
    "fp32_residual_addition": False, "flash_attention": False, "optimize": None,
}  # fmt: skip


@pytest.mark.parametrize("name", ORIGINALS)
def test_names_order_and_defaults_are_the_originals(name):
    """Scripts give the first of them by place."""
    found = inspect.signature(getattr(smp.nn, name)).parameters
    wanted = ORIGINALS[name]
    assert list(found)[: len(wanted)] == list(wanted)
    assert {option: found[option].default for option in wanted} == wanted
    if name != "DistributedEmbedding":
        more = {option: one.default for option, one in found.items() if option in OTHERS}
        assert more == {option: OTHERS[option] for option in more}


def test_every_option_is_one_of_the_language_models():
    """But for those of one layer: where it stands, and what it is."""
    taken = set(inspect.signature(smp.nn.DistributedTransformerLMHead).parameters)
    for name in ORIGINALS.keys() - {"DistributedEmbedding"}:
        own = set(inspect.signature(getattr(smp.nn, name)).parameters)
        assert own - taken <= {"layer_idx", "cross_attention"}, name
    assert taken >= OTHERS.keys() - {"layer_idx"}


OF_THE_MODEL = {
    "num_layers", "vocab_size", "num_positions", "num_token_types", "add_lm_head",
    "embedding_dropout_prob", "tie_input_output_embedding", "use_lm_head_bias",
    "final_layernorm",
}  # fmt: skip
# Of a layer's options those that are of its attentions alone, and of its output layer alone.
OF_ATTENTION = {
    "num_attention_heads", "attention_head_size", "attention_dropout_prob", "causal_mask_size",
    "use_qkv_bias", "use_attn_dense_bias", "use_alibi", "alibi_bias_max", "rotary_dim",
    "rotary_base", "rotary_pairs", "attention_in_fp32", "query_key_layer_scaling",
    "scale_attention_scores", "scale_attn_by_layer_idx", "mask_value", "window_size",
    "fused_softmax", "flash_attention", "add_cross_attention",
}  # fmt: skip
OF_OUTPUT = {
    "intermediate_size", "activation", "parallel_attn_output", "single_pre_layernorm",
    "fused_bias_gelu", "add_cross_attention",
}  # fmt: skip


@pytest.mark.parametrize("crosses", [False, True])
def test_options_of_a_language_model_are_those_of_its_parts(crosses):
    given: dict[str, Any] = {
        "num_layers": 2, "num_attention_heads": 3, "attention_head_size": 4, "hidden_size": 6,
        "intermediate_size": 5, "vocab_size": 7, "num_positions": 8, "num_token_types": 2,
        "attention_dropout_prob": 0.2, "hidden_dropout_prob": 0.3,
        "embedding_dropout_prob": 0.4, "activation": "relu", "layernorm_epsilon": 0.5,
        "causal_mask_size": 9, "add_cross_attention": crosses, "initializer_range": 0.6,
        "use_normal_initialization": True, "pre_layernorm": True, "post_layernorm": False,
        "tie_input_output_embedding": False, "use_lm_head_bias": True, "add_lm_head": False,
        "final_layernorm": False, "use_qkv_bias": False, "use_attn_dense_bias": False,
        "use_alibi": True, "alibi_bias_max": 7, "rotary_dim": 2, "rotary_base": 10.0,
        "rotary_pairs": "halves", "parallel_attn_output": not crosses,
        "single_pre_layernorm": not crosses, "attention_in_fp32": True,
        "query_key_layer_scaling": True, "scale_attention_scores": False,
        "scale_attn_by_layer_idx": True, "mask_value": -1.0, "window_size": 3,
        "fp32_residual_addition": True, "fused_softmax": False, "fused_dropout": True,
        "fused_bias_gelu": True, "flash_attention": True, "optimize": "memory",
    }  # fmt: skip
    net = smp.nn.DistributedTransformerLMHead(**given)
    of_layer = given.keys() - OF_THE_MODEL
    for number, layer in enumerate(net.transformer.seq_layers):
        parts = [
            (net, given.keys()),
            (net.transformer, of_layer | {"num_layers", "embedding_dropout_prob"}),
            (layer, of_layer),
            (layer.attention, of_layer - OF_OUTPUT),
            (layer.output, of_layer - OF_ATTENTION),
        ]
        for part, names in parts:
            found = {name: getattr(part.options, name) for name in names}
            assert found == {name: given[name] for name in names}, type(part).__name__
        assert layer.options.layer_idx == layer.attention.options.layer_idx == number
        assert not layer.attention.options.cross_attention
        assert (layer.cross_attention is not None) == crosses
        if crosses:
            of = layer.cross_attention.options
            names = of_layer - OF_OUTPUT - {"causal_mask_size", "window_size"}
            assert {name: getattr(of, name) for name in names} == {n: given[n] for n in names}
            assert of.cross_attention and of.layer_idx == number


# ------------------------------------------------------------------------ values refused

SMALL = {
    "num_layers": 1, "num_attention_heads": 2, "attention_head_size": 4, "hidden_size": 6,
    "intermediate_size": 5, "vocab_size": 7, "num_positions": 8,
}  # fmt: skip
REFUSED = {
    **{
        f"{option}={value}": ({option: value}, f"{option}={value}: must be at least 1")
        for option in SMALL.keys() - {"num_positions"}
        for value in (0, -1)
    },
    **{
        f"{option}=-1": ({option: -1}, f"{option}=-1: must be at least 0")
        for option in ("num_positions", "num_token_types")
    },
    **{
        f"{of}={value}": ({f"{of}_dropout_prob": value}, rf"{of}_dropout_prob={value}: must be")
        for of in ("attention", "hidden", "embedding")
        for value in (-0.1, 1, 1.5)
    },
    "activation": ({"activation": "swish"}, "activation='swish': must be one of"),
    "no norm": ({"post_layernorm": False}, "post_layernorm=False: pre_layernorm or post"),
    "pairs": ({"rotary_dim": 2, "rotary_pairs": "both"}, "rotary_pairs='both': must be 'nei"),
    "odd rotation": ({"rotary_dim": 3}, "rotary_dim=3: must be even and at most attention_hea"),
    "wide rotation": ({"rotary_dim": 6}, "rotary_dim=6: .* attention_head_size=4"),
    "negative rotation": ({"rotary_dim": -2}, "rotary_dim=-2: must be even"),
    "window": ({"window_size": 2}, "window_size=2: needs causal_mask_size"),
    "no window": ({"window_size": 0, "causal_mask_size": 8}, "window_size=0: must be at least"),
    "windows": (
        {"num_layers": 2, "window_size": [None, -1], "causal_mask_size": 8},
        r"window_size=\[None, -1\]: must be at least 1",
    ),
    "a window too many": (
        {"window_size": [2, None], "causal_mask_size": 8},
        r"window_size=\[2, None\]: one number, or one \(or None\) for each of num_layers=1",
    ),
    "parallel with both norms": (
        {"parallel_attn_output": True, "pre_layernorm": True},
        "parallel_attn_output=True: needs pre_layernorm=True and post_layernorm=False",
    ),
    "single without parallel": (
        {"single_pre_layernorm": True}, "single_pre_layernorm=True: needs parallel_attn_output"
    ),
    "parallel and cross": (
        {"parallel_attn_output": True, "pre_layernorm": True, "post_layernorm": False,
         "add_cross_attention": True},
        "parallel_attn_output=True: does not go with add_cross_attention",
    ),
    "optimize": ({"optimize": "size"}, "optimize='size': must be 'speed', 'memory' or"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_value_that_makes_no_sense_is_named(case):
    options, words = REFUSED[case]
    with pytest.raises(ValueError, match=f"^smp.nn.DistributedTransformer(LMHead)?: {words}"):
        smp.nn.DistributedTransformerLMHead(**{**SMALL, **options})


def test_an_option_that_does_not_exist_is_named():
    with pytest.raises(TypeError, match="Layer: got an unexpected.*'heads'"):
        smp.nn.DistributedTransformerLayer(heads=3)


@pytest.mark.parametrize("kind", ["TransformerLayer", "AttentionLayer"])
def test_one_layer_has_one_window(kind):
    words = r"^smp.nn.DistributedAttentionLayer: window_size=\[2\]: one attention has one"
    with pytest.raises(ValueError, match=words):
        made(kind, window_size=[2], causal_mask_size=8)


def test_the_least_values():
    options = {**dict.fromkeys(SMALL, 1), "num_positions": 0, "embedding_dropout_prob": 0}
    smp.nn.DistributedTransformerLMHead(**options, rotary_dim=0, window_size=None)
    smp.nn.DistributedTransformerLMHead(**options, window_size=1, causal_mask_size=1)
    smp.nn.DistributedTransformerLayer(1, 4, rotary_dim=4, hidden_size=6, intermediate_size=5)


# --------------------------------------------------------------- options drawn at random


def drawn(seed: int) -> dict[str, Any]:
    """Options of a language model which go together."""
    rng = random.Random(seed)

    def coin(*options: str) -> dict[str, bool]:
        return {option: rng.random() < 0.5 for option in options}

    layers, size = rng.randint(1, 3), rng.choice([2, 4])
    norms = rng.choice([(False, True), (True, False), (True, True)])
    out: dict[str, Any] = {
        "num_layers": layers, "num_attention_heads": rng.randint(2, 5),
        "attention_head_size": size, "hidden_size": rng.randint(5, 9),
        "intermediate_size": rng.randint(3, 9), "vocab_size": rng.randint(9, 20),
        "num_positions": rng.choice([0, 12]), "num_token_types": rng.choice([0, 3]),
        "layernorm_epsilon": rng.choice([1e-5, 0.1]),
        "causal_mask_size": rng.choice([None, 12]),
        "activation": rng.choice(["gelu", "gelu_new", "gelu_fast", "relu"]),
        "pre_layernorm": norms[0], "post_layernorm": norms[1],
        "rotary_dim": rng.choice([0, None, 2, size]), "rotary_base": rng.choice([10.0, 1e4]),
        "rotary_pairs": rng.choice(["neighbours", "halves"]),
        "mask_value": rng.choice([None, -0.5]), "alibi_bias_max": rng.choice([3, 8]),
        **coin("use_alibi", "use_qkv_bias", "use_attn_dense_bias", "scale_attention_scores",
               "scale_attn_by_layer_idx", "query_key_layer_scaling", "flash_attention",
               "add_lm_head", "tie_input_output_embedding", "use_lm_head_bias"),
    }  # fmt: skip
    if out["causal_mask_size"]:
        windows = [rng.choice([None, 1, 3]) for _ in range(layers)]
        out["window_size"] = rng.choice([None, 2, windows])
    if norms == (True, False):
        out["parallel_attn_output"] = rng.random() < 0.5
        out["single_pre_layernorm"] = out["parallel_attn_output"] and rng.random() < 0.5
    out["add_cross_attention"] = not out.get("parallel_attn_output") and rng.random() < 0.5
    if rng.random() < 0.5:
        out["final_layernorm"] = rng.random() < 0.5
    return out


def pair(seed: int, **more: Any) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """A distributed language model and the plain one, with its weights."""
    options = drawn(seed)
    torch.manual_seed(seed)
    none = {f"{of}_dropout_prob": 0.0 for of in ("attention", "hidden", "embedding")}
    net = smp.nn.DistributedTransformerLMHead(**options, **none, **more)
    return net, plain.PlainLMHead(**options), options


def given(options: dict[str, Any], seed: int) -> tuple[Tensor | None, ...]:
    """A batch, with any of its parts left out; labels with all seeds of ten or none."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shape = rng.randint(1, 3), rng.randint(3, 7)

    def numbers(most: int) -> Tensor:
        return torch.randint(0, most, shape, generator=generator)

    hidden = (torch.rand(shape, generator=generator) < 0.3).double()
    hidden[:, 0] = 0
    cross: tuple = ()
    if options["add_cross_attention"]:
        of = shape[0], rng.randint(1, 4), options["hidden_size"]
        states = torch.randn(of, generator=generator, dtype=torch.float64)
        mask = torch.randn(shape[0], 1, 1, of[1], generator=generator, dtype=torch.float64)
        cross = states, rng.choice([None, mask, mask[:1]])
    labels = numbers(options["vocab_size"])
    labels[0, 0] = labels[0, -1] = -100
    return (
        numbers(options["vocab_size"]),
        rng.choice([None, hidden]),
        numbers(3) if options["num_token_types"] and rng.random() < 0.7 else None,
        numbers(12) if rng.random() < 0.3 else None,
        *cross,
        random.Random(seed // 10).choice([None, labels]),
    )


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("seed", range(24))
def test_options_together_equal_the_plain_model(seed, float64):
    net, reference, options = pair(seed, optimize=["speed", "memory", "channels"][seed % 3])
    reference.load_state_dict(net.state_dict())
    for number in range(2):
        batch = given(options, 10 * seed + number)
        assert_near(net(batch), reference(batch), f"{number} of {options}")


@pytest.mark.parametrize("seed", range(100, 106))
@on_ranks(2)
def test_options_together_of_a_split_model(seed):
    split_over_all_ranks(prescaled_batch=seed % 2 == 0)
    torch.set_default_dtype(torch.float64)
    net, reference, options = pair(seed, optimize=["speed", "memory", "channels"][seed % 3])
    reference.load_state_dict(smp.DistributedModel(net).state_dict())
    batch = given(options, 10 * seed + group.rank() * (seed % 2))
    assert_near(net(batch), reference(batch), f"{options}")


def attention(**options: Any) -> tuple[nn.Module, nn.Module]:
    sizes = {"num_attention_heads": 3, "attention_head_size": 2, "hidden_size": 6, **options}
    torch.manual_seed(1)
    net = smp.nn.DistributedAttentionLayer(**sizes, attention_dropout_prob=0.0).double().eval()
    reference = plain.PlainAttention(**sizes).double()
    return net, reference


MASKS = [(1, 1, 1, 4), (2, 1, 1, 4), (1, 1, 4, 4), (2, 1, 4, 4), (2, 3, 4, 4), (1, 3, 1, 1)]


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"causal_mask_size": 4}, {"causal_mask_size": 4, "window_size": 2},
        {"causal_mask_size": 4, "mask_value": -0.5}, {"use_alibi": True},
        {"causal_mask_size": 4, "mask_value": 0.0},
        {"query_key_layer_scaling": True, "layer_idx": 2, "causal_mask_size": 4},
    ],
)  # fmt: skip
def test_masks_of_all_shapes_that_broadcast(shape, options, float64):
    """To be added to scores, beside what hides later positions."""
    net, reference = attention(**options)
    reference.load_state_dict(net.state_dict())
    x, mask = torch.randn(2, 4, 6).double(), torch.randn(shape).double()
    assert_near(net((x, mask)), reference((x, mask)), "output")
    assert_near(net((x, mask.float())), reference((x, mask.float().double())), "float32")


@pytest.mark.parametrize("flash", [False, True])
def test_flash_attention_is_called_where_it_is_asked_for(flash):
    """Scripts find the module by its class, and hook it."""
    net, _ = attention(flash_attention=flash)
    found = [m for m in net.modules() if isinstance(m, smp.nn.FlashAttentionLayer)]
    calls: list[Any] = []
    for module in found:
        module.register_forward_hook(lambda *_: calls.append(None))
    net((torch.randn(2, 4, 6).double(), None))
    assert len(found) == len(calls) == flash


@pytest.mark.parametrize("more", [{}, {"window_size": 2}, {"mask_value": -0.5}])
def test_a_cross_attention_sees_all_that_it_is_given(more, float64):
    """Whatever the options say of positions of one sequence."""
    net, reference = attention(cross_attention=True, causal_mask_size=4, **more)
    reference.load_state_dict(net.state_dict())
    x, states, mask = torch.randn(2, 4, 6), torch.randn(2, 3, 6), torch.randn(2, 1, 1, 3)
    for given_mask in (None, mask):
        inputs = x, states, given_mask
        assert_near(net(inputs), reference(inputs), "output")


@pytest.mark.parametrize("optimize", ["speed", "channels"])
@on_ranks(2)
def test_masks_of_other_shapes_on_each_rank(optimize):
    split_over_all_ranks()
    net, reference = attention(causal_mask_size=4, optimize=optimize)
    reference.load_state_dict(smp.DistributedModel(net).eval().state_dict())
    torch.manual_seed(group.rank())
    x = torch.randn(2, 4, 6).double()
    by_heads = torch.zeros(2, 3, 4, 4)
    with pytest.raises(ValueError, match=r"mask has shape \[2, 3, 4, 4\], and heads are split"):
        net((x, by_heads))
    masks = [shape for shape in MASKS if shape[1] == 1]
    for first, second in zip(masks, [*masks[1:], None], strict=True):
        shape = (first, second)[group.rank()]
        mask = None if shape is None else torch.randn(shape).double()
        assert_near(net((x, mask)), reference((x, mask)), f"{first} and {second}")


# ------------------------------------------------------------------------ inputs refused

OF_A_LAYER = {name: SMALL[name] for name in list(SMALL)[1:5]}
X, MASK = torch.zeros(2, 3, 6), torch.zeros(2, 1, 1, 3)
STATES = torch.zeros(2, 4, 6)
HIDDEN = r"hidden of {}: must be \[samples, positions, 6\]"


def made(kind: str, **options: Any) -> nn.Module:
    cls = getattr(smp.nn, f"Distributed{kind}")
    accepted = inspect.signature(cls).parameters
    return cls(**{**{k: v for k, v in SMALL.items() if k in accepted}, **options})


def refuses_inputs() -> None:
    """Whatever of these a user calls."""
    for kind in ("Transformer", "TransformerLayer", "AttentionLayer"):
        net = made(kind)
        named = f"^smp.nn.Distributed{kind}"
        for wrong, words in (
            (X, "not Tensor"), ((X,), "not one of 1"), ((X, MASK, None), "not one of 3")
        ):  # fmt: skip
            with pytest.raises(TypeError, match=rf"{named} .* \(hidden, mask\), {words}"):
                net(wrong)
        for wrong, found in (
            (X[0], r"shape \[3, 6\]"), (X[..., :5], r"shape \[2, 3, 5\]"), (None, "None"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=f"{named}.*{HIDDEN.format(found)}"):
                net((wrong, MASK))
        with pytest.raises(ValueError, match=r"mask.* shape \[2, 3\]: must be .* added to"):
            net((X, MASK[:, 0, 0]))
        with pytest.raises(TypeError, match="mask is bool: .* give 0 where a position is seen"):
            net((X, MASK.bool()))
        net([X, MASK])  # a list is as good as a tuple
    for kind in ("Transformer", "TransformerLayer"):
        net = made(kind, add_cross_attention=True)
        for wrong in (X, (X, MASK), (X, STATES, MASK)):
            with pytest.raises(TypeError, match=r"\(hidden, cross_states, mask, cross_mask\)"):
                net(wrong)
        with pytest.raises(ValueError, match=r"mask.* shape \[2, 4\]: must be"):
            net((X, STATES, MASK, torch.zeros(2, 4)))
        with pytest.raises(TypeError, match="mask is bool"):
            net((X, STATES, MASK, torch.zeros(2, 1, 1, 4).bool()))
        with pytest.raises(ValueError, match="made without add_cross_attention=True"):
            made(kind)((X, STATES, MASK, None))
        made(kind)((X, None, MASK, None))
    net = made("AttentionLayer", cross_attention=True)
    with pytest.raises(TypeError, match=r"\(hidden, cross_states, mask\), not one of 2"):
        net((X, MASK))
    with pytest.raises(ValueError, match="with cross_attention, cross_states is None"):
        net((X, None, MASK))
    with pytest.raises(ValueError, match=HIDDEN.format(r"shape \[3, 6\]")):
        made("TransformerOutputLayer")(X[0])


def test_inputs_that_do_not_fit_are_named():
    refuses_inputs()


@pytest.mark.parametrize("optimize", ["speed", "channels"])
@on_ranks(2)
def test_inputs_of_a_split_layer_that_do_not_fit_are_named(optimize):
    split_over_all_ranks(optimize=optimize)
    refuses_inputs()


@on_ranks(2)
def test_too_few_heads_or_channels_are_an_error():
    split_over_all_ranks()
    for option in ("num_attention_heads", "intermediate_size"):
        with pytest.raises(ValueError, match="too short to be split over"):
            made("TransformerLayer", **{option: 1})


def test_batches_of_a_language_model_that_do_not_fit_are_named():
    net = made("TransformerLMHead", embedding_dropout_prob=0.0)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    names = r"^smp.nn.DistributedTransformerLMHead takes one tuple \(ids, mask, token_types, "
    for wrong in (ids, (ids, None, None, None), (ids, *[None] * 6)):
        with pytest.raises(TypeError, match=rf"{names}position_ids, labels\)"):
            net(wrong)
    for wrong, shape in ((None, "None"), (ids[0], r"\[8\]")):
        with pytest.raises(
            ValueError, match=rf"ids must be \[samples, positions\], got {shape}"
        ):
            net((wrong, *[None] * 4))
    long = torch.zeros(2, 9, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"ids of shape \[2, 9\]: there are num_positions=8"):
        net((long, *[None] * 4))
    for mask in (torch.zeros(2, 7), torch.zeros(2, 1, 1, 8)):
        words = (
            rf"mask of shape \[{', '.join(map(str, mask.shape))}\] with ids of shape \[2, 8\]"
        )
        with pytest.raises(ValueError, match=words):
            net((ids, mask, None, None, None))
    for batch in ((ids, *[None] * 4), [ids, *[None] * 4]):
        assert net(batch).shape == (2, 8, 7)
    assert net((long, None, None, long, None)).shape == (2, 9, 7)  # at places of their own
    net.eval()
    of_types = (ids, None, torch.ones_like(ids), None, None)
    assert torch.equal(net(of_types), net((ids, *[None] * 4)))  # no embedding of types
    without = made("TransformerLMHead", num_positions=0)
    assert without((long, *[None] * 4)).shape == (2, 9, 7)
    for label in (7, -1):
        wrong = torch.full_like(ids, label)
        with pytest.raises(IndexError):
            net((ids, None, None, None, wrong))
    crossing = made("TransformerLMHead", add_cross_attention=True)
    with pytest.raises(TypeError, match=rf"{names}position_ids, cross_states, cross_mask, lab"):
        crossing((ids, *[None] * 4))


# --------------------------------------------------------------------- values and dropout


@pytest.mark.parametrize("training", [False, True])
def test_the_embeddings_are_dropped_in_training_alone(training):
    net = made("TransformerLMHead", embedding_dropout_prob=0.25, num_token_types=2)
    net.train(training)
    seen: list[Tensor] = []
    net.transformer.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    ids = torch.arange(7).repeat(40, 1)
    net((ids, None, ids % 2, None, None))
    places, types = net.position_embedding.weight[:7], net.token_type_embedding(ids % 2)
    whole = net.word_embedding.weight + places + types
    if not training:
        torch.testing.assert_close(seen[0], whole)
        return
    dropped = seen[0] == 0
    assert 0.2 < dropped.double().mean() < 0.3
    torch.testing.assert_close(seen[0], (whole / 0.75).masked_fill(dropped, 0.0))


def test_activations_by_the_names_of_transformers(float64):
    by_tanh = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
    wanted = {"gelu": "none", **dict.fromkeys(by_tanh, "tanh"), "relu": None}
    assert ACTIVATIONS.keys() == wanted.keys()
    x = torch.linspace(-3, 3, 36).view(2, 3, 6)
    for name, approximate in wanted.items():
        net = made("TransformerOutputLayer", activation=name, hidden_dropout_prob=0.0)
        y = net.dense1(x)
        y = y.relu() if approximate is None else F.gelu(y, approximate=approximate)
        want = net.layernorm(x + net.dense2(y) + net.dense2.bias)
        assert_near(net(x), want, name)


def test_scores_that_half_precision_cannot_hold_are_divided_by_the_layers_number():
    """... before they are computed: of equal scores each position has the same share."""
    net, _ = attention(query_key_layer_scaling=True, layer_idx=3)
    with torch.no_grad():
        for linear in (net.query, net.key):
            linear.weight.zero_()
            linear.bias.fill_(1)
        x = torch.randn(2, 4, 6).half()
        want = net.half()((x, None))
        for linear in (net.query, net.key):
            linear.bias.fill_(300)  # 2 channels: scores of 127,279, and 31,820 a layer
        assert torch.equal(net((x, None)), want) and want.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_residual_that_is_added_in_float32_is_normalised_in_its_own_dtype(dtype):
    """large + y - large: in the narrow dtype nothing is left of y."""
    net = made("TransformerOutputLayer", hidden_dropout_prob=0.0, fp32_residual_addition=True)
    large = 2 / torch.finfo(dtype).eps
    y = torch.arange(6) % 2
    with torch.no_grad():
        for linear in (net.dense1, net.dense2):
            linear.weight.zero_()
        net.dense1.bias.fill_(1)
        net.activation = F.relu
        net.dense2.weight[:, 0] = y
        net.dense2.bias.fill_(large)
        out = net.to(dtype)(torch.full((2, 3, 6), -large, dtype=dtype))
    assert out.dtype == dtype
    want = (2.0 * y - 1).expand(2, 3, 6)
    torch.testing.assert_close(out.float(), want, atol=0.01, rtol=0.01)


def test_seeds_are_drawn_on_the_host():
    """Wherever new tensors are made by default."""
    with torch.device("meta"):
        first, second = seeds.new_seed(), seeds.new_seed()
    assert 0 < first != second > 0


@pytest.mark.parametrize("which", ["attention", "hidden"])
def test_what_is_dropped_has_its_own_probability(which):
    """Both of an attention's; in evaluation nothing is."""
    drops = dict.fromkeys(("attention_dropout_prob", "hidden_dropout_prob"), 0.0)
    net = made("TransformerLayer", **{**drops, f"{which}_dropout_prob": 0.5}).double()
    x = torch.randn(2, 5, 6).double()
    trained, other = net((x, None))[0], net((x, None))[0]
    assert not torch.equal(trained, other)
    net.eval()
    without = made("TransformerLayer", **drops).double()
    without.load_state_dict(net.state_dict())
    assert torch.equal(net((x, None))[0], without((x, None))[0])
    part = net.output if which == "attention" else net.attention
    net.train()
    inputs = x if which == "attention" else (x, None)
    same = torch.equal(part(inputs), part(inputs))
    assert same == (which == "attention")


@pytest.mark.parametrize("normal", [False, True])
def test_values_of_new_embeddings_and_linears(normal):
    net = smp.nn.DistributedTransformerLMHead(
        num_layers=1, num_attention_heads=2, attention_head_size=32, hidden_size=64,
        intermediate_size=64, vocab_size=300, num_positions=300, num_token_types=64,
        use_normal_initialization=normal, initializer_range=0.05,
        tie_input_output_embedding=False, use_lm_head_bias=True, pre_layernorm=True,
        final_layernorm=True,
    )  # fmt: skip
    spread = 0.05 if normal else 1.0  # else torch's own
    for table in (net.word_embedding, net.position_embedding, net.token_type_embedding):
        assert 0.9 * spread < table.weight.std() < 1.1 * spread
    for linear in (net.lm_head, net.transformer.seq_layers[0].output.dense1):
        want = spread if normal else 1 / (3 * 64) ** 0.5
        assert 0.9 * want < linear.weight.std() < 1.1 * want
        assert linear.bias.any() != normal
    norms = [module for module in net.modules() if isinstance(module, nn.LayerNorm)]
    # By which scripts tell what has no weight decay.
    assert len(norms) == 7 and all(type(norm) is smp.nn.FusedLayerNorm for norm in norms)


def test_a_tied_head_has_the_embeddings_weight_and_a_bias_of_zeros():
    for tied, bias in ((True, True), (True, False), (False, True), (False, False)):
        net = made("TransformerLMHead", tie_input_output_embedding=tied, use_lm_head_bias=bias)
        assert (net.lm_head.weight is net.word_embedding.weight) == tied
        assert (net.lm_head.bias is not None) == bias
        assert not (tied and bias) or not net.lm_head.bias.any()
    assert made("TransformerLMHead", add_lm_head=False).lm_head is None


def test_the_loss_and_logits_at_once():
    net = made("TransformerLMHead", embedding_dropout_prob=0.0).eval().double()
    ids = torch.arange(6).view(2, 3)
    batch = (ids, None, None, None)
    logits = net((*batch, None))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")
    assert_near(net((*batch, ids)), loss / 6, "loss")
    assert_near(net.loss_and_logits((*batch, ids), True, "sum")[0], loss, "sum")
    assert_near(net.loss_and_logits((*batch, ids), True)[1], logits, "logits")
    assert net.loss_and_logits((*batch, ids), False)[1] is None
    found = net.loss_and_logits((*batch, None), False)
    assert found[0] is None and torch.equal(found[1], logits)
