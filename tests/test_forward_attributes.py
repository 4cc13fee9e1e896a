"""An attribute that a remote module sets in its forward, read elsewhere: an error that says
who has it, or in the other rank's own time a warning."""

import warnings

import pytest
import torch
from torch import nn

import smp
from tests.ranks import on_ranks


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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.near, self.child = nn.Linear(3, 3), Child()
        self.reads, self.sets = "", None

    def forward(self, x):
        if self.sets is not None:
            self.child.aux = self.sets
        y = self.child(self.near(x))
        y = y + (self.child.kept == "as it was")
        if self.reads:
            y = y + torch.as_tensor(getattr(self.child, self.reads))
        return y


@smp.step
def step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


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
    said = f"'child.{name}' is set in the forward of its module, on pp_rank 1, and was read"
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
    with pytest.raises(RuntimeError, match="'child.aux' is set in the forward of its module"):
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
        assert ["child.aux' is set" in texts[0], "child.late' is set" in texts[1]] == [True] * 2
        assert len(texts) == 2
        net.child.aux = 3
        del net.child.aux
        with pytest.raises(AttributeError):
            del net.child.aux
    else:
        assert texts == []
