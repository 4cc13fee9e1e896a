"""An attribute that a remote module sets in its forward, read elsewhere: an error that says
who has it, or in the other rank's own time a warning."""

import copy
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


class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x):
        return Rerun.apply(x, self.layers)


class WithReversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 16), Reversible(), nn.Linear(16, 16)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


@smp.step
def square(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


@on_ranks(2)
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_layers_that_an_autograd_function_runs_again_read_what_their_microbatch_set(rank):
    """... and sit together, where nothing is pinned."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4})
    net = WithReversible().double()
    plain = copy.deepcopy(net)
    if rank is not None:
        smp.set_partition(net, 0)
        smp.set_partition(net.middle, rank)
    model = smp.DistributedModel(net)
    for _ in range(2):
        x = torch.randn(8, 16, dtype=torch.float64)
        got = square(model, x).reduce_mean()
        want = sum(square_of(plain, part) for part in x.chunk(4)) / 4
        torch.testing.assert_close(got, want, atol=1e-10, rtol=0)
    its = dict(plain.named_parameters())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, its[name].grad, atol=1e-10, rtol=0)
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
    smp.set_partition(net, 0)
    smp.set_partition(net.middle.layers[1], 1)
    model = smp.DistributedModel(net)
    told = r"'middle.layers.1.scale' is set in the forward of its module, on pp_rank 1"
    with pytest.raises(RuntimeError, match=told):
        square(model, torch.randn(4, 16))
