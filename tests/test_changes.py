"""What a step function, or a module's forward, changes on modules of other ranks: as in one
process, these have it when they run next."""

import copy
import types
import weakref

import pytest
import torch
from torch import nn

import smp
from smp.modules import travelling_changes
from tests.models.modules import module_of
from tests.models.partition import distributed, partition_by_path
from tests.models.steps import mean_square
from tests.ranks import on_ranks
from tests.reference.compare import assert_close, gradients

WIDTH = 4
FIRST = 1.5  # only the first step's batch begins with more
WHERE = [{"b": 1}, {"b": 1, "b.deep": 0}, {"b.deep": 1}, {"b": 1, "b.deep": 2}]


class Deep(nn.Module):
    """Each kind of state that a mode changes, and a plain attribute."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = 1.0
        self.seen = []

    def set_kind(self, kind):
        """As transformers' BigBird sets the type of its attention."""
        if kind not in ("plain", "double"):
            raise ValueError(kind)
        self.scale = {"plain": 1.0, "double": 2.0}[kind]

    def forward(self, x):
        self.seen.append((self.training, self.scale))
        return self.scale * torch.tanh(self.linear(self.norm(x)))


@module_of(lambda: {"linear": nn.Linear(WIDTH, WIDTH), "deep": Deep()})
def Block(self, x, scale=None):
    if scale is not None:
        self.deep.scale = scale
    return self.linear(self.deep(x))


@module_of(lambda: {"a": nn.Linear(WIDTH, WIDTH), "b": Block()})
def Net(self, x, scale=None):
    return self.b(self.a(x), scale)


def in_evaluation_for_a_call(model, x):
    block = model.module.b
    loss = block(x).square().mean()
    block.eval()
    loss = loss + model(x).square().mean()
    block.train()
    loss = loss + block(x).square().mean()
    model.backward(loss)
    return loss


def all_in_evaluation_for_a_call(model, x):
    model.eval()
    with torch.no_grad():
        kept = model(x)
    model.train()
    loss = (model(x) - kept).square().mean()
    model.backward(loss)
    return loss


def frozen_for_a_call(model, x):
    block = model.module.b
    block.requires_grad_(False)
    loss = model(x).square().mean()
    for parameter in block.parameters():
        parameter.requires_grad = True
    block.deep.linear.weight.requires_grad_(False)
    loss = loss + block(x).square().mean()
    block.deep.linear.weight.requires_grad_(True)
    model.backward(loss)
    return loss


def an_attribute_by_the_parent(model, x):
    loss = model(x, scale=2.0).square().mean() + model(x, scale=0.5).square().mean()
    model.backward(loss)
    return loss


def an_attribute_by_the_step(model, x):
    model.module.b.deep.scale = float(x[0, 0])  # each microbatch its own
    return mean_square(model, x)


def an_attribute_by_a_method(model, x):
    model.module.b.deep.set_kind("double")
    loss = model(x).square().mean()
    model.module.b.deep.set_kind("plain")
    loss = loss + model(x).square().mean()
    model.backward(loss)
    return loss


def left_as_it_is(model, x):
    loss = model(x).square().mean()
    model.module.b.deep.norm.eval()
    model.module.b.deep.scale = 3.0
    loss = loss + model(x).square().mean()
    model.module.b.deep.scale = 5.0
    model.backward(loss)
    return loss


def an_attribute_by_the_parent_once(model, x):
    """What the parent sets in one step is there in the next."""
    scale = 7.0 if x[0, 0] > FIRST else None
    loss = model(x, scale=scale).square().mean() + model(x).square().mean()
    model.backward(loss)
    return loss


STEPS = [
    in_evaluation_for_a_call,
    all_in_evaluation_for_a_call,
    frozen_for_a_call,
    an_attribute_by_the_parent,
    an_attribute_by_the_parent_once,
    an_attribute_by_the_step,
    an_attribute_by_a_method,
    left_as_it_is,
]

BY_THE_PARENT = [an_attribute_by_the_parent, an_attribute_by_the_parent_once]
LASTING = [an_attribute_by_the_parent_once, left_as_it_is]


class Plain:
    """What a step function gets for the model without smp."""

    def __init__(self, module, count):
        self.module, self.count = module, count

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def train(self, mode=True):
        self.module.train(mode)

    def eval(self):
        self.module.eval()

    def backward(self, loss):
        (loss / self.count).backward()


