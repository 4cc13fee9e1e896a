"""``smp.nn.DistributedTransformer`` and its parts, against the same written down plainly."""

import os
from collections import Counter
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.nn.transformer.split_parts import PartOfSum
from smp.tensor_parallel import group, primitives
from smp.tensor_parallel.rows import kernels, same_samples
from tests.models.modules import module_of
from tests.ranks import on_ranks
from tests.reference import transformer as plain
from tests.reference.whole_job import (
    Batch,
    WholeJob,
    assert_near,
    in_float64,
    split_over_all_ranks,
)

SIZES = {
    "num_attention_heads": 5,
    "attention_head_size": 4,
    "hidden_size": 10,
    "intermediate_size": 13,
    "attention_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}
PRE = {"pre_layernorm": True, "post_layernorm": False}
GPT = {"causal_mask_size": 16, **PRE}
LM = {"num_layers": 2, "vocab_size": 23, "num_positions": 16, **SIZES}
NO_DROPOUT = {"embedding_dropout_prob": 0.0}  # of the distributed ones, beside SIZES

LAYERS = {
    "bert": {},
    "relu": {"activation": "relu", "optimize": "memory"},
    "gpt": {**GPT, "activation": "gelu_new"},
    "both norms": {"pre_layernorm": True, "post_layernorm": True, "optimize": "memory"},
    "cross": {"add_cross_attention": True},
    "cross, causal": {"add_cross_attention": True, **GPT, "optimize": "memory"},
    "gpt-j": {
        **GPT, "parallel_attn_output": True, "single_pre_layernorm": True, "rotary_dim": 2,
        "use_qkv_bias": False, "use_attn_dense_bias": False,
    },
    "gpt-neox": {
        **GPT, "parallel_attn_output": True, "rotary_dim": 4, "rotary_pairs": "halves",
    },
    "gpt-neo": {**GPT, "window_size": 2, "scale_attention_scores": False},
    "scaled": {**GPT, "scale_attn_by_layer_idx": True, "query_key_layer_scaling": True,
               "layer_idx": 2},
    "alibi": {**GPT, "use_alibi": True, "num_attention_heads": 4},
    "alibi, 3 heads": {**GPT, "use_alibi": True, "num_attention_heads": 3},
    "alibi, 5 heads, less": {"use_alibi": True, "alibi_bias_max": 3, "optimize": "memory"},
    "gelu fast": {"activation": "gelu_fast"},
    "mask value": {**GPT, "mask_value": -1e4, "window_size": 3},
    "flash": {**GPT, "flash_attention": True},
}  # fmt: skip


@module_of(
    lambda layer, cross: {
        "first": nn.Linear(10, 10),
        "layer": layer,
        "last": nn.Linear(10, 3),
        "cross": cross,
    }
)
def Around(self, x: Tensor, mask: Tensor | None, states: Tensor, other: Tensor) -> Tensor:
    """A plain linear, a layer, a plain linear: as a model uses one."""
    given = (self.first(x), mask)
    if self.cross:
        given = (given[0], states, mask, other)
    out = self.layer(given)
    assert len(out) == len(given) and all(
        a is b for a, b in zip(out[1:], given[1:], strict=True)
    )
    return self.last(out[0])


def masked(samples: int, positions: int, generator: torch.Generator) -> Tensor:
    hidden = torch.rand(samples, 1, 1, positions, generator=generator) < 0.3
    hidden[..., 0] = False
    return hidden.double() * -1e4


def batch_of(masks: str, alike: bool = False):
    """Each rank's own numbers of samples and positions; masks on "all", "one" or "no" ranks."""

    def batch(rank: int, step: int) -> tuple:
        at = 0 if alike else rank
        generator = torch.Generator().manual_seed(10 * step + at)
        samples, positions, others = 1 + at, 4 + 2 * at, 3 + at
        has_mask = masks == "all" or (masks == "one" and at == 0)
        return (
            torch.randn(samples, positions, 10, generator=generator, dtype=torch.float64),
            masked(samples, positions, generator) if has_mask else None,
            torch.randn(samples, others, 10, generator=generator, dtype=torch.float64),
            masked(samples, others, generator),
        )

    return batch


def squares(model: nn.Module, *batch: Tensor) -> Tensor:
    return model(*batch).square().mean()


def check_layer(options: dict, masks: str, alike: bool = False, steps: int = 2) -> None:
    in_float64(3)
    options = {**SIZES, **options}
    cross = options.get("add_cross_attention", False)
    net = Around(smp.nn.DistributedTransformerLayer(**options), cross)
    reference = Around(plain.PlainLayer(**options), cross)
    job = WholeJob(net, squares, batch_of(masks, alike), plain=reference)
    for step in range(steps):
        job.step(step, max_norm=0.1)
    job.check_parameters()


@pytest.mark.parametrize("optimize", ["memory", "speed"])
@pytest.mark.parametrize("kind", LAYERS)
@on_ranks(2)
def test_a_layer_equals_the_plain_one(kind, optimize):
    split_over_all_ranks()
    check_layer({**LAYERS[kind], "optimize": optimize}, masks="one")


@pytest.mark.sample(16)
@pytest.mark.parametrize("alike", [False, True], ids=["own samples", "same samples"])
@pytest.mark.parametrize("masks", ["all", "one", "no"])
@pytest.mark.parametrize("kind", LAYERS)
@on_ranks(2, 3)
def test_a_layer_whose_stream_is_split_by_channels(kind, masks, alike):
    split_over_all_ranks(prescaled_batch=alike)
    check_layer({**LAYERS[kind], "optimize": "channels"}, masks, alike)


@pytest.mark.parametrize("optimize", ["speed", "memory", "channels"])
@on_ranks(2)
def test_masks_of_one_shape_are_of_each_ranks_own_samples(optimize):
    split_over_all_ranks(optimize=optimize)
    layer = layer_of()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 6, 10, generator=generator)
    masks = [masked(2, 6, generator) for _ in range(group.size())]
    assert not torch.equal(masks[0], masks[1])
    everyones = [layer((x, mask))[0] for mask in masks]
    own = masks[group.rank()]
    assert_near(layer((x, own))[0], everyones[group.rank()], "own mask")
    narrow = own.to((torch.float32, torch.int64)[group.rank()])
    assert_near(layer((x, narrow))[0], everyones[group.rank()], "own mask of another dtype")


