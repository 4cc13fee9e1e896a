"""Spec: design.md, section 3, "Order": the cut loop, and what it equals."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.modules import module_of
from tests.models.random_tree import ALL, ONE_USE, make_tree, random_partition
from tests.reference.compare import (
    assert_close,
    assert_same_bits,
    assert_same_outputs,
    gradients,
)
from tests.reference.crossing import copy_with_strides
from tests.reference.cut_loop import (
    Request,
    Result,
    _add_to,
    _Loop,
    cut_loop,
    plain_loop,
)
from tests.reference.objects import map_tensors, tensors_in
from tests.reference.split import split_batch
from tests.reference.streams import Streams

# Against the plain loop.


class Run:
    """One loop over a random tree, from the same state whatever the loop."""

    def __init__(self, loop, seed: int, features=ALL, dtype=torch.float32, **options) -> None:
        tree = make_tree(seed, features, dtype)
        batch = tree.make_batch(7, torch.Generator().manual_seed(seed))
        rank_of = random_partition(tree.model, 3, seed)
        torch.manual_seed(seed)
        self.result: Result = loop(
            tree.step, tree.model, batch, rank_of=rank_of, ranks=3, microbatches=3, **options
        )
        self.gradients = gradients(tree.model)
        self.buffers = dict(tree.model.named_buffers())
        self.random_state = torch.get_rng_state()

    def assert_same(self, other: "Run") -> None:
        assert_same_outputs(self.result.outputs, other.result.outputs)
        assert_same_bits(self.buffers, other.buffers)
        assert torch.equal(self.random_state, other.random_state)
        assert_same_bits(self.gradients, other.gradients)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("first", range(0, 60, 15))
def test_within_rounding_it_is_the_plain_loop(first):
    """Outputs are bit-equal; gradients within 1e-12 in float64."""
    for seed in range(first, first + 15):
        cut = Run(cut_loop, seed, dtype=torch.float64)
        plain = Run(plain_loop, seed, dtype=torch.float64)

        assert_same_outputs(cut.result.outputs, plain.result.outputs)
        assert_same_bits(cut.buffers, plain.buffers)
        assert torch.equal(cut.random_state, plain.random_state)
        assert_close(cut.gradients, plain.gradients, relative=1e-12)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("first", range(0, 30, 15))
def test_where_each_tensor_is_used_once_it_is_the_plain_loop_bit_for_bit(first):
    for seed in range(first, first + 15):
        Run(cut_loop, seed, ONE_USE).assert_same(Run(plain_loop, seed, ONE_USE))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_with_one_rank_it_is_the_plain_loop_bit_for_bit():
    for seed in range(10):
        tree = make_tree(seed)
        batch = tree.make_batch(7, torch.Generator().manual_seed(seed))
        one_rank = {path: 0 for path, _ in tree.model.named_modules()}
        model = copy.deepcopy(tree.model)
        torch.manual_seed(seed)
        got = cut_loop(tree.step, model, batch, rank_of=one_rank, microbatches=3)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        want = []
        with _one_thread():
            for part in split_batch(tree.step, None, batch, {}, 3):
                want.append(tree.step(_Weighted(tree.model, part.weight), *part.args))

        assert_same_outputs(got.outputs, want)
        assert_same_bits(gradients(model), gradients(tree.model))
        assert torch.equal(state, torch.get_rng_state())


class _Weighted:
    """What a user would write: each microbatch's backward starts with its share."""

    def __init__(self, model: nn.Module, weight: float) -> None:
        self.model, self.weight = model, weight

    def __call__(self, *args):
        return self.model(*args)

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss, torch.full_like(loss, self.weight))


class _one_thread:
    def __enter__(self):
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_):
        torch.set_num_threads(self.threads)


# Against the definition: one graph per microbatch, with identity nodes in it.


