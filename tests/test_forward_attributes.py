"""An attribute that a remote module sets in its forward, read elsewhere: an error that says
who has it, or in the other rank's own time a warning."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import smp
from smp.modules import microbatch_attributes, remote_modules, stand_ins
from smp.pytorch import contents
from smp.runtime import forward_attributes
from tests.models.modules import in_backward, module_of
from tests.models.partition import distributed
from tests.models.steps import mean_square
from tests.ranks import on_ranks
from tests.reference.compare import assert_close, gradients


class Child(nn.Module):
    """Sets attributes of several kinds, and leaves others as they were."""

    calls = 0  # of the class

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.aux, self.kept, self.scale = None, "as it was", 1.0

    def forward(self, x):
        self.kept = "as it " + "was"
        self.calls += 1
        self.aux = x.square().mean()
        self.late = 3
        return self.linear(x) * self.scale


@module_of(lambda: {"near": nn.Linear(3, 3), "child": Child(), "reads": "", "sets": None})
def Net(self, x):
    if self.sets is not None:
        self.child.aux = self.sets
    y = self.child(self.near(x))
    y = y + (self.child.kept == "as it was")
    if self.reads:
        y = y + torch.as_tensor(getattr(self.child, self.reads))
    return y


step = smp.step(mean_square)


def made(owner: int) -> Net:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = Net()
    smp.set_partition(net, 0)
    smp.set_partition(net.child, owner)
    return net


X = torch.ones(4, 3)


@on_ranks(2)
@pytest.mark.parametrize("name", ["aux", "calls", "late"])
def test_its_parent_cannot_read_it(name):
    net = made(owner=1)
    model = smp.DistributedModel(net)
    step(model, X)
    net.reads = name
    said = f"'child.{name}' changes when its module runs, on pp_rank 1, and was read"
    with pytest.raises(RuntimeError, match=said):
        step(model, X)
    net.reads = "scale"  # which its forward does not set
    step(model, X)


@on_ranks(2)
@pytest.mark.parametrize("name", ["aux", "calls", "late"])
def test_it_is_read_where_both_are_on_one_rank(name):
    net = made(owner=0)
    smp.set_partition(net.near, 1)
    net.reads = name
    model = smp.DistributedModel(net)
    for _ in range(2):
        step(model, X)


@on_ranks(2)
def test_a_parent_reads_what_it_has_set_itself():
    net = made(owner=1)
    net.reads, net.sets = "aux", 0.5
    model = smp.DistributedModel(net)
    for _ in range(2):
        step(model, X)
    net.sets = None
    with pytest.raises(RuntimeError, match="'child.aux' changes when its module runs"):
        step(model, X)


@on_ranks(2)
def test_between_steps_it_is_a_warning():
    net = made(owner=1)
    model = smp.DistributedModel(net)
    step(model, X)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            assert (net.child.aux is None) == (smp.pp_rank() == 0)
            assert hasattr(net.child, "late") == (smp.pp_rank() == 1)
    child = type(net.child)
    assert child.calls == 0 and not hasattr(child, "late")
    texts = [str(each.message) for each in said]
    if smp.pp_rank() == 0:
        assert ["child.aux' changes" in texts[0], "child.late' changes" in texts[1]] == [
            True
        ] * 2
        assert len(texts) == 2
        net.child.aux = 3
        del net.child.aux
        with pytest.raises(AttributeError):
            del net.child.aux
    else:
        assert texts == []


class Scaled(nn.Module):
    """Keeps from its forward what its part of the backward needs."""

    scale = 1.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        self.scale = 1 + float(x.detach().mean().abs())
        return self.again(x)

    def again(self, x):
        return torch.tanh(self.linear(x)) * self.scale


class Rerun(torch.autograd.Function):
    """Keeps inputs alone; the backward runs the layers again."""

    @staticmethod
    def forward(ctx, x, layers):
        inputs = []
        for layer in layers:
            inputs.append(x)
            x = layer(x)
        ctx.layers = layers
        ctx.save_for_backward(*inputs)
        return x

    @staticmethod
    def backward(ctx, grad):
        for layer, x in zip(ctx.layers[::-1], ctx.saved_tensors[::-1], strict=True):
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                out = layer.again(x)
            out.backward(grad)
            grad = x.grad
        return grad, None


@module_of(lambda: {"layers": nn.ModuleList(Scaled() for _ in range(3))})
def Reversible(self, x):
    return Rerun.apply(x, self.layers)


@module_of(
    lambda: {"first": nn.Linear(16, 16), "middle": Reversible(), "last": nn.Linear(16, 16)}
)
def WithReversible(self, x):
    return self.last(self.middle(self.first(x)))


@on_ranks(2)
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_layers_that_an_autograd_function_runs_again_read_what_their_microbatch_set(rank):
    """... and sit together, where nothing is pinned."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4})
    net = WithReversible().double()
    plain = copy.deepcopy(net)
    model = distributed(net, {} if rank is None else {"": 0, "middle": rank})
    for _ in range(2):
        x = torch.randn(8, 16, dtype=torch.float64)
        got = step(model, x).reduce_mean()
        want = sum(square_of(plain, part) for part in x.chunk(4)) / 4
        torch.testing.assert_close(got, want, atol=1e-10, rtol=0)
    assert_close(gradients(model), gradients(plain), relative=1e-12)
    assert len({model.get_module_partition(m) for m in net.middle.modules()}) == 1
    assert type(copy.deepcopy(plain.middle.layers[0])) is Scaled