@pytest.mark.stress
@pytest.mark.sample(16)
@pytest.mark.parametrize("masks", ["all", "no"])
@pytest.mark.parametrize("kind", LAYERS)
@on_ranks(3, 4)
def test_a_layer_on_more_ranks(kind, masks):
    split_over_all_ranks()
    if LAYERS[kind].get("num_attention_heads", 5) >= group.size():
        check_layer(LAYERS[kind], masks)
    else:
        with pytest.raises(ValueError, match="too short to be split over"):
            check_layer(LAYERS[kind], masks)


CUTS = ["memory", "channels"]  # with which a transformer's layers have a part of each sample

LMS = {
    "gpt": GPT,
    "untied, with a bias, types": {
        "tie_input_output_embedding": False, "use_lm_head_bias": True, "num_token_types": 3,
    },
    "hidden states": {"add_lm_head": False, "num_positions": 0},
    "windows": {**GPT, "window_size": [None, 2]},
    "final norm": {"final_layernorm": True},
    "no final norm": {**GPT, "final_layernorm": False},
    "positions": GPT,
    "cross": {**GPT, "add_cross_attention": True},
    "gpt-j": {**LAYERS["gpt-j"], "num_positions": 0},
}  # fmt: skip


def texts(kind: str, alike: bool = False):
    def batch(rank: int, step: int) -> tuple:
        at = 0 if alike else rank
        generator = torch.Generator().manual_seed(10 * step + at)
        shape = (1 + at, 5 + at)
        ids = torch.randint(0, 23, shape, generator=generator)
        hidden = torch.zeros(shape)
        hidden[0, -1] = 1
        types = torch.randint(0, 3, shape, generator=generator) if "types" in kind else None
        labels = ids.clone()
        labels[0, 0] = labels[0, 2] = -100
        places = torch.arange(shape[1]).flip(0).expand(shape) if kind == "positions" else None
        cross: tuple = ()
        if kind == "cross":
            states = torch.randn(shape[0], 3, 10, generator=generator, dtype=torch.float64)
            cross = (states, masked(shape[0], 3, generator))
        labels = None if step == 1 or kind == "hidden states" else labels
        return ids, hidden, types, places, *cross, labels

    return batch


