"""Checkpointed modules give the bits of plain ones, on any rank, and run again."""

import copy
import pickle
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import smp
from smp import _core
from smp.compat.checkpoint_calls import checkpoint, checkpoint_sequential
from tests.devices import DEVICES, use
from tests.models.modules import module_of
from tests.models.partition import distributed
from tests.models.steps import mean_square
from tests.models.trained import assert_same
from tests.ranks import on_ranks
from tests.reference.compare import gradients

STRATEGIES = ["each", "contiguous", "group_2", "group_3"]


@module_of(lambda: {"linear": nn.Linear(4, 4), "dropout": nn.Dropout(0.5), "runs": 0})
def Layer(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """A linear layer with dropout that counts how often it runs here."""
    self.runs += 1
    return self.dropout(self.linear(x)).tanh() * scale


class Stack(nn.Module):
    """A Sequential whose children are on both ranks, and a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence = nn.Sequential(*[Layer() for _ in range(5)])
        self.layers = nn.ModuleList([Layer(), Layer()])
        for index, layer in enumerate(self.sequence):
            smp.set_partition(layer, int(index in (1, 2)))
        smp.set_partition(self.layers, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.sequence(x)
        for layer in self.layers:
            x = x + layer(x, scale=0.5)
        return x


def train(set_up) -> tuple[dict, int]:
    """Gradients of one step of this rank's parameters, and runs of its layers."""
    torch.manual_seed(1)
    stack = Stack()
    model = distributed(stack, {"": 0})
    set_up(stack)

    step = smp.step(mean_square)

    model.train()
    step(model, torch.randn(4, 4, generator=torch.Generator().manual_seed(2)))
    counted = sum(m.runs for m in model.local_modules() if isinstance(m, Layer))
    return gradients(model), counted


def hooked(stack: Stack) -> None:
    """The caller's hooks: children of other ranks get a request each."""
    for layer in stack.sequence:
        layer.register_forward_hook(lambda *call: None)


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
@pytest.mark.parametrize("with_hooks", [False, True])
@pytest.mark.sample(6)
def test_gradients_are_those_without_checkpointing(strategy, pipeline, with_hooks):
    """With dropout, local and remote children; the layers run twice."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "pipeline": pipeline})
    also = hooked if with_hooks else lambda stack: None
    want, once = train(also)

    def set_up(stack: Stack) -> None:
        also(stack)
        smp.set_activation_checkpointing(stack.sequence, strategy=strategy)
        smp.set_activation_checkpointing(stack.layers)

    got, twice = train(set_up)

    assert_same(got, want)
    assert twice > once


class Noted(nn.Linear):
    """A layer that notes its number, and its activation, each time that it runs here."""

    def __init__(self, number: int, runs: list[int]) -> None:
        super().__init__(4, 4)
        self.number, self.runs = number, runs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.append(self.number)
        inner = super().forward(x).tanh()
        ACTIVATIONS.append(weakref.ref(inner))
        ALIVE.append(sum(activation() is not None for activation in ACTIVATIONS))
        return inner.square()  # keeps it


ACTIVATIONS: list[weakref.ref] = []
ALIVE: list[int] = []  # activations there were, at each call


# What runs again in backward: the last group first, each from its front.
AGAIN = {
    "each": [5, 4, 3, 2, 1, 0],
    "group_2": [4, 5, 2, 3, 0, 1],
    "group_3": [3, 4, 5, 0, 1, 2],
    "group_4": [4, 5, 0, 1, 2, 3],
    "group_9": [0, 1, 2, 3, 4, 5],
}


@pytest.mark.parametrize("strategy", [*AGAIN, "contiguous"])
@pytest.mark.parametrize("by_call", [False, True])
def test_a_strategy_makes_its_groups(strategy, by_call):
    smp.reset()
    runs: list[int] = []
    sequence = nn.Sequential(*[Noted(number, runs) for number in range(6)])

    if by_call:
        out = checkpoint_sequential(sequence, torch.ones(2, 4), strategy=strategy)
    else:
        smp.set_activation_checkpointing(sequence, strategy=strategy)
        out = sequence(torch.ones(2, 4))
    assert runs == list(range(6))
    out.sum().backward()

    assert runs[6:] == AGAIN.get(strategy, [0, 1, 2, 3, 4, 5])


# The same where child 0 is of one rank, 1 to 3 of another, and 4 and 5 of the first one:
# groups begin anew at each boundary.
AGAIN_BY_RANK = {
    "each": ([5, 4, 0], [3, 2, 1]),
    "group_2": ([4, 5, 0], [3, 1, 2]),
    "group_3": ([4, 5, 0], [1, 2, 3]),
    "contiguous": ([4, 5, 0], [1, 2, 3]),
    None: ([], []),
}


@on_ranks(2)
def test_a_strategy_makes_its_groups_where_ranks_share_the_children():
    """Each owner runs its own again, keeps no activation, and gets no more messages."""
    messages = {}
    for strategy, again in AGAIN_BY_RANK.items():
        smp.init({"pipeline_parallel_degree": 2})
        runs: list[int] = []
        layers = [Noted(number, runs) for number in range(6)]
        sequence = nn.Sequential(*layers)
        smp.set_partition(sequence, 0)
        for layer in layers[1:4]:
            smp.set_partition(layer, 1)
        if strategy is not None:
            smp.set_activation_checkpointing(sequence, strategy=strategy)
        model = smp.DistributedModel(sequence)

        @smp.step
        def step(model: nn.Module, x: torch.Tensor) -> None:
            model.backward(model(x).sum())

        step(model, torch.ones(2, 4))  # the first is preceded by tracing
        for notes in (runs, ACTIVATIONS, ALIVE):
            notes.clear()
        before = _core.counters()["messages"]
        step(model, torch.ones(2, 4))
        messages[strategy] = _core.counters()["messages"] - before

        mine = again[smp.rank()]
        assert runs == [[0, 4, 5], [1, 2, 3]][smp.rank()] + mine
        assert max(ALIVE) == (1 if mine else 3)
        smp.shutdown()
    assert len(set(messages.values())) == 1


@on_ranks(2)
def test_a_module_whose_subtree_spans_ranks_is_checkpointed():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    want, _ = train(lambda stack: None)

    got, _ = train(smp.set_activation_checkpointing)

    assert_same(got, want)


@on_ranks(2)
def test_buffers_that_a_checkpoint_changes_again_in_backward_are_said():
    """Their values then depend on timing; once, on the module's rank."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 3})
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4)))
    model = distributed(net, {"": 0, "1": 1})
    smp.set_activation_checkpointing(net[1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        smp.step(mean_square)(model, torch.randn(6, 4))
    said = [str(w.message) for w in caught if "once more in backward" in str(w.message)]
    assert len(said) == smp.pp_rank() and all("'1.0' (BatchNorm1d)" in text for text in said)


def test_the_functions_equal_a_plain_call():
    """patches.checkpoint, without a job: output, gradients, arguments by name."""
    torch.manual_seed(0)
    sequence = nn.Sequential(*[Layer() for _ in range(4)]).eval()
    x = torch.randn(2, 4, requires_grad=True)
    want = torch.autograd.grad(sequence(x).sum(), list(sequence.parameters()))

    for strategy in STRATEGIES:
        out = checkpoint_sequential(sequence, x, strategy=strategy)
        assert_same(torch.autograd.grad(out.sum(), list(sequence.parameters())), want)
    runs: list[int] = []
    noted = nn.Sequential(*[Noted(number, runs) for number in range(3)])
    checkpoint_sequential(noted, torch.ones(2, 4)).sum().backward()
    assert runs == [0, 1, 2, 2, 1, 0]  # each by itself, if nothing else is said
    out = checkpoint(sequence[0], x, scale=3.0)
    assert torch.equal(out, sequence[0](x, scale=3.0))
    with pytest.raises(TypeError, match="nn.Sequential, got a Layer"):
        checkpoint_sequential(sequence[0], x)


def test_a_checkpointed_module_keeps_its_class_and_is_pickled():
    sequence = nn.Sequential(nn.Linear(2, 2))
    smp.set_activation_checkpointing(sequence[0])

    assert isinstance(sequence[0], nn.Linear)
    assert type(sequence[0]).__name__ == "Linear"
    loaded = pickle.loads(pickle.dumps(sequence))
    assert torch.equal(loaded[0].weight, sequence[0].weight)


class Single(nn.Linear):
    """There is one of it, which a pickle has by its name."""

    def __reduce_ex__(self, protocol):
        return "SINGLE"


SINGLE = Single(2, 2)


def test_what_its_class_does_not_copy_stays_the_same_module():
    smp.set_activation_checkpointing(SINGLE)
    for take in (copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
        assert take(SINGLE) is SINGLE
    copied = copy.deepcopy([SINGLE, SINGLE])
    assert copied[0] is copied[1] is SINGLE and hasattr(type(SINGLE), "_smp_checkpointed")


@pytest.mark.parametrize("in_a_list", [False, True])
def test_packed_arguments_reach_the_first_child_as_one(in_a_list):
    @module_of()
    def Pair(self, pair):
        return pair[0] + pair[1]

    sequence = nn.Sequential(Pair())
    # A list hands its arguments on to its children.
    of = nn.ModuleList([sequence]) if in_a_list else sequence
    smp.set_activation_checkpointing(of, pack_args_as_tuple=True)

    assert torch.equal(sequence(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))
    pair = torch.ones(2), torch.ones(2)
    assert torch.equal(sequence(pair), torch.full((2,), 2.0))


@pytest.mark.parametrize("strategy", ["group_0", "group", "all", "group_x"])
def test_an_unknown_strategy_is_refused(strategy):
    with pytest.raises(ValueError, match=f"strategy '{strategy}': it is 'each'"):
        smp.set_activation_checkpointing(nn.Sequential(), strategy=strategy)
    with pytest.raises(ValueError, match="needs an nn.Sequential"):
        smp.set_activation_checkpointing(nn.ModuleList(), strategy="group_2")


@module_of(lambda: {"scale": nn.Parameter(torch.ones(())), "drawn": []})
def Draws(self, x: torch.Tensor) -> torch.Tensor:
    """Scales by a random number, and notes which."""
    self.drawn.append(torch.rand(()).item())
    return x * self.scale * self.drawn[-1]


def of_the_module(layer: Draws, preserve: bool):
    smp.set_activation_checkpointing(layer, preserve_rng_state=preserve)
    return layer


def of_a_sequence(layer: Draws, preserve: bool):
    sequence = nn.Sequential(layer)
    smp.set_activation_checkpointing(sequence, preserve_rng_state=preserve)
    return sequence


def of_a_list(layer: Draws, preserve: bool):
    layers = nn.ModuleList([layer])
    smp.set_activation_checkpointing(layers, preserve_rng_state=preserve)
    return layers[0]


def set_again(layer: Draws, preserve: bool):
    smp.set_activation_checkpointing(layer, preserve_rng_state=not preserve)
    return of_the_module(layer, preserve)


def by_call(layer: Draws, preserve: bool):
    return lambda x: checkpoint(layer, x, preserve_rng_state=preserve)


def by_call_of_a_sequence(layer: Draws, preserve: bool):
    return lambda x: checkpoint_sequential(nn.Sequential(layer), x, preserve_rng_state=preserve)


@pytest.mark.parametrize("preserve", [False, True])
@pytest.mark.parametrize(
    "make",
    [of_the_module, of_a_sequence, of_a_list, set_again, by_call, by_call_of_a_sequence],
)
def test_the_numbers_that_a_layer_draws_are_drawn_again_if_that_is_asked_for(make, preserve):
    """Once forward and once in backward; without gradients there is no backward."""
    smp.reset()
    layer = Draws()
    call = make(layer, preserve)
    with torch.no_grad():
        call(torch.ones(2))
    assert len(layer.drawn) == 1

    call(torch.ones(2)).sum().backward()

    _, first, again = layer.drawn
    assert (first == again) is preserve


class Drops(nn.Module):
    """Dropout of a linear layer, whose input may be anywhere in its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, given=None, *, x=None):
        if isinstance(given, SimpleNamespace):
            x = given.x
        elif given is not None:
            x = given
        return self.dropout(self.linear(self.linear.weight if x is None else x)).square()


CALLS = {
    "by position": lambda layer, x: layer(x),
    "by keyword": lambda layer, x: layer(x=x),
    "in an object": lambda layer, x: layer(SimpleNamespace(x=x)),
    "without a tensor": lambda layer, x: layer() * x.sum(),
}


class Calls(nn.Module):
    """Calls `Drops` in one of these ways."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.first, self.drops, self.call = nn.Linear(4, 4), Drops(), call

    def forward(self, x):
        return CALLS[self.call](self.drops, self.first(x))


@on_ranks(1, 2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", CALLS)
def test_a_layer_drops_the_same_again_wherever_its_input_is(device, call):
    @smp.step
    def step(model, x):
        model.backward(model(x).sum())

    grads = []
    for checkpoints in (False, True):
        smp.reset()
        smp.init({"pipeline_parallel_degree": -1, "microbatches": 2})
        at = use(device)
        torch.manual_seed(0)
        net = Calls(call).to(at)
        smp.set_partition(net, 0)
        smp.set_partition(net.drops, smp.pp_size() - 1)
        model = smp.DistributedModel(net)
        if checkpoints:
            smp.set_activation_checkpointing(net.drops)
        step(model, torch.ones(8, 4).to(at))
        grads.append({name: p.grad.cpu() for name, p in model.local_named_parameters()})
    assert_same(grads[1], grads[0])


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="takes a torch.nn.Module, got a list"):
        smp.set_activation_checkpointing([nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="strategy 'all': it is 'each'"):
        checkpoint_sequential(nn.Sequential(nn.Linear(1, 1)), torch.ones(1), strategy="all")