def square_of(plain, x):
    loss = plain(x).square().mean()
    (loss / 4).backward()
    return loss.detach()


@on_ranks(2)
def test_layers_that_an_autograd_function_runs_again_and_are_pinned_apart_are_an_error():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = WithReversible()
    model = distributed(net, {"": 0, "middle.layers.1": 1})
    told = r"'middle.layers.1.scale' changes when its module runs, on pp_rank 1"
    with pytest.raises(RuntimeError, match=told):
        step(model, torch.randn(4, 16))


@module_of(lambda: {"weight": nn.Parameter(torch.ones(())), "notes": True, "factor": 0.0})
def Noted(self, x):
    """Multiplies by what it has noted, or was given."""
    if self.notes and not torch.is_grad_enabled():
        self.factor = x.detach().mean()
    return self.weight * self.factor * x


class Again(torch.autograd.Function):
    """Calls its module again in the backward, as reversible layers do."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = ctx.module(x)
        y.backward(gradient)
        return x.grad, None


@module_of(lambda: {"first": nn.Linear(3, 3), "noted": Noted()})
def CallsAgain(self, x):
    return Again.apply(self.first(x), self.noted)


@on_ranks(2)
@pytest.mark.parametrize("owner", [0, 1])
def test_what_a_step_has_noted_for_its_backward_is_its_own(owner):
    """A later step whose forward notes nothing reads what the script has set."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = CallsAgain().double()
    plain = copy.deepcopy(net)
    model = distributed(net, {"": owner, "first": 1 - owner})
    x = torch.arange(12, dtype=torch.float64).view(4, 3)

    for notes in (True, False):
        for module in (net, plain):
            module.noted.notes = notes
            if not notes:
                module.noted.factor = 5.0
            module.zero_grad()
        step(model, x)
        for part in x.chunk(2):
            (plain(part).square().mean() / 2).backward()
        assert_close(gradients(model), gradients(plain), relative=1e-12)


class CountsPasses(nn.Module):
    def __init__(self, reads):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.reads, self.passes = reads, 0

    def passed(self):
        self.passes += 1
        return self.passes

    def forward(self, x):
        if self.reads and self.passes > 5:
            return x
        return self.second(in_backward(self.first(x), lambda g: g * self.passed()))


@on_ranks(2)
@pytest.mark.parametrize("reads", [False, True])
def test_an_attribute_that_only_backwards_set_is_the_modules(reads):
    """... and one that a later microbatch's forward has read before is refused."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4})
    net = CountsPasses(reads).double()
    plain = copy.deepcopy(net)
    model = distributed(net, {"": 0, "second": 1})
    x = torch.arange(24, dtype=torch.float64).view(8, 3)
    if reads:
        with pytest.raises(RuntimeError, match="'passes' on pp_rank 0 is set in microbatch"):
            for _ in range(2):
                step(model, x)
        return
    for _ in range(2):
        step(model, x)
        for part in x.chunk(4):
            (plain(part).square().mean() / 4).backward()
    if smp.rank() == 0:
        assert net.passes == plain.passes == 8
    assert_close(gradients(model), gradients(plain), relative=1e-12)


class Counts:
    """A plain object with fields."""

    def __init__(self):
        self.of = 0
        self.inner = [{"calls": 0}]


@module_of(
    lambda: {
        "linear": nn.Linear(3, 3),
        "losses": [],
        "stats": {},
        "seen": set(),
        "nested": {"aux": ([], "more")},
        "cache": torch.zeros(3),
        "counts": Counts(),
        "deep": [Counts()],
        "table": np.zeros((4, 3)),
        "names": np.array([None, None]),
    }
)
def Collects(self, x):
    """Puts what it sees in containers, without setting an attribute."""
    self.losses.append(x.mean())
    self.stats["mean"] = x.mean()
    self.seen.add(x.size(0))
    self.nested["aux"][0].append(x.mean())
    self.cache[:] = x.detach().mean(0)
    self.counts.of += 1
    self.deep[0].inner[0]["calls"] += 1
    self.table[1:, ::2] += 1
    self.names[1] = f"{x.size(0)} of them"
    return self.linear(x)


@module_of(lambda use: {"near": nn.Linear(3, 3), "child": Collects(), "use": use})
def Collecting(self, x):
    y = self.child(self.near(x))
    return y if self.use is None else y + self.use(self.child)


USES = {
    "losses": lambda child: child.losses[-1],
    "stats": lambda child: child.stats.get("mean", 0.0),
    "seen": lambda child: len(child.seen),
    "nested": lambda child: child.nested["aux"][0][-1],
    "cache": lambda child: child.cache.sum(),
    "counts": lambda child: child.counts.of,
    "deep": lambda child: child.deep[0].inner[0]["calls"],
    "table": lambda child: child.table.sum(),
    "names": lambda child: len(child.names),
}
FLAT = ["losses", "stats", "seen"]


def collecting(use, owner: int, made: type = Collecting) -> smp.DistributedModel:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = made(use)
    return distributed(net, {"": 0, "child": owner})


def check_steps(model: smp.DistributedModel, refused: str = "") -> None:
    """Two steps, of which the first refuses to read that attribute of the child's."""
    if refused:
        told = f"'child.{refused}' changes when .* was read here"
        with pytest.raises(RuntimeError, match=told):
            step(model, torch.ones(4, 3))
        return
    for _ in range(2):
        step(model, torch.ones(4, 3))