def loss_of(model: nn.Module, *batch: Tensor | None) -> Tensor:
    out = model(batch)
    return out if out.dim() == 0 else out.square().mean()


def check_lm(
    kind: str, alike: bool = False, delayed: bool = False, batch: Batch | None = None
) -> WholeJob:
    in_float64(3)
    options = {**LM, **LMS[kind]}
    with smp.delay_param_initialization(delayed):
        net = smp.nn.DistributedTransformerLMHead(**options, **NO_DROPOUT)
    batch = batch or texts(kind, alike)
    return WholeJob(net, loss_of, batch, plain=plain.PlainLMHead(**options)).run(
        3, max_norm=0.1
    )


@pytest.mark.parametrize("optimize", ["memory", "speed"])
@pytest.mark.parametrize("kind", LMS)
@on_ranks(2)
def test_a_language_model_equals_the_plain_one(kind, optimize):
    split_over_all_ranks(optimize=optimize)
    check_lm(kind)


@pytest.mark.parametrize("kind", LMS)
@pytest.mark.sample(9)
@on_ranks(2, 3)
def test_a_language_model_whose_stream_is_split_by_channels(kind):
    split_over_all_ranks(optimize="channels")
    check_lm(kind)


@pytest.mark.parametrize("optimize", ["speed", "memory", "channels"])
@pytest.mark.parametrize("kind", ["gpt", "untied, with a bias, types", "cross", "gpt-j"])
@pytest.mark.sample(12)
@on_ranks(2, 3)
def test_a_language_model_of_ranks_with_the_same_samples(kind, optimize):
    """With "memory" the residual stream is cut along its positions, which need not divide."""
    split_over_all_ranks(prescaled_batch=True, optimize=optimize)
    check_lm(kind, alike=True)


@module_of(
    lambda transformer, parts: {
        "first": nn.Linear(10, 10),
        "last": nn.Linear(10, 3),
        "transformer": transformer,
        "parts": parts,
    }
)
def Unrolled(self, x: Tensor, mask: Tensor, *_: Tensor) -> Tensor:
    """Calls a transformer's layers, or what is in them, by itself."""
    hidden = self.first(x)
    for layer in self.transformer.seq_layers:
        if self.parts:
            hidden = layer.output(layer.attention((hidden, mask)))
        else:
            hidden, same = layer((hidden, mask))
            assert same is mask
        assert hidden.shape == x.shape
    return self.last(hidden)


@pytest.mark.parametrize("parts", [False, True], ids=["layers", "parts"])
@pytest.mark.parametrize("optimize", CUTS)
@on_ranks(2)
def test_a_layer_that_is_called_outside_of_its_transformer_takes_whole_samples(optimize, parts):
    alike = optimize != "channels"
    split_over_all_ranks(prescaled_batch=alike, optimize=optimize)
    in_float64(3)
    options = {**SIZES, "num_layers": 2}
    net = Unrolled(smp.nn.DistributedTransformer(**options, **NO_DROPOUT), parts)
    reference = Unrolled(plain.PlainTransformer(**options), parts)
    WholeJob(net, squares, batch_of("all", alike), plain=reference).run(2)


@pytest.mark.parametrize("optimize", CUTS)
@on_ranks(2)
def test_gradients_have_their_factor_with_delayed_values(optimize):
    split_over_all_ranks(prescaled_batch=True, optimize=optimize)
    check_lm("gpt", alike=True, delayed=True)


# ------------------------------------------------------------------------------- dropout


DROPS = {**SIZES, **GPT, "attention_dropout_prob": 0.3, "hidden_dropout_prob": 0.2}


def dropped(layer: nn.Module, dtype: torch.dtype, rank: int) -> tuple[Tensor, Tensor]:
    """What a rank's samples become, and their gradient; drawn from the rank's own stream."""
    x = batch_of("no")(rank, 0)[0].to(dtype).requires_grad_(True)
    torch.manual_seed(100 + rank)
    out = layer((x, None))[0]
    out.square().sum().backward()
    return out, x.grad


