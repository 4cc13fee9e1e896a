"""Random module trees: small models that do what users' models do, in odd mixtures.

    model, make_batch, step = make_tree(seed)
    rank_of = random_partition(model, ranks=3, seed=seed)
    print(describe(model, rank_of))

Everything follows from the seed, on every rank alike.  To narrow down a seed that
fails, give fewer features: ``make_tree(seed, features={"skip", "dropout"})``; a tree
of the same seed with other features is another tree.

Every block maps ``[rows, WIDTH]`` to ``[rows, WIDTH]`` and shows one feature; its
inner blocks are drawn at random.  What a feature is about is said once, in the
docstring of its class; features that change the whole tree or the step are in
``Root`` and ``make_tree``.
"""

import random
from collections import namedtuple
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.modules import module_of
from tests.models.partition import random_partition

__all__ = ["ALL", "ORDERED", "Tree", "describe", "make_tree", "random_partition"]

WIDTH = 8
DEPTH = 3  # composites around a leaf, at most
Block = nn.Module


class Tree(NamedTuple):
    model: nn.Module
    make_batch: Callable[[int, torch.Generator], tuple[Tensor, ...]]
    step: Callable


# Blocks.  ``inner`` draws an inner block.


@module_of(lambda inner, rng: {"linear": nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.8)})
def Linear(self, x: Tensor) -> Tensor:
    """A leaf: linear, then tanh."""
    return torch.tanh(self.linear(x))


class BatchNorm(nn.Module):
    """A leaf whose buffers each forward changes."""

    def __init__(self, inner: Callable[[], Block], rng: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)  # the norm has one
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


@module_of(lambda inner, rng: {"linear": nn.Linear(WIDTH, WIDTH), "dropout": nn.Dropout(0.25)})
def Dropout(self, x: Tensor) -> Tensor:
    """A leaf that draws random numbers."""
    return self.dropout(self.linear(x))


class RunningMean(nn.Module):
    """A leaf with a buffer of its own that it assigns."""

    mean: Tensor

    def __init__(self, inner: Callable[[], Block], rng: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x - self.mean)