def equals_a_plain_loop(step, net: nn.Module, rank_of: dict[str, int], **config) -> None:
    """Outputs, gradients, statistics and attributes, also in the steps after."""
    smp.init({"pipeline_parallel_degree": 3, **config})
    plain = Plain(copy.deepcopy(net), config["microbatches"])
    model = distributed(net, partition_by_path(net, rank_of))
    for seed in range(3):
        x = torch.randn(6, WIDTH, dtype=torch.float64, generator=torch.manual_seed(seed))
        got = smp.step(step)(model, x).outputs
        want = [step(plain, part).detach() for part in x.chunk(config["microbatches"])]
        assert_close(dict(enumerate(got)), dict(enumerate(want)), relative=1e-12)
        assert_close(gradients(model), gradients(plain.module), relative=1e-12)
        buffers = dict(plain.module.named_buffers())
        statistics = {name: buffers[name] for name, _ in model.local_named_buffers()}
        assert_close(dict(model.local_named_buffers()), statistics, relative=1e-12)
        if model.get_module_partition("b.deep") == smp.pp_rank():
            for path, module in plain.module.b.deep.named_modules():
                assert net.b.deep.get_submodule(path).training == module.training
            if not step.__name__.startswith(
                "an_attribute_by_the_parent"
            ):  # whose rank keeps it
                assert net.b.deep.scale == plain.module.b.deep.scale
            seen = plain.module.b.deep.seen
            assert sorted(net.b.deep.seen[-len(seen) :]) == sorted(seen)