@pytest.mark.parametrize("optimize", ["speed", "channels"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@on_ranks(2, 3)
def test_dropout_is_the_same_however_many_ranks_share_a_layer(dtype, optimize):
    options = {**DROPS, "optimize": optimize}
    torch.manual_seed(5)
    alone = smp.nn.DistributedTransformerLayer(**options)  # before smp.init nothing is split
    alone.to(dtype)
    want, wanted = dropped(alone, dtype, int(os.environ["OMPI_COMM_WORLD_RANK"]))
    split_over_all_ranks()
    torch.manual_seed(5)
    layer = smp.nn.DistributedTransformerLayer(**options).to(dtype)
    out, gradient = dropped(layer, dtype, group.rank())
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(out, want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(gradient, wanted, atol=tolerance, rtol=tolerance)
    again, _ = dropped(layer, dtype, group.rank())
    assert torch.equal(again, out)
    assert not torch.equal(dropped(layer.eval(), dtype, group.rank())[0], out)


@pytest.mark.parametrize("optimize", ["speed", "memory", "channels"])
@on_ranks(2, 3)
def test_ranks_with_the_same_samples_drop_what_one_rank_would(optimize):
    torch.set_default_dtype(torch.float64)
    options = {**DROPS, "num_layers": 2, "optimize": optimize}
    x = batch_of("no", alike=True)(0, 0)[0]
    torch.manual_seed(5)
    alone = smp.nn.DistributedTransformer(**options)
    torch.manual_seed(100)
    want = alone((x, None))[0]
    split_over_all_ranks(prescaled_batch=True)
    torch.manual_seed(5)
    split = smp.nn.DistributedTransformer(**options)
    torch.manual_seed(100 + group.rank())  # tp_rank 0's numbers are everybody's
    assert_near(split((x, None))[0], want, "output")


def everything(net: nn.Module, given: list[Tensor], seed: int) -> list[Tensor]:
    """What comes out, and the gradient of each input."""
    given = [tensor.clone().requires_grad_(True) for tensor in given]
    torch.manual_seed(seed)
    out = net(tuple(given) if len(given) > 1 else (*given, None))
    hidden = out if isinstance(out, Tensor) else out[0]
    if hidden is not out:
        assert all(a is b for a, b in zip(out[1:], given[1:] or [None], strict=True))
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    (hidden * weights).sum().backward()
    return [hidden, *(tensor.grad for tensor in given)]


@pytest.mark.parametrize("alike", [False, True], ids=["own samples", "same samples"])
@pytest.mark.parametrize("optimize", ["speed", "memory", "channels"])
@on_ranks(2)
def test_all_that_a_layer_is_given_gets_the_gradient_of_one_rank(optimize, alike):
    """Hidden states, what they look at, and both masks; with what each attention drops."""
    torch.set_default_dtype(torch.float64)
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    x, mask, states, other = batch_of("all", alike)(rank, 0)
    layer = {**DROPS, "optimize": optimize, "causal_mask_size": None}
    attention = {name: value for name, value in layer.items() if name != "intermediate_size"}

    def made() -> list[nn.Module]:
        torch.manual_seed(5)
        return [
            smp.nn.DistributedTransformerLayer(**layer, add_cross_attention=True),
            smp.nn.DistributedTransformer(2, **layer, add_cross_attention=True),
            smp.nn.DistributedAttentionLayer(**attention, cross_attention=True),
        ]

    of_layers = [x, states, mask, other]
    given = of_layers, of_layers, [x, states, other]
    seed = 100 if alike else 100 + rank
    want = [everything(*both, seed) for both in zip(made(), given, strict=True)]
    split_over_all_ranks(prescaled_batch=alike)
    got = [everything(*both, 100 + rank) for both in zip(made(), given, strict=True)]
    for ours, plain_ones, net in zip(got, want, made(), strict=True):
        for number, (one, of) in enumerate(zip(ours, plain_ones, strict=True)):
            assert_near(one, of, f"{type(net).__name__}: {number}")


# -------------------------------------------------------------------------- in a pipeline


@pytest.mark.parametrize("optimize", ["speed", "memory", "channels"])
@on_ranks(4)
def test_a_language_model_in_a_pipeline(optimize):
    smp.init({
        "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 2,
        "optimize": optimize,
    })  # fmt: skip
    in_float64(3)
    options = {**LM, **GPT, "num_layers": 4}
    net = smp.nn.DistributedTransformerLMHead(**options, **NO_DROPOUT)
    reference = plain.PlainLMHead(**options)

    def batch(rank: int, step: int) -> tuple:
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(0, 23, (4, 5 + rank), generator=generator)
        return ids, (ids % 5 == 4).double(), None, None, ids

    job = WholeJob(net, loss_of, batch, plain=reference).run(2, max_norm=0.1)
    assert any("seq_layers." in name for name, _ in job.model.local_named_parameters())


# ----------------------------------------------------------------------- what else it does


@pytest.mark.parametrize(
    "strategy, optimize", [("each", "memory"), ("group_2", "memory"), ("each", "channels")]
)
@on_ranks(2)
def test_layers_are_checkpointed(strategy, optimize):
    split_over_all_ranks(optimize=optimize)
    in_float64(3)
    options = {**LM, **GPT, "hidden_dropout_prob": 0.2, "attention_dropout_prob": 0.2}
    net = smp.nn.DistributedTransformerLMHead(**options, **NO_DROPOUT)
    gradients = []
    for checkpointed in (False, True):
        model = smp.DistributedModel(net)
        if checkpointed:
            smp.set_activation_checkpointing(
                model.get_module().transformer.seq_layers, pack_args_as_tuple=True,
                strategy=strategy,
            )  # fmt: skip

        @smp.step
        def train(model, *batch):
            loss = model(batch)
            model.backward(loss)
            return loss

        torch.manual_seed(group.rank())
        model.zero_grad()
        train(model, *texts("gpt")(group.rank(), 0))
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert_near(a, b, "gradient")


@pytest.mark.parametrize("kind", ["bert", "gpt"])
@pytest.mark.parametrize("optimize", ["speed", "memory", "channels"])
@on_ranks(2)
def test_under_autocast_and_in_half_precision(optimize, kind):
    split_over_all_ranks()
    torch.manual_seed(3)
    options = {**SIZES, **LAYERS[kind], "optimize": optimize}
    layer = smp.nn.DistributedTransformerLayer(**options)
    x, mask, *_ = batch_of("all")(group.rank(), 0)
    x, mask = x.float(), mask.float()
    want = layer((x, mask))[0]
    with torch.autocast("cpu", torch.bfloat16):
        out = layer((x, mask))[0]
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, want, atol=0.05, rtol=0.05)
    out.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
    layer.bfloat16()
    half = layer((x.bfloat16(), mask))[0]
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), want, atol=0.05, rtol=0.05)
    layer.double()
    wide = layer((x.double(), None))[0]
    with torch.autocast("cpu", torch.bfloat16):  # which casts no float64
        assert torch.equal(layer((x.double(), None))[0], wide)