@module_of(
    lambda inner, rng: {
        "rnn": rng.choice([nn.GRU, nn.LSTM])(WIDTH // 2, WIDTH, batch_first=True)
    }
)
def Recurrent(self, x: Tensor) -> Tensor:
    """A leaf that reads its weights from a list of its own (``_flat_weights``)."""
    states, _ = self.rnn(x.reshape(x.size(0), 2, WIDTH // 2))
    return states[:, -1]


@module_of(
    lambda inner, rng: {
        "block": inner(),
        "join": nn.Linear(2 * WIDTH, WIDTH) if rng.random() < 0.4 else None,
    }
)
def Skip(self, x: Tensor) -> Tensor:
    """A skip connection, added or concatenated."""
    y = self.block(x)
    if self.join is None:
        return x + 0.5 * y
    return self.join(torch.cat([x, y], dim=1))


@module_of(lambda inner, rng: {"block": inner(), "times": rng.choice([2, 3])})
def Reuse(self, x: Tensor) -> Tensor:
    """One module, called two or three times."""
    for _ in range(self.times):
        x = self.block(x)
    return x


@module_of(lambda inner, rng: {"block": inner(), "factor": 1.0})
def Kept(self, x: Tensor) -> Tensor:
    """Keeps what its call made on itself, and its mode, over a call of its child."""
    self.kept = torch.tanh(x)
    self.factor = 0.5
    y = self.block(x) * self.factor
    self.factor = 1.0
    return y + self.kept


@module_of(lambda inner, rng: {"block": inner(), "calls": 0, "mean": torch.zeros(WIDTH)})
def Carried(self, x: Tensor) -> Tensor:
    """Leaves what its calls made on itself to the next: a number and a tensor."""
    self.calls = self.calls + 1
    self.mean = 0.9 * self.mean.to(x) + 0.1 * x.detach().mean(0)
    return self.block(x - self.mean) / self.calls


@module_of(lambda inner, rng: {"block": inner(), "seen": []})
def Grows(self, x: Tensor) -> Tensor:
    """Leaves a list that grows to its next call."""
    y = self.block(x)
    self.seen.append(float(x.detach().mean()))
    return y + 0.1 * sum(self.seen)


class SharedModule(nn.Module):
    """One module that two parents hold."""

    @module_of(lambda shared, inner: {"shared": shared, "own": inner()})
    def Parent(self, x: Tensor) -> Tensor:
        return self.own(self.shared(x))

    def __init__(self, inner: Callable[[], Block], rng: random.Random) -> None:
        super().__init__()
        shared = inner()
        self.first = self.Parent(shared, inner)
        self.second = self.Parent(shared, inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Tied(nn.Module):
    """Two modules with one weight."""

    def __init__(self, inner: Callable[[], Block], rng: random.Random) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.between = inner()
        self.decode = nn.Linear(WIDTH, WIDTH)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.between(self.encode(x)))


@module_of(lambda inner: {"left": inner(), "right": inner()})
def SeveralOutputsChild(self, x: Tensor) -> tuple:
    left = self.left(x)
    return left, [self.right(x), None], left.argmax(1), x.size(0)


@module_of(lambda inner, rng: {"child": SeveralOutputsChild(inner)})
def SeveralOutputs(self, x: Tensor) -> Tensor:
    """A child that returns tensors, with and without gradient, a number and None."""
    left, (right, nothing), best, rows = self.child(x)
    assert nothing is None and rows == x.size(0)
    return left * right + best.unsqueeze(1) / WIDTH


@module_of(lambda inner: {"used": inner(), "unused": inner()})
def UnusedOutputChild(self, x: Tensor) -> tuple[Tensor, Tensor]:
    return self.unused(x), self.used(x)


@module_of(lambda inner, rng: {"child": UnusedOutputChild(inner)})
def UnusedOutput(self, x: Tensor) -> Tensor:
    """A child with an output that nobody uses: what made it gets no gradient."""
    return self.child(x)[1]


@module_of(lambda inner: {"block": inner()})
def UnusedInputChild(self, x: Tensor, unused: Tensor) -> Tensor:
    return self.block(x)


@module_of(lambda inner, rng: {"child": UnusedInputChild(inner), "other": inner()})
def UnusedInput(self, x: Tensor) -> Tensor:
    """A child that does not use one of its arguments."""
    other = self.other(x)
    return self.child(x, other) + 0.5 * other


@module_of(lambda: {"embedding": nn.Embedding(WIDTH, WIDTH)})
def InputWithoutGradChild(self, index: Tensor, mask: Tensor) -> Tensor:
    return self.embedding(index) * mask


@module_of(lambda inner, rng: {"child": InputWithoutGradChild(), "block": inner()})
def InputWithoutGrad(self, x: Tensor) -> Tensor:
    """A child whose arguments need no gradient (an index, a mask), but its weights do."""
    known = x.detach()
    return self.block(x) + self.child(known.argmax(1), (known > 0).to(x.dtype))


@module_of(
    lambda inner, rng: {
        "linear": nn.Linear(WIDTH, WIDTH),
        "layers": nn.Sequential(nn.LeakyReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
    }
)
def InPlaceModule(self, x: Tensor) -> Tensor:
    """A module without parameters that works in place on what it is given."""
    return self.layers(self.linear(x))


@module_of(lambda inner: {"block": inner(), "linear": nn.Linear(WIDTH, WIDTH)})
def InPlaceArgumentChild(self, x: Tensor) -> Tensor:
    gate = self.block(x.clone())
    x.add_(self.linear(gate))
    return gate.detach().sum()


@module_of(
    lambda inner, rng: {"child": InPlaceArgumentChild(inner), "view": rng.random() < 0.3}
)
def InPlaceArgument(self, x: Tensor) -> Tensor:
    """A child that changes its argument in place and returns something else; the
    argument may be a view, as half of a buffer that its parent made."""
    y = x * 0.75
    both = torch.cat([y, y], dim=1)
    total = self.child(both[:, WIDTH:] if self.view else y)
    if self.view:
        y = both[:, :WIDTH] * both[:, WIDTH:]
    return y + torch.tanh(total) * 0.1


@module_of(lambda inner, rng: {"child": nn.Linear(WIDTH, WIDTH), "block": inner()})
def ChangedResult(self, x: Tensor) -> Tensor:
    """A result that the caller changes in place (``loss /= n`` on an output)."""
    y = self.child(x)
    y /= 2
    return self.block(y)


@module_of(lambda inner: {"block": inner()})
def DetachedInputChild(self, x: Tensor) -> Tensor:
    return self.block(x.detach())


@module_of(lambda inner, rng: {"before": inner(), "child": DetachedInputChild(inner)})
def DetachedInput(self, x: Tensor) -> Tensor:
    """A child that detaches its argument: what made that gets no gradient."""
    return x + self.child(self.before(x))


@module_of(lambda inner, rng: {"gate": inner(), "block": inner()})
def NoGrad(self, x: Tensor) -> Tensor:
    """A part that runs without gradient."""
    with torch.no_grad():
        gate = torch.sigmoid(self.gate(x))
    return gate * self.block(x)


@module_of(lambda inner, rng: {"positive": inner(), "negative": inner()})
def Branch(self, x: Tensor) -> Tensor:
    """The data decide which child runs."""
    return self.positive(x) if x.detach().sum() > 0 else self.negative(x)


@module_of(lambda inner: {"block": inner(), "linear": nn.Linear(WIDTH, WIDTH)})
def ChangedListChild(self, x: Tensor, states: list) -> Tensor:
    y = self.block(states[0])
    states[0] = x + y
    states.append(y)
    return self.linear(y)


@module_of(lambda inner, rng: {"child": ChangedListChild(inner)})
def ChangedList(self, x: Tensor) -> Tensor:
    """A child that appends to its caller's list and replaces an item of it."""
    states = [x]
    y = self.child(x, states)
    z = self.child(y, states)
    return z + sum(states) / len(states)


@module_of(lambda inner: {"block": inner()})
def ChangedDictChild(self, values: dict) -> None:
    values["y"] = self.block(values["x"])
    values["calls"] += 1
    values["nested"]["mean"] = values["y"].mean(0)
    del values["unwanted"]


@module_of(lambda inner, rng: {"child": ChangedDictChild(inner)})
def ChangedDict(self, x: Tensor) -> Tensor:
    """A child that sets and deletes items of its caller's dict."""
    nested: dict = {}
    values = {"x": x, "calls": 0, "nested": nested, "unwanted": x}
    self.child(values)
    assert values["calls"] == 1 and "unwanted" not in values
    return values["y"] - nested["mean"]


class Memory:
    """An object that layers fill, as transformers' caches of keys and values."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []
        self.latest: Tensor | None = None

    def update(self, state: Tensor) -> Tensor:
        self.states.append(state)
        self.latest = state
        return torch.stack(self.states).mean(0)


@module_of(lambda inner: {"block": inner()})
def ChangedObjectChild(self, x: Tensor, memory: Memory) -> Tensor:
    return memory.update(self.block(x))


@module_of(
    lambda inner, rng: {"first": ChangedObjectChild(inner), "second": ChangedObjectChild(inner)}
)
def ChangedObject(self, x: Tensor) -> Tensor:
    """Layers that keep their states in an object of their caller's."""
    memory = Memory()
    y = self.second(self.first(x, memory), memory)
    assert len(memory.states) == 2 and memory.latest is memory.states[1]
    return y + 0.5 * memory.latest


@module_of(
    lambda inner: {
        "weight": nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH),
        "widen": nn.Linear(WIDTH // 2, WIDTH),
        "block": inner(),
    }
)
def StridedChild(self, columns: Tensor, half: Tensor, row: Tensor) -> Tensor:
    y = (self.weight @ columns).t()
    return self.block(y) + self.widen(half) * row.sum(1, keepdim=True) / WIDTH


@module_of(lambda inner, rng: {"child": StridedChild(inner)})
def Strided(self, x: Tensor) -> Tensor:
    """Arguments that are transposed, every second column, or expanded."""
    return self.child(x.t(), x[:, ::2], x[:1].expand(x.size(0), WIDTH))


@module_of(lambda inner: {"block": inner()})
def ParameterArgumentChild(self, x: Tensor, scale: nn.Parameter, shift: nn.Parameter) -> Tensor:
    return self.block(x) * scale + shift


@module_of(
    lambda inner, rng: {
        "vectors": nn.ParameterList(torch.randn(WIDTH) / 2 for _ in range(3)),
        "child": ParameterArgumentChild(inner),
    }
)
def ParameterArgument(self, x: Tensor) -> Tensor:
    """Parameters of a ``ParameterList`` that are passed as arguments."""
    y = self.child(x, self.vectors[0], self.vectors[1])
    return self.child(y, self.vectors[2], shift=self.vectors[1])


@module_of(lambda inner, rng: {"before": inner(), "child": inner()})
def ReentrantCheckpoint(self, x: Tensor) -> Tensor:
    """A child whose forward runs again, whole, in backward."""
    return checkpoint(self.child, self.before(x), use_reentrant=True)


class Checkpoint(nn.Module):
    """A part, with calls in it, whose saved tensors are computed again in backward."""

    def __init__(self, inner: Callable[[], Block], rng: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.child = inner()

    def _part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.child(torch.sin(x))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._part, x, use_reentrant=False)


@module_of(lambda inner: {"block": inner()})
def DictInOutChild(self, inputs: dict) -> dict:
    y = self.block(inputs["x"]) * inputs["scale"]
    return {"y": y, "same": y, "scale": inputs["scale"] + 1}


@module_of(lambda inner, rng: {"child": DictInOutChild(inner)})
def DictInOut(self, x: Tensor) -> Tensor:
    """A dict goes in and another comes out."""
    out = self.child({"x": x, "scale": 2})
    assert out["same"] is out["y"]
    return out["y"] / out["scale"]


Pair = namedtuple("Pair", "first second")


@module_of(lambda inner: {"first": inner(), "second": inner()})
def NamedTupleInOutChild(self, pair: Pair) -> Pair:
    return Pair(second=self.first(pair.first), first=self.second(pair.second))


@module_of(lambda inner, rng: {"child": NamedTupleInOutChild(inner)})
def NamedTupleInOut(self, x: Tensor) -> Tensor:
    """A named tuple goes in and another comes out."""
    pair = self.child(Pair(x, x.cos()))
    return pair.first - pair.second


@dataclass
class State:
    """``steps`` counts the children that have seen it."""

    hidden: Tensor
    gate: Tensor | None = None
    steps: int = 0


@module_of(lambda inner: {"block": inner(), "gate": nn.Linear(WIDTH, WIDTH)})
def DataclassInOutChild(self, state: State) -> State:
    gate = torch.sigmoid(self.gate(state.hidden))
    return State(self.block(state.hidden), gate, state.steps + 1)


@module_of(lambda inner, rng: {"child": DataclassInOutChild(inner)})
def DataclassInOut(self, x: Tensor) -> Tensor:
    """A dataclass goes in and another comes out."""
    state = self.child(self.child(State(x)))
    assert state.steps == 2 and state.gate is not None
    return state.hidden * state.gate


class Sequential(nn.Sequential):
    """Children that may be on several ranks, called one after the other."""

    def __init__(self, inner: Callable[[], Block], rng: random.Random) -> None:
        super().__init__(*(inner() for _ in range(rng.choice([3, 4]))))


@module_of(lambda inner: {"block": inner()})
def KeywordsChild(
    self, x: Tensor, *, add: Tensor | None = None, scale: float = 1.0, mode: str = ""
) -> Tensor:
    y = self.block(x) * scale
    return y if add is None else torch.tanh(y + add) if mode == "tanh" else y + add


@module_of(lambda inner, rng: {"child": KeywordsChild(inner)})
def Keywords(self, x: Tensor) -> Tensor:
    """Arguments by keyword, some left to their defaults."""
    return self.child(add=x, x=self.child(x), scale=0.5, mode="tanh")


class ChildWeight(nn.Module):
    """A parent that calls a child and also reads the child's weight itself."""

    reads_weights_of = ("child",)

    def __init__(self, inner: Callable[[], Block], rng: random.Random) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)
        self.block = inner()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.block(self.child(x)), self.child.weight.t())


@module_of(lambda inner, rng: {"child": Linear(inner, rng), "block": inner()})
def DirectForward(self, x: Tensor) -> Tensor:
    """A child that is called by ``forward``, and a grandchild past its parent."""
    return self.block(self.child.forward(x)) + self.child.linear(x)


@module_of(lambda inner: {"block": inner()})
def SameTwiceChild(self, x: Tensor, others: tuple[Tensor, ...]) -> Tensor:
    assert others[0] is x and others[1] is not x
    return self.block(x) * others[0] + others[1]


@module_of(lambda inner, rng: {"child": SameTwiceChild(inner)})
def SameTwice(self, x: Tensor) -> Tensor:
    """One tensor in two places of a call, which the child tells from equal ones."""
    return self.child(x, (x, x.clone()))


@module_of(lambda inner: {"block": inner()})
def PassThroughChild(self, x: Tensor, extras: list) -> tuple[Tensor, Tensor, list]:
    return self.block(x), x, extras


@module_of(lambda inner, rng: {"child": PassThroughChild(inner)})
def PassThrough(self, x: Tensor) -> Tensor:
    """A child that returns its argument itself beside a result."""
    extras = [1, x]
    y, same, same_extras = self.child(x, extras)
    assert same is x and same_extras is extras
    return y * same


#: What the hook of the ``Hooks`` under way writes into.  Not an attribute of the module:
#: a rank works on several microbatches at once, and modules are one for all of them.
_noted: ContextVar[list[Tensor]] = ContextVar("noted")


class Hooks(nn.Module):
    """A child with a hook before, which sees its weights, and one after it, which
    writes down the output where the parent finds it."""

    def __init__(self, inner: Callable[[], Block], rng: random.Random) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)
        self.block = inner()
        self.child.register_forward_pre_hook(self._scale)
        self.child.register_forward_hook(self._note)

    @staticmethod
    def _scale(child: nn.Linear, args: tuple[Tensor]) -> Tensor:
        return args[0] * child.weight.abs().mean()

    @staticmethod
    def _note(child: nn.Linear, args: tuple[Tensor], output: Tensor) -> Tensor:
        _noted.get().append(output)
        return output * 2

    def forward(self, x: Tensor) -> Tensor:
        noted: list[Tensor] = []
        token = _noted.set(noted)
        try:
            y = self.child(x)
        finally:
            _noted.reset(token)
        return self.block(y) + noted.pop()


_collected: ContextVar[dict[str, list[Tensor]] | None] = ContextVar("collected", default=None)


class Collected(nn.Module):
    """Children whose inner hooks write into a context variable of their caller, as
    transformers' hooks on routers and attentions do."""

    class Child(nn.Module):
        def __init__(self, inner: Callable[[], Block]) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, WIDTH)
            self.block = inner()
            self.gate.register_forward_hook(self._collect)

        @staticmethod
        def _collect(gate: nn.Linear, args: tuple[Tensor], output: Tensor) -> None:
            collected = _collected.get()
            if collected is not None:
                collected["gates"].append(output)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x) * torch.sigmoid(self.gate(x))

    def __init__(self, inner: Callable[[], Block], rng: random.Random) -> None:
        super().__init__()
        self.first = self.Child(inner)
        self.second = self.Child(inner)

    def forward(self, x: Tensor) -> Tensor:
        collected: dict[str, list[Tensor]] = {"gates": []}
        token = _collected.set(collected)
        try:
            y = self.second(self.first(x))
        finally:
            _collected.reset(token)
        return y + 0.1 * torch.stack(collected["gates"]).mean(0)