class _Identity(torch.autograd.Function):
    """One node for many tensors, whose results are no views."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.set_materialize_grads(False)
        return tuple(copy_with_strides(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients


def _through_one_node(objects):
    before = [t for t in tensors_in(objects) if t.requires_grad and torch.is_grad_enabled()]
    passed = _Identity.apply(*before) if before else ()
    after = {id(a): b for a, b in zip(before, passed, strict=True)}
    return map_tensors(lambda tensor: after.get(id(tensor), tensor), objects)


class _OneGraph(_Loop):
    """The cut loop with everything in one graph: the calls' tensors pass in and out,
    and each request sees each parameter, through identity nodes, so that the engine
    itself makes the sums.  For models that change nothing in place."""

    def _begin(self, *args) -> Request:
        request = super()._begin(*args)
        with torch.enable_grad():  # a parameter requires grad whatever the mode
            request.leaves = {p: _Identity.apply(p)[0] for p in request.leaves}
        return request

    def _remote(self, rank, module, body, args, kwargs):
        args, kwargs = _through_one_node((args, kwargs))
        request = self._begin(self._current.microbatch, rank, module, self._streams.call())
        with self._on(request), self._streams.forward(request.random):
            result = body(*args, **kwargs)
        return _through_one_node(result)

    def backward(self, outputs, given):
        (loss,) = outputs
        loss.backward(torch.full_like(loss, self._weight))
        for parameter in self._owner:
            if parameter.grad is not None:
                _add_to(self._sums, parameter, parameter.grad)
                parameter.grad = None


def one_graph(step, model, args, rank_of, ranks, microbatches):
    batch = split_batch(step, model, args, {}, microbatches)
    return _OneGraph(model, rank_of, Streams(), True).run(step, batch, True)


@pytest.mark.parametrize("first", range(0, 30, 15))
def test_it_is_the_loop_with_identity_nodes_bit_for_bit(first):
    """In float32, with skips, modules used again and shared parameters."""
    features = "linear dropout recurrent skip reuse shared_module tied far_tied no_grad branch"
    features += " sequential child_weight direct_forward checkpoint batch_norm"
    features += " two_backwards two_calls"
    cut_matters = 0
    for seed in range(first, first + 15):
        cut = Run(cut_loop, seed, features.split())
        cut.assert_same(Run(one_graph, seed, features.split()))

        plain = Run(plain_loop, seed, features.split()).gradients
        cut_matters += any(
            gradient is not None and not torch.equal(gradient, plain[name])
            for name, gradient in cut.gradients.items()
        )
    assert cut_matters > 0


# By hand.


@module_of(lambda weight=1.0: {"weight": nn.Parameter(torch.tensor(weight))})
def Scale(self, x: Tensor) -> Tensor:
    return x * self.weight


class Parts(nn.Module):
    """A root with children and a function as its forward."""

    def __init__(self, forward, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self._run = forward

    def forward(self, *args):
        return self._run(self, *args)


def train(model, *args):
    loss = model(*args).sum()
    model.backward(loss)
    return loss


def partition(model: nn.Module, **rank_of: int) -> dict[str, int]:
    return {path: rank_of.get(path.partition(".")[0], 0) for path, _ in model.named_modules()}


@pytest.mark.parametrize("average, want", [(True, 3 / 7), (False, 1.0)])
def test_a_microbatchs_backward_starts_with_its_share_of_the_samples(average, want):
    model = Parts(lambda self, x: self.scale(x[:1]), scale=Scale())
    x = torch.tensor([1.0, 0, 0, 0, 0, 0, 0])
    rank_of = partition(model, scale=1)

    cut_loop(train, model, (x,), rank_of=rank_of, microbatches=3, average=average)

    assert model.scale.weight.grad == torch.tensor(want)


# Requests.


def drawn(result: Result) -> str:
    return "  ".join(f"{r.microbatch}.{r.number}:{r.module or 'root'}@{r.rank}"
                     for r in result.requests)  # fmt: skip


def nested_model() -> Parts:
    """The root calls ``b``, which calls ``b.a``, and then ``b.a`` itself."""
    inner = Parts(lambda self, x: self.a(x) * 2, a=Scale())
    return Parts(lambda self, x: self.b(x) + self.b.a(x), b=inner)


def test_calls_may_be_nested_and_come_back_to_the_caller():
    model = nested_model()
    rank_of = {"": 0, "b": 1, "b.a": 0}

    result = cut_loop(train, model, (torch.ones(2),), rank_of=rank_of, microbatches=2)

    # The root's own call of b.a is no request: both are on rank 0.
    assert drawn(result) == ("0.0:root@0  0.1:b@1  0.2:b.a@0  1.0:root@0  1.1:b@1  1.2:b.a@0")
    assert model.b.a.weight.grad == 3


def test_a_sequential_makes_one_call_per_run_of_children_on_another_rank():
    model = nn.Sequential(*(Scale() for _ in range(7)))
    ranks = [0, 1, 1, 2, 2, 1, 0]
    rank_of = {"": 0, **{str(i): rank for i, rank in enumerate(ranks)}}

    result = cut_loop(train, model, (torch.ones(1),), rank_of=rank_of)

    assert drawn(result) == "0.0:root@0  0.1:1:2@1  0.2:3:4@2  0.3:5@1"


def test_each_request_sees_each_parameter_of_its_rank_as_a_leaf_of_its_own():
    model = nested_model()
    model.b.tied = model.b.a  # a second place of the same parameter

    result = cut_loop(train, model, (torch.ones(1),), rank_of={"": 0, "b": 1, "b.a": 0})

    leaves = [list(request.leaves.values()) for request in result.requests]
    assert [len(each) for each in leaves] == [1, 0, 1]
    assert leaves[0][0] is not leaves[2][0]
    assert model.b.a._parameters["weight"] is model.b.tied.weight
    assert type(model.b.a) is Scale and model.b.a.weight.grad is not None


def test_hooks_run_where_they_belong():
    """Pre-hooks as the owner, who has the weights; the others as the caller."""
    model = Parts(lambda self, x: self.scale(x), scale=Scale())
    leaves = []
    model.scale.register_forward_pre_hook(lambda module, args: leaves.append(module.weight))
    model.scale.register_forward_hook(lambda module, args, y: leaves.append(module.weight))
    model.scale.register_full_backward_hook(lambda module, gx, gy: leaves.append(gy[0].item()))

    x = torch.ones(1, requires_grad=True)

    result = cut_loop(train, model, (x,), rank_of=partition(model, scale=1))

    (owners,) = result.requests[1].leaves.values()
    assert leaves[0] is owners
    assert leaves[1] is model.scale.weight
    assert leaves[2] == 1.0


# Checkpoints.


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_runs_as_the_request_that_called_the_checkpoint(reentrant):
    """Not as the callee, in whose backward it may be: its own children are here."""
    ranks = []

    @module_of(
        lambda: {
            "far": Scale(2.0),
            "near": Parts(lambda self, x: (ranks.append("near"), x)[1], scale=Scale()),
        }
    )
    def Inner(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.far(self.near(x)), x, use_reentrant=reentrant)

    model = Parts(lambda self, x: self.inner(self.first(x)), first=Scale(), inner=Inner())
    rank_of = {path: 0 for path, _ in model.named_modules()} | {"inner.far": 1}

    result = cut_loop(train, model, (torch.ones(1),), rank_of=rank_of)

    assert {(r.module, r.rank) for r in result.requests[1:]} == {("inner.far", 1)}
    assert model.inner.far.weight.grad == 1 and len(ranks) >= 2


# What is refused.


def scaled(**members) -> Parts:
    return Parts(lambda self, x: self.scale(x), scale=Scale(), **members)


def tied() -> nn.Sequential:
    model = nn.Sequential(Scale(), Scale())
    model[1].weight = model[0].weight
    return model


REFUSED = [
    (nested_model, {"": 0, "b": 1}, train, "no rank for module 'b.a'"),
    (Scale, {"": 1}, train, "root must be on rank 0, not 1"),
    (tied, {"": 0, "0": 0, "1": 1}, train, "1.weight on rank 1 is 0.weight on rank 0"),
    (
        lambda: Parts(lambda self, x: x * self.scale.weight, scale=Scale()),
        {"": 0, "scale": 1},
        train,
        "scale.weight of rank 1 was used by code",
    ),
    (
        scaled,
        {"": 0, "scale": 1},
        lambda model, x: model(x).sum().backward(),
        "must begin with model.backward",
    ),
]


@pytest.mark.parametrize(("make", "rank_of", "step", "told"), REFUSED)
def test_what_is_refused(make, rank_of, step, told):
    with pytest.raises((ValueError, RuntimeError), match=told):
        cut_loop(step, make(), (torch.ones(1),), rank_of=rank_of)


def test_a_step_that_fails_leaves_the_model_as_it_was():
    def step(model, x):
        train(model, x)
        if next(calls) == 1:
            raise KeyError("second microbatch")

    calls = itertools.count()
    model = Parts(lambda self, x: self.scale(x), scale=Scale())
    weight = model.scale.weight
    torch.manual_seed(1)

    with pytest.raises(KeyError, match="second microbatch"):
        cut_loop(
            step, model, (torch.ones(2),), rank_of=partition(model, scale=1), microbatches=2
        )

    assert type(model.scale) is Scale and model.scale.weight is weight
    assert weight.grad is None
    state = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())