@on_ranks(2)
@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("name", USES)
def test_what_a_module_put_in_its_containers_is_read_on_its_own_rank_alone(name, owner):
    check_steps(collecting(USES[name], owner), refused=name if owner else "")


class Emptying(Collecting):
    """Gives its child new containers; reads them after the call, or before it."""

    def forward(self, x):
        self.child.losses, self.child.stats, self.child.seen = [], {}, set()
        if not self.after:
            assert not self.use(self.child)
        y = self.child(self.near(x))
        return y + self.use(self.child) if self.after else y


@on_ranks(2)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("name", FLAT)
def test_containers_that_a_parent_has_set_are_its_own_until_the_call(name, owner, after):
    use = {**USES, "losses": lambda child: sum(child.losses)}[name]
    model = collecting(use, owner, Emptying)
    model.module.after = after
    check_steps(model, refused=name if owner and after else "")


class EmptiesAgain(Collecting):
    def forward(self, x):
        self.child.losses = []
        y = self.child(self.near(x))
        self.child.losses = [x.sum()]
        assert torch.equal(sum(self.child.losses), x.sum())
        return y + sum(self.child.losses)


@on_ranks(2)
@pytest.mark.parametrize("owner", [0, 1])
def test_what_a_parent_sets_again_after_the_call_is_its_own_again(owner):
    check_steps(collecting(None, owner, EmptiesAgain))


def puts_in(child):
    child.stats["from its parent"] = 1
    return 0


@on_ranks(2)
def test_what_a_parent_puts_into_a_container_of_its_child_is_an_error():
    check_steps(collecting(puts_in, 1), refused="stats")


class SetsAndReads(Collecting):
    """Gives its child a tensor, which that writes into, and reads it again."""

    def forward(self, x):
        self.child.cache = torch.ones(3)
        y = self.child(self.near(x))
        return y + self.child.cache


@on_ranks(2)
@pytest.mark.parametrize("owner", [0, 1])
def test_a_tensor_that_a_parent_has_set_is_its_own_until_the_call(owner):
    check_steps(collecting(None, owner, SetsAndReads), refused="cache" if owner else "")


@on_ranks(2)
def test_what_no_forward_changes_is_read_anywhere():
    """... also after the tracing run, which wrote into nothing of it."""

    class Still(Collects):
        def forward(self, x):
            assert self.cache.sum() == len(self.losses) == self.counts.of == self.table.sum()
            return self.linear(x)

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = Collecting(lambda child: sum(use(child) for use in (USES[n] for n in QUIET)))
    net.child = Still()
    check_steps(distributed(net, {"": 0, "child": 1}))


QUIET = ["stats", "seen", "cache", "counts", "deep", "table", "names"]


