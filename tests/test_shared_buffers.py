"""Buffers that change and that several modules have or use: these sit on one rank."""

import copy
import warnings

import pytest
import torch
from torch import nn

import smp
from tests.models.modules import module_of
from tests.models.partition import distributed
from tests.models.steps import mean_square
from tests.ranks import on_ranks


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self, buffer=None):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("seen", torch.zeros(1) if buffer is None else buffer)

    def forward(self, x):
        self.seen += 1
        return torch.tanh(self.linear(x)) * self.seen.clone()


class Net(nn.Module):
    """Two of them, whose buffers ``what`` connects; the first is alone with the root."""

    def __init__(self, what):
        super().__init__()
        self.first = Counting()
        self.second = Counting(self.first.seen if what == "shared" else None)
        self.what = what

    def forward(self, x):
        x = self.second(self.first(x))
        if self.what == "read":
            x = x * self.second.seen.clone()
        elif self.what == "written":
            self.second.seen.mul_(2)
        elif self.what == "set":
            self.second.seen = torch.full((1,), 0.5)
        return x


step = smp.step(mean_square)


def init():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})


def trained_as_plain(net, wrap=smp.DistributedModel) -> smp.DistributedModel:
    """The model after steps; their losses, and its state, are the plain module's."""
    plain = copy.deepcopy(net)
    model = wrap(net)
    x = torch.randn(4, 64)
    for _ in range(3):
        got, want = step(model, x).reduce_mean(), plain(x).square().mean()
        torch.testing.assert_close(got, want.detach())
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    return model


@on_ranks(2)
@pytest.mark.parametrize("what", ["apart", "shared", "read", "written", "set"])
def test_what_changes_it_is_on_one_rank(what):
    init()
    net = Net(what)
    model = trained_as_plain(net)

    ranks = [model.get_module_partition(m) for m in (net, net.first, net.second)]
    if what == "apart":
        assert ranks[1] != ranks[2]
    elif what == "shared":
        assert ranks[1] == ranks[2]
    else:
        assert ranks[0] == ranks[2]


@on_ranks(2)
def test_modules_that_share_one_cannot_be_pinned_apart():
    init()
    net = Net("shared")
    model = distributed(net, {"second": 1, "first": 0})
    with pytest.raises(smp.PartitionError, match=r"share the buffer '(first|second)\.seen'"):
        step(model, torch.randn(4, 64))


def pinned_apart(net) -> smp.DistributedModel:
    return distributed(net, {"": 0, "second": 1})


@on_ranks(2)
@pytest.mark.parametrize("what", ["read", "written"])
def test_a_module_that_uses_one_and_is_pinned_apart_is_an_error(what):
    init()
    model = pinned_apart(Net(what))
    told = r"needs the data of buffer 'second.seen' \(shape \(1,\)\), .* on pp_rank 1"
    with pytest.raises(RuntimeError, match=told):
        step(model, torch.randn(4, 64))


class Set(Net):
    """Sets its child's buffer before the call, without a look at it."""

    def forward(self, x):
        x = self.first(x)
        self.second.seen = torch.full((1,), 0.5)
        return self.second(x)


@on_ranks(2)
def test_what_sets_one_is_on_its_rank_or_is_an_error():
    init()
    net = Set("apart")
    model = trained_as_plain(net)
    assert model.get_module_partition(net) == model.get_module_partition(net.second)


@on_ranks(2)
@pytest.mark.parametrize("made", [Net, Set])
def test_what_sets_one_and_is_pinned_apart_is_an_error(made):
    init()
    model = pinned_apart(made("set" if made is Net else "apart"))
    told = "buffer 'second.seen', of a module on pp_rank 1, is set in a step by code on"
    with pytest.raises(RuntimeError, match=told):
        step(model, torch.randn(4, 64))


@on_ranks(2)
def test_the_script_sets_one_between_steps():
    init()
    net = Net("apart")
    plain = copy.deepcopy(net)
    model = pinned_apart(net)
    x = torch.randn(4, 64)
    for value in (0.5, 3.0):
        got, want = step(model, x).reduce_mean(), plain(x).square().mean()
        torch.testing.assert_close(got, want.detach())
        for one in (net, plain):
            one.second.seen = torch.full((1,), value)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


class Keeping(nn.Module):
    """Adds to a buffer, in place or by another one; and gives what it is called with."""

    def __init__(self, how):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("kept", torch.zeros(64))
        self.register_buffer("fixed", torch.full((64,), 0.5), persistent=False)
        self.how = how

    def forward(self, x, kept=None, fixed=None, *, of=None):
        if kept is not None:
            x = x * kept["it"].exp() + fixed
            assert of is None or of[0] is self.kept
        mean = x.detach().mean(0)
        if self.how == "in place":
            self.kept += mean
        else:
            self.kept = self.kept + mean
        return torch.tanh(self.linear(x))


@module_of(lambda how, to: {"first": Keeping(how), "second": Keeping(how), "to": to})
def Passing(self, x):
    """Passes its children's buffers on, and never looks at one that changes."""
    x = self.second(self.first(x))
    its = self.second.kept
    assert its.shape == (64,) and its.dtype == x.dtype and its.dim() == 1
    if self.to == "its module":
        return self.second(x, {"it": its}, self.second.fixed, of=[its])
    return self.second(x, {"it": self.first.kept}, self.first.fixed)


@on_ranks(2)
@pytest.mark.parametrize("how", ["in place", "another"])
@pytest.mark.parametrize("to", ["its module", "another"])
def test_one_that_is_passed_on_is_its_modules_own(how, to):
    init()
    trained_as_plain(Passing(how, to), pinned_apart)


@on_ranks(2)
def test_between_steps_the_script_sets_one_and_is_told_when_it_reads_another_ranks():
    init()
    net = Passing("in place", "its module")
    plain = copy.deepcopy(net)
    model = pinned_apart(net)
    x = torch.randn(4, 64)
    for _ in range(2):
        got, want = step(model, x).reduce_mean(), plain(x).square().mean()
        torch.testing.assert_close(got, want.detach())
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # to set it takes no look at its value
            for one in (net, plain):
                one.second.kept.fill_(0.25)
                one.second.kept[3:] = 1
                one.second.kept.data.mul_(2)
    if smp.pp_rank() == 0:
        with pytest.warns(UserWarning, match="'second.kept' is changed by .* on pp_rank 1"):
            net.second.kept.sum()
    model.double()
    plain.double()
    model.load_state_dict(plain.state_dict())
    got, want = step(model, x.double()).reduce_mean(), plain(x.double()).square().mean()
    torch.testing.assert_close(got, want.detach())
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


class Removing(Keeping):
    """Takes its buffer out when it is told to."""

    def __init__(self):
        super().__init__("in place")
        self.removes = False

    def forward(self, x, kept=None):
        if self.removes and kept is None:
            del self.kept
            return torch.tanh(self.linear(x))
        return super().forward(x)


@module_of(lambda: {"first": nn.Linear(64, 64), "second": Removing()})
def GivesBack(self, x):
    x = self.second(self.first(x))
    return self.second(x, self.second.kept)


@on_ranks(2)
def test_one_that_is_passed_on_when_its_module_has_removed_it_is_named():
    init()
    net = GivesBack()
    model = pinned_apart(net)
    step(model, torch.randn(4, 64))
    net.second.removes = True
    told = "an argument is the buffer 'kept', which its module has removed"
    with pytest.raises(AttributeError, match=told):
        step(model, torch.randn(4, 64))