LEAVES: dict[str, type] = {
    "linear": Linear,
    "batch_norm": BatchNorm,
    "dropout": Dropout,
    "buffer": RunningMean,
    "recurrent": Recurrent,
}
COMPOSITES: dict[str, type] = {
    "skip": Skip,
    "reuse": Reuse,
    "shared_module": SharedModule,
    "tied": Tied,
    "several_outputs": SeveralOutputs,
    "unused_output": UnusedOutput,
    "unused_input": UnusedInput,
    "input_without_grad": InputWithoutGrad,
    "in_place_module": InPlaceModule,
    "in_place_argument": InPlaceArgument,
    "changed_result": ChangedResult,
    "detached_input": DetachedInput,
    "no_grad": NoGrad,
    "branch": Branch,
    "changed_list": ChangedList,
    "changed_dict": ChangedDict,
    "changed_object": ChangedObject,
    "strided": Strided,
    "parameter_argument": ParameterArgument,
    "reentrant_checkpoint": ReentrantCheckpoint,
    "checkpoint": Checkpoint,
    "dict": DictInOut,
    "named_tuple": NamedTupleInOut,
    "dataclass": DataclassInOut,
    "sequential": Sequential,
    "keywords": Keywords,
    "child_weight": ChildWeight,
    "direct_forward": DirectForward,
    "same_twice": SameTwice,
    "pass_through": PassThrough,
    "hooks": Hooks,
    "collected": Collected,
    "kept": Kept,
    "carried": Carried,
    "grows": Grows,
}
#: What leaves something to the next microbatch, which is to come after it.
ORDERED = frozenset(["batch_norm", "buffer", "carried", "grows"])
# Features of the whole tree: two far leaves share a weight; the step calls the model
# twice; the step calls backward twice.
WHOLE = ("far_tied", "two_calls", "two_backwards")

