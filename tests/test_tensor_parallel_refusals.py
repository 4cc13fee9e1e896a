"""What a split model refuses, or says, where it would train something else without a word."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.nn import utils as blocks
from tests.models.modules import module_of
from tests.models.steps import mean_square
from tests.ranks import on_ranks
from tests.reference.whole_job import assert_near, in_float64, split_over_all_ranks


@module_of(lambda width: {"linear": nn.Linear(width, width)})
def Inner(self, x: Tensor) -> Tensor:
    """The user's class; ``width`` 4 is to stay whole."""
    return self.linear(x)


class SplitInner(smp.nn.DistributedModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = smp.nn.DistributedLinear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def only_wide(width: int) -> tuple | None:
    return None if width == 4 else ((width,), {})


@on_ranks(2)
def test_an_init_hook_may_leave_an_instance_whole():
    split_over_all_ranks()
    smp.tp_register_with_module(Inner, SplitInner, only_wide)
    net = nn.Sequential(Inner(6), nn.Linear(6, 4), Inner(4))
    smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net)
    assert type(net[0]) is SplitInner
    assert isinstance(net[2], Inner)
    report = str(model.partition_report())
    assert "init_hook returned None" in report


@pytest.mark.parametrize("when", ["before", "after", "a group"])
@on_ranks(2)
def test_an_optimizer_of_parameters_that_are_gone_is_refused(when):
    """Of modules that are split in place it may be made before."""
    split_over_all_ranks()
    smp.tp_register_with_module(Inner, SplitInner)
    net = nn.Sequential(Inner(6), nn.Linear(6, 6))
    smp.set_tensor_parallelism(net)
    of_all = torch.optim.SGD(net.parameters(), lr=0.1)
    of_linear = torch.optim.SGD(net[1].parameters(), lr=0.1)
    gone = list(net[0].parameters())
    refused = r"holds '0\.linear\.weight' and 1 other .* model\.parameters\(\) after"
    if when == "before":
        smp.DistributedOptimizer(of_all)
        with pytest.raises(ValueError, match=refused):
            smp.DistributedModel(net)
        return
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(of_linear)
    if when == "a group":
        with pytest.raises(ValueError, match=refused):
            optimizer.add_param_group({"params": gone})
        assert len(optimizer.param_groups) == 1
    else:
        with pytest.raises(ValueError, match=refused):
            smp.DistributedOptimizer(of_all)
    smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@on_ranks(2)
def test_marks_on_what_is_wrapped_already_are_refused():
    split_over_all_ranks()
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    model = smp.DistributedModel(net)
    alone = smp.DistributedModel(nn.Linear(3, 3))
    for module in (net, net[0], net[1], model, alone, alone.get_module()):
        with pytest.raises(RuntimeError, match="is in a DistributedModel, .* mark it before"):
            smp.set_tensor_parallelism(module)
    smp.set_tensor_parallelism(nn.Sequential(net[0], nn.Linear(4, 4)))  # of another model


@pytest.mark.stress
@pytest.mark.parametrize("by_rows", [False, True], ids=["by dimension", "by rows"])
@on_ranks(4)
def test_norms_of_rows_in_replicas_are_refused(by_rows):
    smp.init({"tensor_parallel_degree": 2})
    net = nn.Sequential(nn.Embedding(7, 4, max_norm=0.5), nn.Linear(4, 4))
    smp.set_tensor_parallelism(net[0], vocab_parallel=by_rows)
    with pytest.raises(
        NotImplementedError, match=r"'0' is to be split and has max_norm=0.5: .* its 2 replicas"
    ):
        smp.DistributedModel(net)


