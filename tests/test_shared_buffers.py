"""Buffers that change and that several modules have or use: these sit on one rank."""

import copy

import pytest
import torch
from torch import nn

import smp
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
        return x


@smp.step
def step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def init():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})


@on_ranks(2)
@pytest.mark.parametrize("what", ["apart", "shared", "read", "written"])
def test_what_changes_it_is_on_one_rank(what):
    init()
    net = Net(what)
    plain = copy.deepcopy(net)
    model = smp.DistributedModel(net)
    x = torch.randn(4, 64)
    for _ in range(3):
        got, want = step(model, x).reduce_mean(), plain(x).square().mean()
        torch.testing.assert_close(got, want.detach())

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
    smp.set_partition(net.second, 1)
    smp.set_partition(net.first, 0)
    model = smp.DistributedModel(net)
    with pytest.raises(smp.PartitionError, match=r"share the buffer '(first|second)\.seen'"):
        step(model, torch.randn(4, 64))


@on_ranks(2)
def test_a_module_that_reads_one_and_is_pinned_apart_is_named():
    init()
    net = Net("read")
    smp.set_partition(net, 0)
    smp.set_partition(net.second, 1)
    model = smp.DistributedModel(net)
    if smp.pp_rank() == 0:
        with pytest.warns(UserWarning, match="module '' uses buffer 'second.seen'"):
            step(model, torch.randn(4, 64))
    else:
        step(model, torch.randn(4, 64))