#: The names of all features.
ALL = frozenset([*LEAVES, *COMPOSITES, *WHOLE])

#: With these each parameter and each tensor is used once: what the cut loop gives is
#: then bit-equal to the plain loop.
ONE_USE = frozenset(
    ["linear", "batch_norm", "dropout", "buffer", "recurrent", "unused_output", "branch"]
    + ["in_place_module", "changed_result", "reentrant_checkpoint", "checkpoint"]
    + ["sequential", "dict"]
)


@module_of(lambda blocks: {"stem": nn.Linear(WIDTH, WIDTH), "blocks": nn.ModuleList(blocks)})
def Root(self, x: Tensor, scale: Tensor) -> Tensor:
    """An input layer, so that what the tree gets needs a gradient, and the tree."""
    x = self.stem(x)
    for block in self.blocks:
        x = block(x)
    return x * scale


class _Builder:
    def __init__(self, seed: int, features: frozenset[str]) -> None:
        self.rng = random.Random(f"{seed} {sorted(features)}")
        self._features = features
        self._left = 24  # blocks, about

    def block(self, depth: int = DEPTH, without: frozenset[str] = frozenset()) -> Block:
        self._left -= 1
        leaves = sorted(self._features & set(LEAVES) - without) or ["linear"]
        composites = sorted(self._features & set(COMPOSITES) - without)
        end = depth == 0 or self._left < 0 or (depth < DEPTH and self.rng.random() < 0.1)
        name = self.rng.choice(leaves if end or not composites else composites)
        checkpoints = ("checkpoint", "reentrant_checkpoint")
        # It computes again in backward: when is up to the schedule, and how often, without
        # re-entrance, to where the modules in it are.
        inside = without | ORDERED if name in checkpoints else without
        kind = {**LEAVES, **COMPOSITES}[name]
        return kind(lambda: self.block(depth - 1, inside), self.rng)

    def tie_far_leaves(self, model: nn.Module) -> None:
        linears = [
            module
            for module in model.modules()
            if type(module) is nn.Linear and module.weight.shape == (WIDTH, WIDTH)
        ]
        first, second = self.rng.sample(linears, 2) if len(linears) > 1 else linears * 2
        second.weight = first.weight


