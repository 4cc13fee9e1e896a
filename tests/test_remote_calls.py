"""Spec: design.md, section 3: a call of a module on another rank is a call.

What the module does to its arguments, what it draws, and what its hooks see is as in one
process.  Most tests run one step function three times: with smp, as the cut loop (the same
bits), and as the plain loop (the same numbers).
"""

import copy
import random
import warnings
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import smp
from smp import _core, marks
from smp.modules import remote_modules
from tests.models.modules import in_backward, module_of
from tests.models.partition import distributed, partition_by_path
from tests.models.steps import mean_square
from tests.ranks import on_ranks
from tests.reference.compare import (
    assert_close,
    assert_same_bits,
    assert_same_outputs,
    gradients,
)
from tests.reference.cut_loop import cut_loop, plain_loop
from tests.reference.objects import tensors_in

WIDTH = 8
SCHEDULES = ["simple", "interleaved"]


class Pair(nn.Module):
    """A layer here and a module there."""

    def __init__(self, far: nn.Module) -> None:
        super().__init__()
        self.near = nn.Linear(WIDTH, WIDTH)
        self.far = far


class Run:
    """A Pair with smp, whose ``far`` is on pp_rank 1, and copies for the reference loops.

    Args:
        there: paths of the modules that are on pp_rank 1 in place of ``far``; or the
            pp_ranks of some, by path.
        average: ``average_grads_across_microbatches``.
        config: of ``smp.init``; 3 microbatches, all under way, where it does not say.
    """

    def __init__(
        self, far: nn.Module, there: tuple | dict = ("far",), average: bool = True, **config
    ) -> None:
        config = {"microbatches": 3, "active_microbatches": 3} | config
        homes = there if isinstance(there, dict) else dict.fromkeys(there, 1)
        ranks = 1 + max(homes.values())
        smp.init({"pipeline_parallel_degree": ranks, **config})
        net = Pair(far).double()
        self.cut, self.plain = copy.deepcopy(net), copy.deepcopy(net)
        rank_of = partition_by_path(net, homes)
        self.options = {
            "rank_of": rank_of,
            "ranks": ranks,
            "microbatches": config["microbatches"],
            "average": average,
        }
        self.model = distributed(net, rank_of, average_grads_across_microbatches=average)

    def check(self, step, *batch, seed: int = 1, plain: bool = True, bits: bool = True) -> None:
        """One step, whose outputs are a dict, equals that of both loops.

        Args:
            plain: False where a backward draws: only the cut loop has the same numbers.
            bits: False where gradients are those of the plain loop within rounding.
        """
        torch.manual_seed(seed)
        got = smp.step(step)(self.model, *batch)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        cut = cut_loop(step, self.cut, batch, **self.options)
        assert torch.equal(state, torch.get_rng_state())
        mine = gradients(self.model)
        if bits:
            assert_same_bits(mine, gradients(self.cut))
        count = range(self.options["microbatches"])
        outputs = [{name: values[i] for name, values in got.items()} for i in count]
        assert_same_outputs(outputs, cut.outputs)
        if plain:
            torch.manual_seed(seed)
            want = plain_loop(step, self.plain, batch, **self.options).outputs
            assert_close(mine, gradients(self.plain), relative=1e-12)
            numbered = [dict(enumerate(tensors_in(each))) for each in (outputs, want)]
            assert_close(*numbered, relative=1e-12)
        if not bits:  # the next step may begin with the same again
            for name, parameter in self.model.local_named_parameters():
                self.cut.get_parameter(name).grad = parameter.grad.clone()


def rows(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)


# ------------------------------------------------------------------------ arguments