def test_contents_are_compared_as_deep_as_they_can_change():
    def made():
        ring: list = [1]
        ring.append(ring)
        tensor = torch.zeros(2)
        kept = [tensor, {"a": (Counts(), [np.zeros(3)])}, {1, 2}, "text", ring, nn.Linear(1, 1)]
        kept += [np.zeros(6)[::2], np.array([[1], "b"], object)]
        return kept, tensor

    def of_a(kept):
        return kept[1]["a"]

    alterations = [
        lambda kept, tensor: tensor.add_(1),
        lambda kept, tensor: setattr(of_a(kept)[0], "of", 2),
        lambda kept, tensor: of_a(kept)[0].inner[0].update(more=1),
        lambda kept, tensor: of_a(kept)[1][0].__setitem__(1, 5),
        lambda kept, tensor: kept[2].add(3),
        lambda kept, tensor: kept[4].append(2),
        lambda kept, tensor: kept[1].update(b=kept[1].pop("a")),
        lambda kept, tensor: kept[6].__setitem__(1, 5),
        lambda kept, tensor: kept[7][0].append(2),
        lambda kept, tensor: kept[7].__setitem__(1, "c"),
        lambda kept, tensor: kept.reverse(),
    ]
    for alter in alterations:
        kept, tensor = made()
        before = contents.content_of(kept)
        assert contents.is_the_same(before, contents.content_of(kept))
        alter(kept, tensor)
        assert not contents.is_the_same(before, contents.content_of(kept))


def test_a_look_at_contents_comes_to_an_end():
    value = {"many": [[i] for i in range(100_000)], "last": [1]}
    before = contents.content_of(value)
    for count, alter in enumerate([value["many"][-1], value["last"], value["many"][0]]):
        alter.append(1)
        seen = not contents.is_the_same(before, contents.content_of(value))
        assert seen == (count == 2)
    before = contents.content_of(value)
    value["many"].append(1)
    assert not contents.is_the_same(before, contents.content_of(value))


@pytest.mark.parametrize(
    ("value", "can"),
    [
        ([], True),
        ((1, 2), False),
        ((1, []), True),
        (torch.zeros(1), True),
        (nn.Parameter(torch.zeros(1)), False),
        (np.zeros(1), True),
        (Counts(), True),
        (nn.Linear(1, 1), False),
        (len, False),
        (1.5, False),
        (None, False),
    ],
)
def test_what_can_change(value, can):
    assert contents.can_change(value) == can


@module_of(lambda: {"linear": nn.Linear(3, 3), "options": {"scale": 1.0}})
def OnlyReads(self, x):
    return self.linear(x) * self.options["scale"]


@module_of(lambda: {"child": OnlyReads()})
def Alters(self, x):
    self.child.options["scale"] += 1.0
    return self.child(x)


@on_ranks(2)
def test_also_one_that_the_child_only_reads():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    check_steps(distributed(Alters(), {"": 0, "child": 1}), refused="options")


class Gathers(nn.Module):
    """Its layers share its list."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Collects(), Collects()])
        self.losses = self.layers[0].losses = self.layers[1].losses = []

    def forward(self, x):
        self.losses.clear()
        for layer in self.layers:
            x = layer(x)
        return x + sum(self.losses)


@on_ranks(2)
def test_a_list_that_modules_on_several_ranks_share_is_named():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = Gathers()
    model = distributed(net, {"": 0, "layers.1": 1})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(model, torch.ones(4, 3))
    told = [str(one.message) for one in said if "are one list" in str(one.message)]
    assert len(told) == (smp.pp_rank() == 0)
    assert not told or "'layers.1.losses' and 'losses' are one list" in told[0]


def test_what_each_of_two_models_sets_is_watched_on_a_module_of_both():
    child = nn.Linear(1, 1)
    child.__class__ = stand_ins.stand_in(nn.Linear, remote_modules.remote)
    for name in ("late", "aux"):
        forward_attributes.watch(nn.Sequential(child), {"0": (name,)})
    kind = forward_attributes._SetElsewhere
    watched = {name for name, value in vars(type(child)).items() if isinstance(value, kind)}
    assert watched == {"aux", "late"}


class WithDefault(nn.Module):
    """Its class has a value for the attribute that its forward sets."""

    aux = 1


@pytest.mark.parametrize(
    "members",
    [
        forward_attributes.remote_with(("aux", "late")),
        microbatch_attributes.own_of_microbatch(("aux", "late")),
    ],
    ids=["remote", "local"],
)
def test_an_attribute_that_is_watched_is_set_and_deleted_as_any_other(members):
    """Beside the default that its class has, and without one."""
    module = WithDefault()
    module.__class__ = stand_ins.stand_in(WithDefault, members)

    assert type(module).aux == module.aux == 1 and not hasattr(type(module), "late")
    for name, default in (("aux", 1), ("late", None)):
        assert getattr(module, name, None) == default
        setattr(module, name, 2)
        assert getattr(module, name) == vars(module)[name] == 2
        delattr(module, name)
        assert getattr(module, name, None) == default and name not in vars(module)
        with pytest.raises(AttributeError, match=name):
            delattr(module, name)
    with pytest.raises(AttributeError, match="'WithDefault' object has no attribute 'late'"):
        module.late  # noqa: B018