@pytest.mark.sample(10)
@on_ranks(3)
@pytest.mark.parametrize("rank_of", WHERE, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_what_a_step_changes_elsewhere_is_changed_when_it_runs(step, rank_of):
    spans = step is frozen_for_a_call and len(set(rank_of.values())) > 1
    pipeline = "simple" if spans else "interleaved"
    equals_a_plain_loop(step, Net().double(), rank_of, microbatches=1, pipeline=pipeline)


@on_ranks(3)
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
@pytest.mark.parametrize("step", [s for s in STEPS if s not in LASTING])
def test_each_microbatch_has_its_own_changes(step, pipeline):
    """... while others are under way; of a module that does not wait when it runs.  What one
    leaves changed, those that have begun do not see."""
    net = Net()
    net.b.deep.norm = nn.Identity()
    equals_a_plain_loop(step, net.double(), {"b": 1}, microbatches=2, pipeline=pipeline)


@on_ranks(2)
def test_parameters_are_not_frozen_under_a_call_that_waits():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = Net()
    model = distributed(net, partition_by_path(net, {"b": 1, "b.deep": 0}))

    def step(model, x):
        model.module.b.linear.requires_grad_(False)
        loss = model(x).square().mean()
        model.module.b.linear.requires_grad_(True)
        model.backward(loss)

    with pytest.raises(RuntimeError, match="whose module 'deep.*' is on another rank"):
        smp.step(step)(model, torch.randn(6, WIDTH))


class Freezing(nn.Module):
    """Changes what of its children requires grad, in its forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.requires_grad_("thaws" not in kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "freezes":
            self.b.requires_grad_(False)
        elif self.kind == "thaws":
            self.b.requires_grad_(True)
        elif self.kind == "freezes one":
            self.b.weight.requires_grad = False
        elif self.kind == "as data say":
            self.b.requires_grad_(bool(x[0, 0] > 0))
        elif self.kind == "freezes its own":
            self.a.requires_grad_(False)
        elif self.kind == "looks first" and self.b.weight.requires_grad:
            self.b.weight.requires_grad_(False)
        kept = 0.0
        if self.kind == "for a call":
            self.b.requires_grad_(False)
            kept = self.b(x)
            self.b.requires_grad_(True)
        elif self.kind == "its own for a call":
            self.a.requires_grad_(False)
            kept = self.b(self.a(x))
            self.a.requires_grad_(True)
        y = self.b(torch.tanh(self.a(x))) + kept
        if self.kind == "after the call":
            self.b.requires_grad_(False)
        return y


ELSEWHERE = ["freezes", "thaws", "freezes one", "as data say", "for a call", "after the call"]


@on_ranks(2)
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
@pytest.mark.parametrize("kind", ELSEWHERE)
def test_what_a_parents_forward_freezes_on_another_rank_is_frozen_as_in_one_process(
    kind, pipeline
):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 3, "pipeline": pipeline})
    net = Freezing(kind).double()
    plain = copy.deepcopy(net)
    model = distributed(net, {"": 0, "b": 1})
    for seed in range(3):
        x = torch.randn(6, WIDTH, dtype=torch.float64, generator=torch.manual_seed(seed))
        smp.step(squared)(model, x)
        for part in x.chunk(3):
            squared(Plain(plain, 3), part)
        assert_close(gradients(model), gradients(plain), relative=1e-12)
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            assert one.requires_grad is other.requires_grad
            one.grad = other.grad = None


def squared(model, x):
    loss = model(x).square().mean()
    if loss.requires_grad:
        model.backward(loss)
    return loss


@on_ranks(2)
@pytest.mark.parametrize(
    "kind, name", [("freezes its own", "a"), ("its own for a call", "a"), ("looks first", "b")]
)
def test_what_microbatches_would_freeze_for_one_another_is_refused_by_name(kind, name):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 3})
    net = Freezing(kind)
    model = distributed(net, {"": 0, "a": 0, "b": 1})
    told = rf"module '', on pp_rank 0, changes requires_grad of parameter '{name}.weight'"
    with pytest.raises(ValueError, match=told):
        smp.step(squared)(model, torch.randn(6, WIDTH))
    assert net.a.weight.requires_grad and net.b.weight.requires_grad


def a_module_in_a_step(model, x):
    model.module.b.deep.linear = nn.Linear(WIDTH, WIDTH)
    return mean_square(model, x)


def a_parameter_in_a_step(model, x):
    model.module.b.deep.linear.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    return mean_square(model, x)


@on_ranks(2)
def test_a_module_of_another_rank_gets_no_module_in_a_step():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = Net()
    model = distributed(net, {"b": 1, "a": 0})
    smp.step(left_as_it_is)(model, torch.randn(6, WIDTH))
    with pytest.raises(RuntimeError, match="Deep.linear is a Linear that is set in a step"):
        smp.step(a_module_in_a_step)(model, torch.randn(6, WIDTH))
    with pytest.raises(RuntimeError, match="weight is a Parameter that is set in a step"):
        smp.step(a_parameter_in_a_step)(model, torch.randn(6, WIDTH))


def deletes(model, x):
    if model.module.b.deep.scale == FIRST:
        del model.module.b.deep.scale
    return mean_square(model, x)


@on_ranks(2)
def test_an_attribute_of_a_module_of_another_rank_is_not_deleted_in_a_step():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = Net()
    model = distributed(net, {"b": 1, "a": 0})
    smp.step(deletes)(model, torch.randn(6, WIDTH))
    net.b.deep.scale = FIRST
    told = "attribute 'b.deep.scale', of a module on pp_rank 1, is deleted in a step"
    with pytest.raises(RuntimeError, match=told):
        smp.step(deletes)(model, torch.randn(6, WIDTH))
    assert net.b.deep.scale == FIRST
    net.b.deep.gone = 1
    del net.b.deep.gone
    assert not hasattr(net.b.deep, "gone")


@on_ranks(3)
def test_a_new_attribute_on_a_third_ranks_module_is_gone_after_the_request():
    """It travels by way of a rank that does not run the module either."""
    smp.init({"pipeline_parallel_degree": 3, "microbatches": 1})
    net = Net().double()
    model = distributed(net, {"": 0, "b": 1, "b.deep": 2})

    @smp.step
    def step(model, x):
        model.module.b.deep.note = "new"
        return mean_square(model, x)

    for _ in range(2):
        step(model, torch.randn(6, WIDTH, dtype=torch.float64))
    assert net.b.deep.note == "new"


@on_ranks(3)
def test_what_a_forward_leaves_there_is_the_last_microbatchs_until_the_script_sets_it():
    """The parent is on one rank, the child on another; the script runs on all."""
    config = {"pipeline_parallel_degree": 3, "microbatches": 3, "active_microbatches": 3}
    smp.init(config)
    net = Net()
    net.b.deep.norm = nn.Identity()  # which no microbatch has to wait for
    model = distributed(net, partition_by_path(net, {"b": 1, "b.deep": 2}))

    @smp.step
    def step(model, x):
        loss = model(x, scale=float(x[0, 0]) or None).square().mean()
        model.backward(loss)
        return loss

    def seen(first: float) -> list[float]:
        net.b.deep.seen.clear()
        x = torch.ones(3, WIDTH)
        x[:, 0] = torch.arange(3) + first if first else 0
        step(model, x)
        return sorted(scale for _, scale in net.b.deep.seen)

    owns = smp.pp_rank() == 2
    assert seen(4.0) == ([4.0, 5.0, 6.0] if owns else [])
    assert seen(0.0) == ([6.0] * 3 if owns else [])
    net.b.deep.scale = 2.0
    assert seen(0.0) == ([2.0] * 3 if owns else [])


@on_ranks(2)
@pytest.mark.parametrize("nested", [False, True])
def test_tensors_of_a_microbatch_are_not_for_the_next(nested):
    """They hang on a graph that is gone: what one microbatch leaves there, it keeps."""
    config = {"pipeline_parallel_degree": 2, "microbatches": 2, "active_microbatches": 1}
    smp.init({**config, "pipeline": "interleaved"})
    net = Net()
    model = distributed(net, partition_by_path(net, {"b": 1}))

    @smp.step
    def step(model, x):
        deep = model.module.b.deep
        loss = model(x).square().mean()
        if x[0, 0] == 0:
            deep.scale, deep.note = [{"by": loss}] if nested else loss, "a plain value"
        model.backward(loss)
        return loss

    x = torch.randn(6, WIDTH)
    x[0, 0], x[3, 0] = 0, 1
    for _ in range(2):
        step(model, x)
        if smp.pp_rank() == 1:
            assert net.b.deep.scale == 1.0 and net.b.deep.note == "a plain value"
            assert net.b.deep.seen == [(True, 1.0)] * len(net.b.deep.seen)


def test_what_the_code_of_a_request_sets_outlives_the_changes_that_it_brought():
    module = nn.Linear(2, 2)
    module.kept, module.changed = 1, 1
    brought = ((module, "kept", 2), (module, "changed", 2), (module, "new", 2))
    with travelling_changes.made(brought):
        assert (module.kept, module.changed, module.new) == (2, 2, 2)
        module.changed = 3
    assert (module.kept, module.changed, hasattr(module, "new")) == (1, 3, False)


@module_of(lambda: {"child": nn.Linear(3, 3), "last": nn.Linear(3, 3)})
def SetsOnItsChild(self, x):
    self.child.asked = True
    return self.last(self.child(x))


@pytest.fixture
def task(monkeypatch):
    """What says which microbatch's task runs here; None: the script does."""
    now: list[int | None] = [None]
    monkeypatch.setattr(
        travelling_changes, "_core", types.SimpleNamespace(current=lambda: now[0])
    )
    travelling_changes.forget()
    yield lambda microbatch: now.__setitem__(0, microbatch)
    travelling_changes.forget()


def sets(module: nn.Module | nn.Parameter, name: str, value: object) -> None:
    before = getattr(module, name, None)
    setattr(module, name, value)
    travelling_changes.note(module, name, value, before)


def test_what_travels_is_the_microbatchs_own_before_what_others_have_left(task):
    module = nn.Linear(1, 1)
    task(1)
    sets(module, "scale", 5)
    task(0)
    assert travelling_changes.travelling() == () and not travelling_changes.noted(
        module, "scale"
    )
    sets(module, "scale", 4)
    assert travelling_changes.travelling() == (
        (module, "scale", 4),
    ) and travelling_changes.noted(module, "scale")
    travelling_changes.finish()  # the last microbatch's counts, whichever was set last here
    task(2)
    assert travelling_changes.travelling() == (
        (module, "scale", 5),
    ) and travelling_changes.noted(module, "scale")
    sets(module, "scale", 4)  # as it is here
    assert travelling_changes.travelling() == ((module, "scale", 4),)
    travelling_changes.returned(2)
    assert travelling_changes.told() == ((module, "scale", 4),)
    assert travelling_changes.told() == travelling_changes.travelling() == ()


def test_what_can_change_is_ones_own_until_it_goes_with_a_call(task):
    """Then the module may have put something in it, on its own rank."""
    module = nn.Linear(1, 1)
    task(0)
    sets(module, "cache", [])
    sets(module, "scale", 2)
    assert travelling_changes.noted(module, "cache") and travelling_changes.noted(
        module, "scale"
    )
    travelling_changes.travelling()
    assert not travelling_changes.noted(module, "cache") and travelling_changes.noted(
        module, "scale"
    )
    sets(module, "cache", [])
    assert travelling_changes.noted(module, "cache")
    travelling_changes.returned(0)
    task(1)
    assert not travelling_changes.noted(module, "cache") and travelling_changes.noted(
        module, "scale"
    )
    task(None)
    sets(module, "scale", 3)  # by the script, on all ranks
    assert travelling_changes.told() == ((module, "cache", []),)


def test_of_models_that_are_gone_nothing_is_kept(task):
    here, gone = nn.Linear(1, 1), nn.Linear(1, 1)
    task(0)
    for module in (here, gone):
        sets(module, "scale", 2)
        sets(module.weight, "requires_grad", False)
    sets(here, "output", torch.ones(1))  # of a graph
    travelling_changes.finish()
    travelling_changes.forget_others([nn.Sequential(here)])
    assert travelling_changes.told() == (
        (here, "scale", 2),
        (here.weight, "requires_grad", False),
    )


@on_ranks(2)
def test_what_was_set_on_a_model_that_is_gone_does_not_travel():
    """Its modules have no number for the codec, and a kept change would keep them."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    gone = []
    for _ in range(3):
        net = nn.Sequential(nn.Linear(3, 3), SetsOnItsChild())
        model = distributed(net, {"0": 0, "1": 1, "1.child": 0, "1.last": 1})
        smp.step(lambda model, x: model(x).sum())(model, torch.ones(4, 3))
        gone.append(weakref.ref(net[1].child))
        del net, model
    assert gone[0]() is None