@module_of(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def Changes(self, hidden, seen=None):
    """Changes one argument so that autograd does not see it, and one so that it does."""
    with torch.no_grad():
        hidden.mul_(3).add_(1)
    if seen is not None:
        seen.add_(self.linear(hidden))
    return self.linear(hidden).tanh()


ARGUMENTS = {
    "a leaf": lambda near, x: x.clone().requires_grad_(),
    "a result": lambda near, x: near(x),
    "a view": lambda near, x: torch.cat([near(x), x], dim=1)[:, WIDTH // 2 : -WIDTH // 2],
    "without gradient": lambda near, x: near(x).detach(),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", ARGUMENTS)
@pytest.mark.parametrize("others", [0, 1], ids=["alone", "with a view that autograd sees"])
def test_an_argument_changed_under_no_grad_keeps_its_gradient(kind, others):
    """The caller sees the values; the gradient is as if nothing had changed them."""

    def step(model, x):
        near = model.module.near
        argument = ARGUMENTS[kind](near, x)
        bases = [torch.cat([near(x + 1), near(x - 1)], dim=1)] * others
        out = model.module.far(argument, *(base[:, WIDTH:] for base in bases))
        has_its_own = argument.requires_grad and not argument._is_view()
        if has_its_own:
            argument.retain_grad()
        model.backward((out * argument).sum() + sum(base.square().sum() for base in bases))
        more = bases + [argument.grad] * has_its_own
        return {"out": out, "argument": argument} | dict(enumerate(more))

    run = Run(Changes())
    for seed in range(2):
        run.check(step, rows(7, seed))


@module_of(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def Twofold(self, x):
    return self.linear(x), self.linear(x).tanh()


@on_ranks(2)
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("given", ["a tensor", "a tuple", "None among them"])
def test_given_gradients_count_by_the_samples_of_their_microbatch(given, average):
    """With averaging, means of uneven microbatches make the mean of the batch."""

    def step(model, x):
        y, z = model.module.far(model.module.near(x))
        mean = torch.full_like(y, 1 / len(y))
        if given == "a tensor":
            model.backward(y, mean)
        elif given == "a tuple":
            model.backward((y, z), (mean, 2 * mean))
        else:
            model.backward([y, z.sum(1).mean()], [mean, None])
        return {"y": y}

    run = Run(Twofold(), average=average)
    run.check(step, rows(7))

    if average:
        whole = copy.deepcopy(run.plain)
        whole.zero_grad()
        y, z = whole.far(whole.near(rows(7)))
        factor = {"a tensor": 0, "a tuple": 2, "None among them": 1}[given]
        (y + factor * z).sum(1).mean().backward()
        assert_close(gradients(run.plain), gradients(whole), relative=1e-12)


class Noted:
    latest: torch.Tensor | None = None


class NotedDict(dict):
    latest: torch.Tensor | None = None


@module_of(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def Fills(self, x, note):
    """Sets an attribute of what it is given, and nothing else."""
    note.latest = self.linear(x)
    return x.mean()


@on_ranks(2)
@pytest.mark.parametrize("kind", [Noted, NotedDict])
def test_an_attribute_that_the_module_sets_is_set_for_the_caller(kind):
    def step(model, x):
        note = kind()
        mean = model.module.far(model.module.near(x), note)
        model.backward(note.latest.square().mean() + mean)
        return {"latest": note.latest}

    Run(Fills()).check(step, rows(7))


@module_of(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def Removes(self, x, names, ordered, numbers, members, note):
    """Takes from all that it is given, and adds to it."""
    names["new"] = names.pop("old") + 1
    ordered.popitem(last=False)
    ordered.move_to_end(1)
    del numbers[1:]
    members ^= {2, 3}
    note.new = 7
    del note.old
    return self.linear(x).mean()


@on_ranks(2)
def test_what_the_module_removes_is_gone_for_the_caller():
    def step(model, x):
        names, note = {"old": 1, "kept": 3}, Noted()
        ordered = OrderedDict((number, number) for number in range(4))
        numbers, members, note.old = [4, 5, 6], {1, 2}, 8
        mean = model.module.far(model.module.near(x), names, ordered, numbers, members, note)
        model.backward(mean)
        left = [*names.values(), -1, *ordered, -1, *numbers, -1, *sorted(members), -1]
        return {"left": torch.tensor([*left, *vars(note).values()])}

    Run(Removes()).check(step, rows(7))


@on_ranks(2)
@pytest.mark.parametrize("by", ["argument", "result", "gradient"])
def test_of_a_column_of_a_large_tensor_the_column_alone_is_sent(by):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
    size = 4096
    large = {rank: torch.empty(size, size) for rank in range(2)}

    @module_of(lambda: {"scale": nn.Parameter(torch.ones(()))})
    def Column(self, x):
        y = x * self.scale
        if by != "result":
            return y
        large[1][:, 3] = y.detach()
        return y + 0, large[1][:, 3]

    def as_a_column(gradient):
        large[0][:, 3] = gradient
        return large[0][:, 3]

    net = nn.Sequential(Column())
    model = distributed(net, {"": 0, "0": 1})

    @smp.step(non_split_inputs=["x"])
    def step(model, x):
        large[0][:, 3] = x
        out = model.module[0](large[0][:, 3] if by == "argument" else x)
        y, same = out if by == "result" else (out, out)
        if by == "gradient":
            y = in_backward(y, as_a_column)
        model.backward((y * x).sum())
        return same

    def sent() -> int:
        return sum(each[2] for each in _core.peers() if each is not None)

    x = torch.randn(size)
    step(model, x)  # the first one sends the partition too
    before = sent()
    got = step(model, x)
    grew = sent() - before

    assert torch.equal(got[0], x)
    assert grew < 5 * size * x.element_size()
    if smp.pp_rank() == 1:
        assert model.module[0].scale.grad == 2 * x.square().sum()


# ------------------------------------------------------------------------ gradients


class Rounded(torch.autograd.Function):
    """Rounds a gradient up or down at random: right on average."""

    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, gradient):
        steps = gradient * 64
        up = torch.bernoulli(steps - steps.floor())
        return (steps.floor() + up) / 64 + torch.rand(()) / 1024


@module_of(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def Rounds(self, x):
    return Rounded.apply(self.linear(x).tanh())


@on_ranks(2)
@pytest.mark.parametrize(
    "schedule, active", [("simple", 3), ("interleaved", 1), ("interleaved", 3)]
)
def test_a_backward_that_draws_gets_the_numbers_of_its_request(schedule, active):
    """Not of its turn, nor of its worker: each call's backward has a stream of its own."""

    def step(model, x):
        net = model.module
        for _ in range(3):
            x = Rounded.apply(net.near(net.far(x)))
        loss = (x + torch.rand_like(x)).square().sum()
        model.backward(loss)
        return {"loss": loss, "after": torch.rand(4)}

    run = Run(Rounds(), pipeline=schedule, active_microbatches=active)
    for seed in range(3):
        run.check(step, rows(6, seed), seed=seed, plain=False)


def train(model, x):
    out = model.module.far(model.module.near(x))
    model.backward(out.square().mean())
    return {"out": out}


@on_ranks(2)
def test_gradients_pass_a_frozen_module():
    run = Run(nn.Linear(WIDTH, WIDTH).requires_grad_(False))
    for number in range(2):
        run.check(train, rows(7, number))


@module_of(lambda: {"scale": nn.Parameter(torch.ones(WIDTH))})
def Turning(self, x, far):
    return far(x * self.scale).tanh()


@module_of(lambda: {"shared": nn.Linear(WIDTH, WIDTH), "here": Turning(), "one": Calls()})
def Nested(self, x):
    """``one`` on the other rank calls ``here``, which calls ``shared`` on the other rank."""
    for _ in range(2):
        x = self.shared(self.one(x, self.here, self.shared)).tanh()
    return x


@module_of(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def Calls(self, x, here, shared):
    return here(self.linear(x), shared)


@on_ranks(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_terms_of_calls_in_calls_are_summed_in_the_order_of_one_process(schedule):
    run = Run(Nested(), ("far.one", "far.shared"), pipeline=schedule)
    for number in range(3):
        run.check(train, rows(60, number))


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_module_with_buffers_passes_it_again(reentrant):
    """What is computed again waits for no turn: its microbatch has had it."""

    def step(model, x):
        y = checkpoint(model.module.far, model.module.near(x), use_reentrant=reentrant)
        model.backward(y.square().mean())
        return {"y": y}

    run = Run(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    for number in range(2):
        run.check(step, rows(7, number))


@module_of(lambda: {"linear": nn.Linear(WIDTH, WIDTH), "dropout": nn.Dropout(0.3)})
def Active(self, x):
    """Notes how many of its activations there are at each call, each kept by its graph."""
    inner = self.dropout(self.linear(x))
    ACTIVATIONS.append(weakref.ref(inner))
    ALIVE.append(sum(activation() is not None for activation in ACTIVATIONS))
    NUMBERS.append(_core.requests())
    return inner.square()


ACTIVATIONS: list[weakref.ref] = []
ALIVE: list[int] = []
NUMBERS: list[int | None] = []  # of the requests, by which gradients are added up


def each(far, x, again):
    for _ in range(4):
        x = again(far, x)
    return x


def among_others(far, x, again):
    """Gradients of one weight from calls of both kinds are added up in one order."""
    x = again(lambda x: torch.tanh(far(torch.sin(far(x)))), far(x))
    return far(x) + again(far, x)


def nested(far, x, again):
    return again(lambda x: torch.sin(again(far, far(x))), x)


def unused(far, x, again):
    return again(lambda x: (far(2 * x), far(x)), x)[1]


def with_late_calls(far, x, again):
    """Without early stop the last call is made again, too, though nothing needs it."""
    return again(lambda x: far(x) + far(2 * x).detach(), x)


@on_ranks(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", [each, among_others, nested, unused, with_late_calls])
def test_a_checkpoint_around_calls_keeps_none_of_their_graphs(way, reentrant, schedule):
    def step(model, x):
        again = partial(checkpoint, use_reentrant=reentrant)
        y = way(model.module.far, model.module.near(x), again)
        model.backward(y.square().mean())
        return {"y": y}

    run = Run(Active(), pipeline=schedule, microbatches=2, active_microbatches=2)
    # The process has one such setting: not within a step, where microbatches take turns.
    with set_checkpoint_early_stop(way is not with_late_calls):
        for number in range(2):
            run.check(step, rows(6, number))
        for notes in (ACTIVATIONS, ALIVE, NUMBERS):
            notes.clear()
        smp.step(step)(run.model, rows(6))

    if smp.pp_rank() == 1:
        assert way is not each or (len(ALIVE) == 16 and max(ALIVE) <= 2)
        assert way is not each or reentrant or sorted(NUMBERS) == sorted([1, 2, 3, 4] * 4)
        assert not any(activation() is not None for activation in ACTIVATIONS)


@module_of(
    lambda kept: {
        "linear": nn.Linear(WIDTH, WIDTH),
        "kept": kept,
        "results": [],
        "alive": [],
    }
)
def NotesResults(self, x):
    """Notes how many of its results are still there, each ``kept`` by its graph or not."""
    self.alive.append(sum(result() is not None for result in self.results))
    y = self.linear(x)
    self.results.append(weakref.ref(y))
    return y.square().sum() if self.kept else y


@on_ranks(2)
def test_a_call_whose_result_is_dropped_keeps_no_graph_on_the_other_rank():
    def step(model, x):
        for _ in range(8):
            model.module.far(x)
        model.backward(model.module.far(x))
        return {}

    run = Run(NotesResults(kept=True), microbatches=1, active_microbatches=1)
    far = run.model.module.far
    for _ in range(2):
        far.alive.clear()
        smp.step(step)(run.model, rows(2))

    if smp.pp_rank() == 1:
        assert len(far.alive) == 9 and max(far.alive) <= 1


@on_ranks(2)
def test_a_result_does_not_stay_on_the_rank_that_sent_it():
    def step(model, x):
        for _ in range(4):
            x = model.module.far(x)
        model.backward(x.square().sum())
        return {"x": x}

    run = Run(NotesResults(kept=False), microbatches=1, active_microbatches=1)
    run.check(step, rows(2))
    if smp.pp_rank() == 1:
        assert len(run.model.module.far.alive) >= 4 and max(run.model.module.far.alive) == 0


class Repeats(nn.Module):
    """Uses its weight several times, now and then so that each use is a term of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) / 3)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x, uses, computed_again):
        for _ in range(uses):
            x = checkpoint(self.one, x, use_reentrant=True) if computed_again else self.one(x)
        return x

    def one(self, x):
        return torch.tanh(x @ self.weight + self.bias)


@on_ranks(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(2))
def test_gradients_add_up_over_steps_with_other_numbers_of_terms(schedule, seed):
    """``.grad`` is kept: each step adds to it, however often a microbatch uses a parameter."""
    rng = random.Random(seed)
    run = Run(Repeats(), pipeline=schedule)

    for number in range(8):
        plans = [
            [(rng.randrange(1, 4), rng.random() < 0.5) for _ in range(rng.randrange(3))]
            for _ in range(3)
        ]

        def step(model, x, which, plans=plans):
            x = model.module.near(x)
            for uses, computed_again in plans[int(which[0])]:
                x = model.module.far(x, uses, computed_again)
            model.backward(x.square().sum())
            return {"x": x}

        run.check(step, rows(6, number), torch.arange(3).repeat_interleave(2))


@on_ranks(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_request_may_give_more_terms_than_in_the_steps_before(schedule):
    """The first time they come late: the sum is right within rounding, and then to the bit."""
    run = Run(Repeats(), pipeline=schedule)

    for number, computed_again in enumerate([False, False, True, True, False]):

        def step(model, x, computed_again=computed_again):
            x = model.module.far(model.module.near(x), 3, computed_again)
            model.backward(x.square().sum())
            return {"x": x}

        run.check(step, rows(6, number), bits=number != 2)


# ---------------------------------------------------------------------------- hooks


@module_of(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def Scaled(self, x, *more, scale=1.0, offset=None):
    y = self.linear(x) * scale
    for each in more:
        y = y + each
    return y if offset is None else y + offset


@on_ranks(2)
@pytest.mark.parametrize("bare", [False, True], ids=["after others", "alone"])
def test_a_pre_hook_with_kwargs_replaces_the_arguments(bare):
    """On the module's rank; the next hook and the forward get what it returns."""

    def scale(module, args, kwargs):
        assert kwargs == {"scale": 2.0} or bare
        x, *more = args
        return (x * module.linear.weight.mean(), *more, x), {"offset": x.mean(), "scale": 3.0}

    far = Scaled()
    if not bare:
        far.register_forward_pre_hook(lambda module, args: args[0] + 1)
        far.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    far.register_forward_pre_hook(scale, with_kwargs=True)
    if not bare:
        far.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))

    def step(model, x):
        net = model.module
        out = net.far(net.near(x), **({} if bare else {"scale": 2.0}))
        model.backward(out.square().mean())
        return {"out": out}

    Run(far).check(step, rows(7))


@on_ranks(2)
@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "with keywords"])
def test_a_forward_hook_sees_what_a_pre_hook_made_of_the_arguments(keyword):
    """On the caller's rank; what it does with that reaches the pre-hook's graph."""

    def shifted(module, args):
        return (args[0] * module.linear.weight.mean(), *args[1:])

    def with_offset(module, args, kwargs):
        return args, {"offset": args[0].mean() * 3}

    def after(module, args, output):
        return output * args[0].square().mean() + args[1].mean()

    def after_keywords(module, args, kwargs, output):
        return output * kwargs["offset"]

    far = Scaled()
    far.register_forward_pre_hook(shifted)
    far.register_forward_hook(after)
    if keyword:
        far.register_forward_pre_hook(with_offset, with_kwargs=True)
        far.register_forward_hook(after_keywords, with_kwargs=True)

    def step(model, x):
        net = model.module
        near = net.near(x)
        out = net.far(near, near + 1)
        model.backward(out.square().mean())
        return {"out": out}

    Run(far).check(step, rows(7))


def doubled(module, args):
    """Replaces the arguments by what hangs on a parameter of the module's."""
    return (args[0] * module.linear.weight.mean() * 2, *args[1:])


@on_ranks(2)
@pytest.mark.sample(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "with keywords"])
@pytest.mark.parametrize("replaces", [False, True])
def test_a_full_backward_hook_sees_the_gradients_of_what_a_pre_hook_made(
    replaces, keyword, schedule
):
    """... of the arguments, and may replace them before they reach the pre-hook's graph."""
    far = Scaled()
    seen: list[tuple] = []

    def after(module, grad_input, grad_output):
        seen.append((_core.current(), *grad_input, *grad_output))
        return (grad_input[0] * 3, *grad_input[1:]) if replaces else None

    far.register_full_backward_hook(after)
    far.register_forward_pre_hook(doubled)
    far.register_forward_pre_hook(lambda module, args: None)
    if keyword:
        far.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {"offset": args[0].mean() * 3}),
            with_kwargs=True,
        )
    far.register_forward_hook(lambda module, args, output: output * args[0].mean())

    def step(model, x):
        near = model.module.near(x)
        out = model.module.far(near, near + 1)
        model.backward(out.square().mean())
        return {"out": out}

    run = Run(far, pipeline=schedule)
    got = smp.step(step)(run.model, rows(7))
    mine, seen[:] = {here: values for here, *values in seen}, []
    outputs = without_any_loop(step, run.plain, rows(7))
    assert_close(dict(enumerate(got["out"].outputs)), dict(enumerate(outputs)), relative=1e-12)
    assert len(mine) == (0 if smp.pp_rank() else 3)
    for microbatch, values in mine.items():
        _, *expected = seen[microbatch]
        assert_close(dict(enumerate(values)), dict(enumerate(expected)), relative=1e-12)
    assert_close(gradients(run.model), gradients(run.plain), relative=1e-12)


class Plain:
    """What a step function gets for the model; microbatches count by their samples."""

    def __init__(self, module, share):
        self.module, self.share = module, share

    def backward(self, loss):
        (loss * self.share).backward()


def without_any_loop(step, net, x) -> list[torch.Tensor]:
    """The outputs of torch's own calls: the plain loop runs pre-hooks inside of the others."""
    parts = x.tensor_split(3)
    return [step(Plain(net, len(part) / len(x)), part)["out"].detach() for part in parts]


class Normed(nn.Module):
    """Its weight has a norm that is a parameter: as torch.nn.utils.weight_norm does it, a
    pre-hook makes it of parameters for the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(()))
        self.direction = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_forward_pre_hook(make_weight)

    def forward(self, x):
        return x @ self.weight


def make_weight(module, args):
    module.weight = module.norm * module.direction / module.direction.norm()
    return (args[0] + 1,)


@on_ranks(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_pre_hook_sets_is_its_microbatchs_beside_a_full_backward_hook(schedule):
    far = Normed()
    far.register_full_backward_hook(lambda module, grad_input, grad_output: None)

    def step(model, x):
        out = model.module.far(model.module.near(x))
        out = model.module.far(out)
        model.backward(out.square().mean())
        return {"out": out}

    run = Run(far, pipeline=schedule)
    for seed in range(2):
        smp.step(step)(run.model, rows(7, seed))
        without_any_loop(step, run.plain, rows(7, seed))
        assert_close(gradients(run.model), gradients(run.plain), relative=1e-12)


@on_ranks(2)
def test_a_full_backward_hook_beside_a_pre_hook_that_replaces_is_refused_at_a_gate():
    """Microbatches pass a module that changes its buffers in order, one call each."""

    class Counting(Scaled):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    far = Counting()
    far.register_full_backward_hook(lambda *args: None)
    far.register_forward_pre_hook(lambda module, args: None)

    run = Run(far)
    run.check(train, rows(7))
    run.model.module.far.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    with pytest.raises(NotImplementedError, match="module 'far', on pp_rank 1, has a full"):
        smp.step(train)(run.model, rows(7))


@on_ranks(2)
@pytest.mark.parametrize(
    "ranks", [(0, 1), (1,), (0,)], ids=["on all ranks", "on its own", "on the other"]
)
@pytest.mark.parametrize("late", ["", "after the partition", "on a new one"])
def test_a_hook_on_a_parameters_sum_is_refused(ranks, late):
    run = Run(nn.Linear(WIDTH, WIDTH))
    if late:
        run.check(train, rows(7))
    if late == "on a new one":
        for net in (run.model.module, run.cut, run.plain):
            net.far.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=net.near.weight.dtype))
    if smp.pp_rank() in ranks:
        weight = run.model.module.far.weight
        handle = weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(NotImplementedError, match="parameter 'far.weight' has a register_post"):
        smp.step(train)(run.model, rows(7))
    if smp.pp_rank() in ranks:
        handle.remove()
    if late:
        run.check(train, rows(7))


def refused(*args):
    raise AssertionError("a hook of a module whose forward was called alone")


@on_ranks(2)
def test_forward_called_alone_runs_no_hook():
    far = nn.Linear(WIDTH, WIDTH)
    far.register_forward_pre_hook(refused)
    far.register_forward_hook(refused)
    far.register_full_backward_hook(refused)

    def step(model, x):
        out = model.module.far.forward(model.module.near(x))
        model.backward(out.square().mean())
        return {"out": out}

    Run(far).check(step, rows(7))


IN_A_RUN = ("far.0", "far.1", "far.2")  # of a Sequential, which is called as one


def hooked(place: str) -> tuple[nn.Module, Scaled, tuple]:
    """What is far, the module in it that gets the hooks, and what is on pp_rank 1."""
    module = Scaled()
    if place == "a module":
        return module, module, ("far",)
    far = nn.Sequential(nn.Linear(WIDTH, WIDTH), module, nn.Linear(WIDTH, WIDTH))
    return far, module, IN_A_RUN


def train_hooked(model, x):
    net = model.module
    more = () if isinstance(net.far, nn.Sequential) else (net.near(x + 1), x.detach())
    out = net.far(net.near(x), *more, **({"scale": 2.0} if more else {}))
    model.backward(out.square().mean())
    return {"out": out}


@on_ranks(2)
@pytest.mark.parametrize("place", ["a module", "a child among others"])
@pytest.mark.parametrize("which", ["both", "after", "before"])
@pytest.mark.parametrize("replaces", [False, True])
def test_full_backward_hooks_see_each_microbatch_once(place, which, replaces):
    """On the caller's rank, with the gradients of one process, which they may replace."""
    far, module, there = hooked(place)
    seen: list[tuple] = []

    def before(module, grad_output):
        seen.append(("before", _core.current(), *grad_output))
        return (grad_output[0] * 2,) if replaces else None

    def after(module, grad_input, grad_output):
        seen.append(("after", _core.current(), *grad_input, *grad_output))
        return (grad_input[0] * 3, *grad_input[1:]) if replaces else None

    if which != "after":
        module.register_full_backward_pre_hook(before)
    if which != "before":
        module.register_full_backward_hook(after)

    run = Run(far, there)
    smp.step(train_hooked)(run.model, rows(7))
    mine, seen[:] = seen[:], []
    plain_loop(train_hooked, run.plain, (rows(7),), **run.options)

    got = {(name, here): values for name, here, *values in mine}
    each = len(seen) // 3
    want = {(name, i // each): values for i, (name, _, *values) in enumerate(seen)}
    assert len(mine) == len(got) == (0 if smp.pp_rank() else len(want))
    for key, values in got.items():
        assert_close(dict(enumerate(values)), dict(enumerate(want[key])), relative=1e-12)
    assert_close(gradients(run.model), gradients(run.plain), relative=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("place", ["a module", "a child among others"])
def test_forward_hooks_run_on_the_caller_and_replace_the_output(place):
    """With the arguments and keywords of the call; the next one gets what one returns."""
    far, module, there = hooked(place)
    seen: list[tuple] = []

    def second(module, args, kwargs, output):
        seen.append((smp.pp_rank(), len(args), kwargs, output.requires_grad))
        return output + args[0]

    module.register_forward_hook(lambda module, args, output: output * 2)
    module.register_forward_hook(lambda module, args, output: None)
    module.register_forward_hook(second, with_kwargs=True)

    run = Run(far, there)
    run.check(train_hooked, rows(7))
    seen.clear()
    smp.step(train_hooked)(run.model, rows(7))

    given = (3, {"scale": 2.0}) if place == "a module" else (1, {})
    assert seen == [(0, *given, True)] * (0 if smp.pp_rank() else 3)


class Picky(nn.Linear):
    def forward(self, x, limit=10.0):
        if x.max() > limit:
            raise ValueError("too large")
        return super().forward(x)


@module_of(lambda: {"near": nn.Linear(WIDTH, WIDTH), "far": Picky(WIDTH, WIDTH)})
def Catching(self, x):
    """A far module's exception is its caller's to catch."""
    x = self.near(x)
    try:
        return self.far(100 + x * 0, limit=50.0)
    except ValueError:
        return self.far(x * 0, limit=50.0)


@on_ranks(2)
def test_forward_hooks_that_are_always_called_hear_of_a_forward_that_fails():
    smp.init({"pipeline_parallel_degree": 2})
    torch.manual_seed(0)
    net = Catching()
    plain = copy.deepcopy(net)
    heard: list = []

    def refuses(module, args, output):
        if output is None:
            raise KeyError("of the hook")

    for far in (net.far, plain.far):
        mine: list = []
        heard.append(mine)
        far.register_forward_hook(lambda *call, mine=mine: mine.append("never"))
        far.register_forward_hook(
            lambda module, args, kwargs, output, mine=mine: mine.append(
                (kwargs, None if output is None else output.shape)
            ),
            with_kwargs=True,
            always_call=True,
        )
        far.register_forward_hook(refuses, always_call=True)
    model = distributed(net, {"": 0, "far": 1})
    step = smp.step(lambda model, x: model(x))
    with torch.no_grad(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        step(model, torch.ones(2, WIDTH))  # traced
        heard[0].clear(), warned.clear()
        step(model, torch.ones(2, WIDTH))
    with torch.no_grad(), pytest.warns(UserWarning, match="of the hook"):
        plain(torch.ones(2, WIDTH))

    want = [({"limit": 50.0}, None), "never", ({"limit": 50.0}, (2, WIDTH))]
    assert heard[1] == want
    assert heard[0] == (want if smp.pp_rank() == 0 else [])
    assert sum("of the hook" in str(w.message) for w in warned) == (smp.pp_rank() == 0)


@module_of(lambda: {"far": nn.Linear(WIDTH, WIDTH)})
def Retrying(self, x):
    try:
        return self.far(x)
    except ValueError:
        return self.far(x * 0)


@on_ranks(2)
def test_a_hook_that_is_always_called_and_raises_is_called_once():
    smp.init({"pipeline_parallel_degree": 2})
    net = Retrying()
    plain = copy.deepcopy(net)
    calls: list[list] = [[], []]

    for far, mine in zip((net.far, plain.far), calls, strict=True):

        def refuses(module, args, output, mine=mine):
            mine.append(output is None)
            if args[0].any():
                raise ValueError("of the hook")

        far.register_forward_hook(refuses, always_call=True)
    model = distributed(net, {"": 0, "far": 1})
    step = smp.step(lambda model, x: model(x))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, torch.ones(2, WIDTH))  # traced
        calls[0].clear()
        step(model, torch.ones(2, WIDTH))
        plain(torch.ones(2, WIDTH))

    assert calls[1] == [False, False]
    assert calls[0] == (calls[1] if smp.pp_rank() == 0 else [])


_noted: ContextVar[list] = ContextVar("noted")


@module_of(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def Notes(self, x):
    _noted.get().append((smp.pp_rank(), int(x[0, 0])))
    return self.linear(x)


@on_ranks(2)
def test_a_list_that_a_context_variable_has_from_outside_stays_on_its_rank():
    """One that the step sets goes with the call, and is as before when it is over."""
    outside: list = []
    token = _noted.set(outside)
    given: dict[int, list] = {}

    def step(model, x):
        near, far = model.module.near, model.module.far
        assert _noted.get() is outside
        outside.append((smp.pp_rank(), int(x[0, 0])))
        y = far(x)
        inside = [len(outside)]
        inner = _noted.set(inside)
        far(x + 10)
        assert _noted.get() is inside
        _noted.reset(inner)
        assert _noted.get() is outside
        given[int(x[0, 0])] = inside[1:]
        far(x + 20)
        model.backward(near(y).sum())
        return {"y": y}

    try:
        run = Run(Notes())
        x = torch.arange(3.0, dtype=torch.float64)[:, None].expand(3, WIDTH)
        smp.step(step)(run.model, x)  # is traced first, on one rank
        for _ in range(2):
            outside.clear()
            given.clear()
            smp.step(step)(run.model, x)
            assert _noted.get() is outside
            if smp.pp_rank() == 0:
                assert sorted(outside) == [(0, i) for i in range(3)]
                assert given == {i: [(1, i + 10)] for i in range(3)}
            else:
                assert sorted(outside) == [(1, i + j) for j in (0, 20) for i in range(3)]
    finally:
        _noted.reset(token)


_dial: ContextVar[int] = ContextVar("dial")


@module_of(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def Dialled(self, x):
    return self.linear(x) * _dial.get()


@on_ranks(2)
def test_modules_see_the_context_variables_of_this_step():
    """... on every rank, as the script has set them there since the last one."""

    def step(model, x):
        y = model.module.far(model.module.near(x)) * _dial.get()
        model.backward(y.sum())
        return {"y": y, "dial": torch.tensor(float(_dial.get()))}

    token = _dial.set(2)
    try:
        run = Run(Dialled())
        for value in (2, 3, 5):
            _dial.set(value)
            run.check(step, rows(6, value))
    finally:
        _dial.reset(token)


# ------------------------------------------------------- modules that own nothing, and parts


class Doubles(nn.Module):
    """Has nothing that a rank could own."""

    ran_on: list[int] = []  # pp_ranks

    def forward(self, x):
        self.ran_on.append(smp.pp_rank())
        return 2 * x


@module_of(lambda doubles: {"linear": nn.Linear(WIDTH, WIDTH), "doubles": doubles})
def Doubled(self, x):
    return self.doubles(self.linear(x))


@module_of(
    lambda doubles: {
        "far": Doubled(doubles),
        "near": Doubled(doubles),
        "last": nn.Sequential(nn.Linear(WIDTH, WIDTH), doubles, nn.Dropout(0.0)),
    }
)
def ByBoth(self, x):
    """``doubles`` is first found in ``far``; ``near`` and this module call it, too."""
    return self.near.doubles(self.last(self.near(self.far(x))))


def equals_a_plain_run(net: nn.Module, there: tuple[str, ...]) -> None:
    """Two steps with smp, the modules of these paths on pp_rank 1, and without."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    plain = copy.deepcopy(net)
    model = distributed(net, {"": 0, "near": 0} | dict.fromkeys(there, 1))
    for seed in range(2):
        losses = smp.step(mean_square)(model, rows(4, seed)).outputs
        for part, loss in zip(rows(4, seed).split(2), losses, strict=True):
            want = plain(part).square().mean()
            (want / 2).backward()
            assert torch.allclose(loss, want, rtol=1e-12)
    assert_close(gradients(model), gradients(plain), relative=1e-12)
    owners = {model.get_module_partition(path) for path in there}
    assert owners == {1}


@on_ranks(2)
@pytest.mark.parametrize("there", [("far",), ("far", "last"), ("far", "last.0")])
def test_a_module_that_owns_nothing_runs_where_it_is_called(there):
    """It is nobody's: a model that is not distributed may have it, too."""
    doubles = Doubles()
    Doubles.ran_on.clear()
    equals_a_plain_run(ByBoth(doubles).double(), there)
    assert set(Doubles.ran_on) == {smp.pp_rank()}
    assert type(doubles) is Doubles
    assert doubles(1) == Doubled(doubles).doubles(1) == 2


@on_ranks(2)
@pytest.mark.parametrize("owner", [0, 1])
def test_a_module_that_owns_nothing_stays_where_it_is_pinned(owner):
    """... the user's word."""
    doubles = Doubles()
    net = ByBoth(doubles).double()
    smp.set_partition(doubles, owner)
    Doubles.ran_on.clear()
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    smp.step(mean_square)(distributed(net, {"far": 1, "near": 0}), rows(4))
    calls = 4 * 2  # of two microbatches; pp_rank 0 has traced one more
    assert len(Doubles.ran_on) == (calls if smp.pp_rank() == owner else 0) + (
        4 if smp.pp_rank() == 0 else 0
    )


class InParts(nn.Module):
    """Slices of a Sequential, and one that has a child twice."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        twice = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Sequential(twice, nn.Tanh(), twice, nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        assert len(self.parts[1:]) == 3
        return self.again(self.parts[2:](self.parts[:2](x)))


@module_of(lambda: {"near": nn.Linear(WIDTH, WIDTH), "far": InParts()})
def HasParts(self, x):
    return self.near(self.far(x)) + self.far.parts[-1:](x)


@on_ranks(2)
@pytest.mark.parametrize(
    "there",
    [
        ("far",),
        ("far.parts",),
        ("far.parts.1", "far.parts.2"),
        ("far.again",),
        ("far.again.0",),
        ("far.again.3", "far.parts.3"),
    ],
    ids=" ".join,
)
def test_parts_of_a_sequential_and_a_child_that_it_has_twice(there):
    equals_a_plain_run(HasParts().double(), there)


def test_children_of_one_rank_that_follow_each_other_are_one_entry():
    """Named by the first and the last."""
    net = nn.ModuleDict({"body": nn.Sequential(*map(nn.Linear, [1] * 6, [1] * 6))})
    body = net["body"].extend([nn.Tanh(), nn.Tanh()])
    named = dict(net.named_modules())
    rank_of = dict(zip(named, [0, 0, 0, 1, 1, 1, 0, 1, 2, 2], strict=True))
    entries, runs = remote_modules.make_entries(net, rank_of, None)

    first, count = entries[: len(named)], len(named)
    assert [(e.path, e.owner, e.module) for e in first] == [
        (path, rank_of[path], module) for path, module in named.items()
    ]
    assert [(e.path, e.owner, e.module) for e in entries[count:]] == [
        ("body.1 to 3", 1, None),
        ("body.5", 1, None),
        ("body.6 to 7", 2, None),
    ]
    x = torch.ones(1, 1)
    assert torch.equal(entries[count].callable(x), body[1:4](x))
    # Those that own nothing run where they are called.
    children, cuts = list(body), [0, 1, 4, 5, 6, 8]
    parts = [children[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    assert runs == {"body": list(zip([None, count, None, count + 1, None], parts, strict=True))}
    vars(body)[marks.RUNS] = []
    remote_modules.number_runs(named, runs, 5)
    assert [number for number, _ in vars(body)[marks.RUNS]] == [
        None, count + 5, None, count + 6, None,
    ]  # fmt: skip


def test_a_hook_of_any_kind_or_a_pin_is_something_to_own():
    assert remote_modules.runs_where_called(nn.Tanh())
    assert not remote_modules.runs_where_called(nn.BatchNorm1d(2, affine=False))
    for kind in (
        "forward_pre_hook",
        "forward_hook",
        "full_backward_hook",
        "full_backward_pre_hook",
    ):
        hooked = nn.Tanh()
        getattr(hooked, f"register_{kind}")(refused)
        assert not remote_modules.runs_where_called(hooked), kind
    pinned = nn.Tanh()
    smp.set_partition(pinned, 0)
    assert not remote_modules.runs_where_called(pinned)


@module_of(lambda how: {"near": nn.Linear(WIDTH, WIDTH), "far": Slopes(how)})
def HasSlopes(self, x):
    """``far`` needs gradients inside its forward."""
    return self.far(self.near(x))


@module_of(
    lambda how: {
        "how": how,
        "inner": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        "outer": nn.Linear(WIDTH, WIDTH),
    }
)
def Slopes(self, x):
    if self.how == "jacrev":
        return self.outer(torch.func.jacrev(lambda v: self.inner(v).square().sum())(x))
    x = x if x.requires_grad else x.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(self.inner(x).square().sum(), x, create_graph=True)
    return self.outer(slopes)


@on_ranks(2)
@pytest.mark.parametrize("how", ["autograd.grad", "jacrev"])
def test_a_module_may_differentiate_what_is_on_its_rank(how):
    equals_a_plain_run(HasSlopes(how).double(), ("far",))


@on_ranks(2)
def test_modules_called_inside_a_transform_of_torch_func_are_beside_their_caller():
    """Its tensors cannot leave the rank; without pins the partition sees to that."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = Slopes("jacrev").double()
    smp.set_partition(net.outer, 0)  # so that the other rank would have the rest
    plain = copy.deepcopy(net)
    model = smp.DistributedModel(net)
    smp.step(mean_square)(model, rows(4, 0))
    plain(rows(4, 0)).square().mean().backward()
    assert_close(gradients(model), gradients(plain), relative=1e-12)
    assert model.get_module_partition("inner.0") == 0


@module_of(lambda: {"parts": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))})
def InThreads(self, x):
    """Runs its children side by side."""
    with ThreadPoolExecutor(3) as pool:
        return sum(pool.map(lambda part: part(x), self.parts))


@module_of(lambda: {"near": nn.Linear(WIDTH, WIDTH), "far": InThreads()})
def HasThreads(self, x):
    return self.near(self.far(self.near(x)))


@on_ranks(2)
def test_a_module_may_run_what_is_on_its_rank_in_threads_of_its_own():
    equals_a_plain_run(HasThreads().double(), ("far",))


@on_ranks(2)
def test_a_call_of_another_rank_by_a_thread_of_the_script_says_so():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = HasThreads().double()
    smp.set_partition(net.far, 0)
    smp.set_partition(net.far.parts[1], 1)
    with pytest.raises(RuntimeError, match=r"'far.parts.1' runs on pp_rank 1 .* by a thread"):
        smp.step(mean_square)(smp.DistributedModel(net), rows(4))


@on_ranks(2)
def test_an_argument_that_cannot_go_keeps_the_kind_of_its_error():
    run = Run(Scaled())
    given: list = [0.0]

    def step(model, x):
        out = model.module.far(model.module.near(x), *given)
        model.backward(out.square().mean())
        return {"out": out}

    run.check(step, rows(7))
    deep: list = []
    for _ in range(300):
        deep = [deep]
    for wrong, error, said in (
        (deep, RecursionError, "nested deeper than 200"),
        (torch.zeros([1] * 65), ValueError, "65 dimensions"),
    ):
        given[:] = [wrong]
        told = f"an argument of module 'far' cannot go to pp_rank 1: .*{said}"
        with pytest.raises(error, match=told):
            smp.step(step)(run.model, rows(7))
    given[:] = [0.0]
    run.check(step, rows(7))


NOT_PLAIN = {
    "sparse": (lambda far, y: far(y.to_sparse()), "layout torch.sparse_coo .*to_dense"),
    "rows": (lambda far, y: far(y.to_sparse_csr()), "layout torch.sparse_csr"),
    "nested": (
        lambda far, y: far(torch.nested.nested_tensor([y, y[:1]], layout=torch.jagged)),
        "a nested tensor",
    ),
    "nested, strided": (
        lambda far, y: far(torch.nested.nested_tensor([y, y[:1]])),
        "a nested tensor .*to_padded_tensor",
    ),
    "vmap": (lambda far, y: torch.vmap(far)(y), "a transform of torch.func"),
    "quantized": (
        lambda far, y: far(torch.quantize_per_tensor(y.float(), 0.1, 0, torch.qint8)),
        "quantized .*dequantize",
    ),
}


@on_ranks(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_a_tensor_that_cannot_be_sent_is_named(kind):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1, "skip_tracing": True})
    net = Pair(nn.Linear(WIDTH, WIDTH)).double()
    model = distributed(net, {"near": 0, "far": 1})
    call, said = NOT_PLAIN[kind]

    @smp.step
    def step(model, x):
        call(model.module.far, model.module.near(x).detach())

    with pytest.raises(TypeError, match=f"module 'far' cannot go to pp_rank 1: .*{said}"):
        step(model, rows(3))


class Keeps(nn.Module):
    """Its buffer grows, in place or not, or is sparse."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        eye = torch.eye(WIDTH, dtype=torch.float64)
        self.register_buffer("kept", eye.to_sparse() if kind == "sparse" else eye)

    def forward(self, x):
        row = x.detach().mean(0, keepdim=True)
        if self.kind == "resized":
            self.kept.resize_(len(self.kept) + 1, WIDTH)
            self.kept[-1:] = row
        elif self.kind == "replaced":
            self.kept = torch.cat([self.kept, row])
        else:
            return self.linear((self.kept @ x.T).T)
        return self.linear(x) * self.kept.sum(0)


@module_of(lambda kind: {"near": Keeps(kind), "far": Keeps(kind)})
def HasKept(self, x):
    return self.far(self.near(x))


@on_ranks(2)
@pytest.mark.parametrize("kind", ["resized", "replaced", "sparse"])
def test_buffers_may_grow_or_be_sparse(kind):
    """... in the traced run, which leaves no mark, and in steps that fail."""
    net = HasKept(kind).double()
    equals_a_plain_run(net, ("far",))
    module = net.far if smp.pp_rank() == 1 else net.near
    before = module.kept.to_dense().clone()
    bad = rows(4)
    bad[-1] = float("nan")

    @smp.step
    def step(model, x):
        model(x)
        assert not x.isnan().any()

    with pytest.raises(AssertionError):
        step(smp.state.model, bad)
    assert torch.equal(module.kept.to_dense(), before)
    assert len(before) == WIDTH + (4 if kind in ("resized", "replaced") else 0)


# ------------------------------------------------------------ modules of a kind of their own


@module_of(lambda middle: {"near": nn.Linear(WIDTH, WIDTH), "far": middle})
def Middle(self, x):
    return self.far(self.near(x))


def prepared_for_quantization() -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    module.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    return torch.ao.quantization.prepare_qat(module.train())


@on_ranks(2)
@pytest.mark.filterwarnings("ignore")
def test_a_module_prepared_for_quantization_aware_training():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
    net = Middle(prepared_for_quantization())
    plain = copy.deepcopy(net)
    model = distributed(net, partition_by_path(net, {"far": 1}))
    for seed in range(2):
        x = rows(4, seed).float()
        (loss,) = smp.step(mean_square)(model, x).outputs
        want = plain(x).square().mean()
        want.backward()
        assert torch.allclose(loss, want)
    assert_close(gradients(model), gradients(plain), relative=1e-6)


@pytest.mark.parametrize("within", [False, True])
@on_ranks(2)
@pytest.mark.filterwarnings("ignore")
def test_a_script_module_is_refused_by_its_path(within):
    smp.init({"pipeline_parallel_degree": 2})
    scripted = torch.jit.script(nn.Linear(WIDTH, WIDTH))
    far, path = (nn.Sequential(scripted), "far.0") if within else (scripted, "far")
    model = smp.DistributedModel(Middle(far).double())
    said = rf"'{path}' is a torch.jit.ScriptModule .Linear"
    with pytest.raises(NotImplementedError, match=said):
        smp.step(mean_square)(model, rows(4))