def attention_of(**options) -> nn.Module:
    torch.manual_seed(3)
    sizes = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    return smp.nn.DistributedAttentionLayer(**{**sizes, **GPT, **options})


@pytest.mark.parametrize("path", [{"window_size": 3}, {"query_key_layer_scaling": True}, {}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks(2)
def test_scores_in_float32(dtype, path, monkeypatch):
    """They are computed there, and not rounded before: so softmax sees them."""
    split_over_all_ranks()
    seen: list[Tensor] = []
    softmax = kernels.masked_softmax_dropout

    def noting(scores: Tensor, *args, **kwargs) -> Tensor:
        seen.append(scores.detach())
        return softmax(scores, *args, **kwargs)

    monkeypatch.setattr(kernels, "masked_softmax_dropout", noting)
    x = batch_of("no")(group.rank(), 0)[0].to(dtype)
    net = attention_of(attention_in_fp32=True, **path).to(dtype)
    want = attention_of(**path).to(dtype).double()((x.double(), None))
    seen.clear()
    got = net((x, None))
    assert got.dtype == dtype and {scores.dtype for scores in seen} == {torch.float32}
    assert all(scores.to(dtype).ne(scores).float().mean() > 0.5 for scores in seen)
    torch.testing.assert_close(got.double(), want, atol=0.05, rtol=0.05)
    got.float().square().sum().backward()
    assert all(p.grad.dtype == dtype for p in net.parameters())
    seen.clear()
    attention_of(window_size=3).to(dtype)((x, None))
    assert {scores.dtype for scores in seen} == {dtype}


@pytest.mark.parametrize("in_c", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("optimize", ["speed", "memory", "channels"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.sample(5)
@on_ranks(2)
def test_a_residual_that_is_added_in_float32(dtype, optimize, in_c, monkeypatch):
    """1 + large + 1: in the narrow dtype each 1 would be lost, and the sum of both is not."""
    split_over_all_ranks()
    if not in_c:
        monkeypatch.setattr(kernels, "_in_c", lambda *args, **kwargs: False)
    layer = smp.nn.DistributedTransformerOutputLayer(
        hidden_size=10, intermediate_size=13, hidden_dropout_prob=0.0, activation="relu",
        optimize=optimize, fp32_residual_addition=True, **PRE,
    ).to(dtype)  # fmt: skip
    large = 2 / torch.finfo(dtype).eps  # its neighbour is larger by 2
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.dense1.bias.fill_(1)
        layer.dense2.bias.fill_(large)
        if group.rank() == 0:
            layer.dense2.weight[:, 0] = 1
        out = layer(torch.ones(2, 3, 10, dtype=dtype))
    assert out.dtype == dtype and out.eq(large + 2).all()


@on_ranks(2, 3)
def test_new_values_of_a_normal_distribution():
    """Of all weights; biases are zero, norms as always."""
    split_over_all_ranks()
    options = {**LM, **GPT, "hidden_size": 96, "intermediate_size": 384, "vocab_size": 500,
               "num_token_types": 64, "use_lm_head_bias": True, "add_cross_attention": True,
               "tie_input_output_embedding": False, "attention_head_size": 16}  # fmt: skip
    net = smp.nn.DistributedTransformerLMHead(
        **options, **NO_DROPOUT, use_normal_initialization=True, initializer_range=0.3
    )
    whole = smp.DistributedModel(net).state_dict()
    assert len(whole) > 40
    for name, value in whole.items():
        if name.endswith("bias"):
            assert not value.any(), name
        elif "layernorm" in name:
            assert value.eq(1).all(), name
        else:
            assert 0.28 < value.std() < 0.32 and value.mean().abs() < 0.03, name
            assert value.unique().numel() > 0.99 * value.numel(), name  # no slice comes twice


HOOKED = ["attention.query", "attention.key", "attention.value", "attention.dense"]
HOOKED += ["attention.layernorm", "output.dense1", "output.dense2", "output.layernorm"]


@pytest.mark.parametrize("alike", [False, True], ids=["own samples", "same samples"])
@pytest.mark.parametrize("optimize", ["speed", "memory", "channels"])
@on_ranks(2)
def test_hooks_on_what_is_in_a_layer_are_called_on_the_ranks_that_have_them(optimize, alike):
    """They see what this rank has: of a linear that adds up its part, without the bias."""
    split_over_all_ranks(prescaled_batch=alike)
    layer = layer_of(optimize=optimize)
    x = batch_of("all", alike)(group.rank(), 0)[0]  # that trains nothing

    def trained() -> list[Tensor]:
        out = layer((x, None))[0]
        layer.zero_grad()
        out[..., 0].square().sum().backward()
        return [out.detach(), *(p.grad for p in layer.parameters())]

    want = trained()
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    backward: set[str] = set()
    for name in HOOKED if group.rank() == 1 else []:
        module = layer.get_submodule(name)
        module.register_forward_hook(
            lambda _, given, out, name=name: seen.update({name: (given[0], out)})
        )
        module.register_full_backward_hook(lambda *_, name=name: backward.add(name))
    for got, of in zip(trained(), want, strict=True):
        assert_near(got, of, "output or gradient")
    assert sorted(seen) == sorted(backward) == sorted(HOOKED if group.rank() == 1 else [])
    for name, (given, out) in seen.items():
        module = layer.get_submodule(name)
        if isinstance(module, PartOfSum):
            assert_near(out, given @ module.weight.T, name)
        elif isinstance(module, nn.Linear):
            assert_near(out, given @ module.weight.T + module.bias, name)
        else:
            assert out.shape == given.shape


# ------------------------------------------------------------------- ranks that differ


def layer_of(**options) -> nn.Module:
    in_float64(3)
    return smp.nn.DistributedTransformerLayer(**{**SIZES, **options})


@pytest.mark.parametrize("optimize", ["memory", "channels"])
@pytest.mark.parametrize("which", ["attention", "hidden"])
@on_ranks(2)
def test_samples_of_a_rank_in_evaluation_drop_nothing(which, optimize):
    split_over_all_ranks(optimize=optimize)
    layer = layer_of(**{f"{which}_dropout_prob": 0.5}).eval()
    x = batch_of("no")(group.rank(), 0)[0]
    want = layer((x, None))[0]
    layer.train(group.rank() == 1)
    out = layer((x, None))[0]
    if group.rank() == 0:
        assert_near(out, want, "output in evaluation")
    else:
        assert not torch.allclose(out, want)


@pytest.mark.parametrize("optimize", ["memory", "channels"])
@on_ranks(2)
def test_a_mask_that_one_rank_trains(optimize):
    split_over_all_ranks(optimize=optimize)
    layer = layer_of().requires_grad_(False)
    x = batch_of("no")(group.rank(), 0)[0]
    mask = torch.zeros(len(x), 1, 1, x.size(1), requires_grad=True)
    weights = torch.randn(x.shape)  # the squares of what a norm gives have one sum
    (layer((x, mask if group.rank() == 1 else None))[0] * weights).sum().backward()
    if group.rank() == 1:
        moved = torch.zeros_like(mask)
        moved[0, 0, 0, 1] = 1e-4
    else:
        moved = None
    with torch.no_grad():
        more, less = (
            (layer((x, None if moved is None else sign * moved))[0] * weights).sum()
            for sign in (1, -1)
        )
    if group.rank() == 1:
        want = (more - less).item() / 2e-4
        assert abs(want) > 1e-3
        assert mask.grad[0, 0, 0, 1].item() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("prescaled", [False, True], ids=["own samples", "same samples"])
@pytest.mark.parametrize("optimize", ["memory", "channels"])
@on_ranks(2)
def test_a_batch_of_no_samples(optimize, prescaled):
    """On rank 0 alone; of ranks with the same samples, which keep own positions, on both."""
    split_over_all_ranks(prescaled_batch=prescaled, optimize=optimize)
    torch.manual_seed(3)
    options = {**SIZES, **GPT, "num_layers": 1}
    net = smp.nn.DistributedTransformer(**options, **NO_DROPOUT).double()
    samples = 0 if prescaled or group.rank() == 0 else 2
    x = torch.randn(samples, 4, 10, dtype=torch.float64, requires_grad=True)
    out = net((x, None))[0]
    out.sum().backward()
    assert out.shape == x.shape == x.grad.shape


@pytest.mark.parametrize("alike", [False, True], ids=["own samples", "same samples"])
@pytest.mark.parametrize("optimize", ["memory", "channels"])
@on_ranks(3)
def test_sequences_of_fewer_positions_than_ranks(optimize, alike):
    rank = 0 if alike else int(os.environ["OMPI_COMM_WORLD_RANK"])
    x = batch_of("no")(rank, 0)[0][:, :2]
    want = everything(layer_of(optimize=optimize), [x], 1)
    split_over_all_ranks(prescaled_batch=alike)
    for one, of in zip(everything(layer_of(optimize=optimize), [x], 1), want, strict=True):
        assert_near(one, of, "output or gradient")


@pytest.mark.parametrize("optimize", ["memory", "channels"])
@on_ranks(2)
def test_without_what_is_attended_to_there_is_no_cross_attention(optimize):
    split_over_all_ranks(optimize=optimize)
    crossing, plain_layer = layer_of(add_cross_attention=True), layer_of()
    weights = crossing.state_dict()
    plain_layer.load_state_dict({n: weights[n] for n in plain_layer.state_dict()})
    x = batch_of("no")(group.rank(), 0)[0]
    out = crossing((x, None, None, None))
    assert torch.equal(out[0], plain_layer((x, None))[0]) and out[1:] == (None, None, None)


# Of each layer, forward and backward.  Channels: the paper's four reduce-scatters and their
# four gathers, and two gathers of what its two layer norms add up.
OWN_ROWS = ["gather_rows"] * 2 + ["reduce_rows"] * 2
CHANNELS = ["gather_rows"] * 2 + ["reduce_rows"] * 4, ["gather_rows"] * (4 + 2)
COLLECTIVES = {
    "speed": (["gather_numbers"] * 2 + OWN_ROWS, OWN_ROWS),
    "memory": (["gather_numbers"] * 2 + OWN_ROWS, ["gather_rows"] * 2 + OWN_ROWS),
    "channels": CHANNELS,
}
COLLECTIVES_OF_SAME_SAMPLES = {
    "speed": (["_sum"] * 2, ["_sum"] * 2),
    "memory": (OWN_ROWS, ["gather_rows"] * 2 + OWN_ROWS),
    "channels": CHANNELS,
}


@pytest.mark.parametrize("alike", [False, True], ids=["own samples", "same samples"])
@pytest.mark.parametrize("optimize", COLLECTIVES)
@on_ranks(2)
def test_collectives_of_a_layer(optimize, alike):
    split_over_all_ranks(prescaled_batch=alike)
    (forward, backward), (more_forward, more_backward) = (
        collectives(layers, optimize, alike) for layers in (1, 2)
    )
    wanted = (COLLECTIVES_OF_SAME_SAMPLES if alike else COLLECTIVES)[optimize]
    assert sorted((more_forward - forward).elements()) == wanted[0]
    assert sorted((more_backward - backward).elements()) == wanted[1]


def collectives(layers: int, optimize: str, alike: bool) -> list[Counter]:
    """What a transformer calls, by name: forward, backward."""
    torch.manual_seed(3)
    options = {**SIZES, **GPT, "optimize": optimize, "num_layers": layers}
    net = smp.nn.DistributedTransformer(**options, **NO_DROPOUT).double()
    x = batch_of("no", alike)(group.rank(), 0)[0].requires_grad_(True)
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("gather_rows", "reduce_rows", "gather_numbers"):
            patch.setattr(group, name, _noting(group, name, made))
        for name in ("_sum", "_scatter_and_merge"):
            patch.setattr(primitives, name, _noting(primitives, name, made))
        patch.setattr(same_samples, "check", lambda *_: None)
        out = net((x, None))[0]
        forward = Counter(made)
        made.clear()
        out.sum().backward()
    return [forward, Counter(made)]


def _noting(module: ModuleType, name: str, made: list[str]):
    call = getattr(module, name)

    def noting(*args, **kwargs):
        made.append(name)
        return call(*args, **kwargs)

    return noting


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("optimize", ["memory", "channels"])
@on_ranks(2)
def test_an_input_that_requires_grad_on_one_rank_only(optimize, cross):
    split_over_all_ranks(optimize=optimize)
    layer = layer_of(add_cross_attention=cross).requires_grad_(False)
    x, _, states, _ = batch_of("no")(group.rank(), 0)
    asked = states if cross else x
    asked.requires_grad_(group.rank() == 1)
    out = layer((x, states, None, None) if cross else (x, None))[0]
    out.sum().backward()
    assert (asked.grad is not None) == (group.rank() == 1)


@on_ranks(2)
def test_layer_norm_of_split_channels_with_a_large_mean():
    """Of float32: sums of squares would leave no digit of the variance."""
    split_over_all_ranks()
    torch.manual_seed(7)
    x = torch.randn(5, 64) + 1e4
    want = nn.functional.layer_norm(x, (64,))
    split = smp.nn.DistributedLayerNorm(64, elementwise_affine=False)
    own = slice(32 * group.rank(), 32 * group.rank() + 32)
    torch.testing.assert_close(split(x[:, own]), want[:, own], atol=1e-2, rtol=1e-2)