class Counting(torch.optim.SGD):
    """Keeps a number as a tensor of one element, beside what has the parameter's shape."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for number, p in enumerate(self.param_groups[0]["params"]):
            self.state[p]["count"] = torch.full([1] * p.dim(), 3.0)
            self.state[p]["moment"] = p.detach() + number


@on_ranks(2)
def test_a_number_in_a_state_is_no_slice_of_length_1():
    split_over_all_ranks()
    net = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2))
    smp.set_tensor_parallelism(net[1], by_outputs=True)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(Counting(model.parameters(), lr=0.1))
    optimizer.step()
    assert net[1].bias.numel() == 1
    whole, state = model.state_dict(), optimizer.state_dict()["state"]
    for number, (name, value) in enumerate(whole.items()):
        assert torch.equal(state[number]["count"], torch.full([1] * value.dim(), 3.0)), name
        assert_near(state[number]["moment"], value + number, name)


@on_ranks(2)
def test_arguments_that_a_region_cannot_gather_are_named():
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    split_over_all_ranks()
    config = GPT2Config(n_embd=4, n_head=2, n_layer=1)
    config._attn_implementation = "eager"
    net = nn.ModuleList([GPT2Attention(config, is_cross_attention=True, layer_idx=0)])
    smp.set_tensor_parallelism(net)
    smp.DistributedModel(net)
    attention, x, source = net[0], torch.ones(2, 3, 4), torch.ones(2, 5, 4)
    first = smp.rank() == 0
    dtypes = r"torch.(float32|complex64)"
    for wrong in (x[0, 0].expand(1, 1, 1, 1, 1, 1, 4), x.to(torch.complex64)):
        with pytest.raises(
            NotImplementedError,
            match=rf"'0' got a tensor of shape \[.*4\] and {dtypes}, which tensor p",
        ):
            attention(wrong, encoder_hidden_states=source)
    with pytest.raises(TypeError, match="'0' got no tensor as hidden_states"):
        attention(None, encoder_hidden_states=source)
    with pytest.raises(
        ValueError, match="got encoder_hidden_states on tp_rank 0 and not on tp_rank 1"
    ):
        attention(x, encoder_hidden_states=source if first else None)
    with pytest.raises(ValueError, match=r"hidden_states of shape \[3, 5, 4\] for 2 samples"):
        attention(x, encoder_hidden_states=torch.ones(3, 5, 4))
    axes = source if first else source[:, :, None]
    with pytest.raises(
        ValueError, match=r"\[2, 5, 4\] float32 on tp_rank 0 and \[2, 5, 1, 4\] float32 on tp"
    ):
        attention(x, encoder_hidden_states=axes)
    mask = torch.zeros(2, 1, 1, 5, dtype=torch.float32 if first else torch.float64)
    with pytest.raises(
        ValueError, match=r"got encoder_attention_mask of shape .* float32 .* float64 on"
    ):
        attention(x, encoder_hidden_states=source, encoder_attention_mask=mask)


@on_ranks(2)
def test_a_cache_of_sequences_of_different_lengths_is_not_gone_on_with():
    """Of equal ones it is, and what is behind a shorter one would be padding."""
    from transformers import DynamicCache, GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    split_over_all_ranks()
    config = GPT2Config(n_embd=4, n_head=2, n_layer=1)
    config._attn_implementation = "eager"
    net = GPT2Attention(config, layer_idx=0).eval()
    smp.set_tensor_parallelism(net)
    smp.DistributedModel(net)
    caches = [DynamicCache(config=config) for _ in range(2)]
    for cache, length in zip(caches, (3, 3 + smp.rank()), strict=True):
        net(torch.ones(2, length, 4), past_key_values=cache)
    net(torch.ones(2, 1, 4), past_key_values=caches[0])
    with pytest.raises(NotImplementedError, match="different lengths .* pad the prompts, on"):
        net(torch.ones(2, 1, 4), past_key_values=caches[1])


@on_ranks(2)
def test_what_is_no_module_is_refused():
    split_over_all_ranks()
    with pytest.raises(TypeError, match="takes a torch.nn.Module, not a str"):
        smp.set_tensor_parallelism("layer")
    with pytest.raises(TypeError, match="dist_module is a class of modules, not Linear"):
        smp.tp_register_with_module(Inner, nn.Linear(2, 2))
    with pytest.raises(TypeError, match="dist_module is a class of modules, not <class 'dict'"):
        smp.tp_register_with_module(Inner, dict)
    with pytest.raises(TypeError, match="module_cls is a class of modules, not 'Inner'"):
        smp.tp_register(SplitInner)("Inner")


@on_ranks(2)
def test_torchs_clipping_is_torchs_where_nothing_is_split():
    """With all its arguments, of one tensor, a list or a generator."""
    split_over_all_ranks()
    clip = nn.utils.clip_grad_norm_

    def clipped(*options: Any, given: Any = list, **more: Any) -> tuple[Tensor, Tensor]:
        weight = nn.Parameter(torch.ones(3))
        weight.grad = torch.tensor([3.0, -4.0, 0.0])
        one = weight if given is None else given([weight])
        return clip(one, *options, **more), weight.grad

    for given in (None, list, iter):
        norm, gradient = clipped(1.0, given=given)
        assert norm == 5 and gradient.norm() == pytest.approx(1)
    norm, gradient = clipped(2.0, float("inf"), False, False)
    assert norm == 4 and gradient[1] == pytest.approx(-2)
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.full((1,), torch.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        clip(weight, 1.0, error_if_nonfinite=True)


def twice(function: Any, x: Tensor) -> Tensor:
    """A second derivative, as a penalty of gradients takes one."""
    (slope,) = torch.autograd.grad(function(x).pow(3).sum(), x, create_graph=True)
    return torch.autograd.grad((slope * x).sum(), x)[0]


@pytest.mark.parametrize("alike", [False, True], ids=["own samples", "same samples"])
@on_ranks(2)
def test_a_second_derivative_through_what_is_split_is_refused(alike):
    """A penalty of gradients; through what is whole it is the plain model's."""
    split_over_all_ranks(prescaled_batch=alike)
    in_float64(1)
    layer = smp.nn.DistributedTransformerLayer(
        num_attention_heads=2, attention_head_size=2, hidden_size=4, intermediate_size=8,
        attention_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    linears = {"linear": nn.Linear(4, 4), "rows": nn.Linear(4, 4)}
    net = nn.ModuleDict({**linears, "layer": layer, "whole": nn.Linear(4, 4)})
    smp.set_tensor_parallelism(net.linear)
    smp.set_tensor_parallelism(net.rows, by_outputs=True)
    model = smp.DistributedModel(net)
    assert len(model._smp_split) == 2
    x = torch.randn(2, 3, 4, requires_grad=True)
    for name in ("linear", "rows"):
        with pytest.raises(
            RuntimeError, match=rf"derivative \(.*through module '{name}'.*whole, smp.set_ten"
        ):
            twice(lambda x, name=name: torch.tanh(net[name](torch.tanh(x))), x)
    with pytest.raises(RuntimeError, match="second derivative .* through (module|a kernel)"):
        twice(lambda x: net.layer((x, None))[0], x)
    for block in (
        lambda x: blocks.fused_allgather_for_tp(x, 0),
        lambda x: blocks.reduce_scatter_for_tp(x, 0),
        lambda x: blocks.scatter_and_merge_for_tp(x, 2, 0),
        lambda x: blocks.shard_sequence(x, 2),
        blocks.fwd_allreduce_for_tp,
        blocks.bwd_allreduce_for_tp,
    ):
        with pytest.raises(RuntimeError, match="second derivative .* through module '"):
            twice(block, x)
    assert twice(net.whole, x).shape == x.shape
    # The first derivative is there in a graph, too.
    (slope,) = torch.autograd.grad(net.rows(x).sum(), x, create_graph=True)
    assert_near(slope, torch.autograd.grad(net.rows(x).sum(), x)[0], "slope")


class BySign(torch.optim.Optimizer):
    """Each element by itself, of a class that nobody knows."""

    def __init__(self, params: Any, rate: float, decay: float = 0.1) -> None:
        super().__init__(params, {"rate": rate, "decay": decay})

    def change(self, gradient: Tensor) -> Tensor:
        return gradient.sign()

    def step(self, closure: Any = None) -> None:
        for members in self.param_groups:
            rate, decay = members["rate"], members["decay"]
            for p in members["params"]:
                p.data.mul_(1 - decay).sub_(self.change(p.grad), alpha=rate)


class ByRow(BySign):
    def change(self, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm(dim=1, keepdim=True)


class ByColumn(BySign):
    def change(self, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm(dim=0, keepdim=True)


class ByNorm(torch.optim.SGD):
    """A subclass of a class that is known, in a class around it."""

    def step(self, closure: Any = None) -> None:
        for members in self.param_groups:
            nn.utils.clip_grad_norm_(members["params"], 0.1)
        super().step()


class Around(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer, self.state, self.defaults = inner, inner.state, {}
        self.param_groups = inner.param_groups


class Asks(BySign):
    """Of an argument that it does not keep."""

    def __init__(self, params: Any, secret: int) -> None:
        super().__init__(params, 0.1)


TRIED = {
    "by element": (lambda params: BySign(params, 0.1), None),
    "a closure": (lambda params: torch.optim.LBFGS(params), "LBFGS"),
    "rows": (lambda params: ByRow(params, 0.1), "ByRow"),
    "columns": (lambda params: ByColumn(params, 0.1), "ByColumn"),
    "norms": (lambda params: ByNorm(params, 0.1), "ByNorm"),
    "around": (lambda params: Around(ByRow(params, 0.1)), "Around"),
    "known": (lambda params: torch.optim.Adam(params, 0.1), None),
}


@on_ranks(2)
def test_an_optimizer_of_unknown_class_is_tried_on_slices():
    split_over_all_ranks()
    with smp.tensor_parallelism():
        net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
    model = smp.DistributedModel(net)
    before = torch.get_rng_state()
    for made, refused in TRIED.values():
        if refused is None:
            smp.DistributedOptimizer(made(model.parameters()))
            continue
        said = rf"{refused} has updated slices .* slice of '0.weight', \[\d, 2\] of \[6, 4\]"
        with pytest.raises(NotImplementedError, match=said):
            smp.DistributedOptimizer(made(model.parameters()))
        smp.DistributedOptimizer(made(net[1].parameters()))  # whole ones
    with pytest.warns(UserWarning, match="Asks could not be tried on slices .*TypeError"):
        smp.DistributedOptimizer(Asks(model.parameters(), secret=1))
    assert torch.equal(torch.get_rng_state(), before)


@on_ranks(2)
def test_state_that_was_made_before_the_wrap_is_cut_like_its_parameter():
    split_over_all_ranks()
    torch.manual_seed(1)
    with smp.tensor_parallelism():
        net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    optimizer = torch.optim.AdamW(net.parameters())
    net(x).square().mean().backward()
    optimizer.step()
    plain = copy.deepcopy(net)
    reference = torch.optim.AdamW(plain.parameters())
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(optimizer)

    step = smp.step(mean_square)

    for _ in range(2):
        optimizer.zero_grad()
        reference.zero_grad()
        step(model, x)
        plain(x).square().mean().backward()
        optimizer.step()
        reference.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=0, atol=1e-12)


@on_ranks(2)
def test_a_model_of_which_nothing_is_marked_is_warned_of_and_what_is_split_says_so():
    split_over_all_ranks()
    with pytest.warns(UserWarning, match="tensor_parallel_degree is 2 and no module .* marked"):
        smp.DistributedModel(nn.Linear(4, 4))
    with smp.tensor_parallelism():
        net = nn.Sequential(nn.Linear(4, 6), nn.Embedding(5, 4))
    model = smp.DistributedModel(net)
    assert "(in_features=4, out_features=6, bias=True, this rank's 2 of 4 in axis 1" in repr(
        model
    )
    assert "(5, 4, this rank's 2 of 4 in axis 1 of the weight)" in repr(model)