def make_tree(
    seed: int, features: Collection[str] = ALL, dtype: torch.dtype = torch.float32
) -> Tree:
    """A model, ``make_batch(batch_size, generator)`` and ``step(model, *batch)``.

    The step returns the loss, the outputs, which rows were best (integers) and a
    number.  The batch needs two samples per microbatch (BatchNorm).

    Raises:
        ValueError: a feature that does not exist.
    """
    unknown = set(features) - ALL
    if unknown:
        raise ValueError(f"no such features: {sorted(unknown)}; there are {sorted(ALL)}")
    builder = _Builder(seed, frozenset(features))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Root([builder.block() for _ in range(builder.rng.choice([1, 2, 3]))])
        if "far_tied" in features and builder.rng.random() < 0.3:
            builder.tie_far_leaves(model)
        model.to(dtype)
    two_calls = "two_calls" in features and builder.rng.random() < 0.15
    two_backwards = "two_backwards" in features and builder.rng.random() < 0.2
    both_forwards_first = builder.rng.random() < 0.5

    def make_batch(batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        def rows() -> Tensor:
            return torch.randn(batch_size, WIDTH, generator=generator, dtype=dtype)

        return rows(), rows().abs() + 0.5, rows()

    def step(model: nn.Module, x: Tensor, scale: Tensor, target: Tensor) -> dict:
        out = model(x, scale)
        loss = F.mse_loss(out, target)
        if two_backwards and both_forwards_first:
            second = model(x + 1, scale)
            model.backward(loss)
            loss = F.l1_loss(second, target)
        elif two_backwards:
            model.backward(loss)
            loss = F.l1_loss(model(x + 1, scale), target)
        elif two_calls:
            loss = loss + F.l1_loss(model(x + 1, scale), out)
        model.backward(loss)
        return {"loss": loss, "out": out, "best": out.argmax(1), "rows": x.size(0)}

    return Tree(model, make_batch, step)


def describe(model: nn.Module, rank_of: Mapping[str, int] | None = None) -> str:
    """The tree as indented text, one line per module, with ranks where given."""
    lines = []
    for path, module in model.named_modules():
        indent = "  " * (path.count(".") + bool(path))
        name = path.rpartition(".")[2] or "root"
        rank = f" on {rank_of[path]}" if rank_of is not None else ""
        kind = type(module).__qualname__
        detail = module.extra_repr() or (f"{module.times} times" if kind == "Reuse" else "")
        lines.append(f"{indent}{name}: {kind}({detail}){rank}")
    return "\n".join(lines)
