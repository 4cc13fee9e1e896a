"""Modules of another rank whose outputs do not depend on all of their arguments.

What comes before such an argument must see no backward, as in one process: no hook is called,
no function runs, and a reentrant checkpoint leaves its parameters without a gradient.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import smp
from tests.models.modules import in_backward, module_of
from tests.models.partition import distributed
from tests.ranks import on_ranks
from tests.reference.whole_job import in_float64

log: list[str] = []


def noted(x: Tensor, name: str) -> Tensor:
    """The same; its backward writes down that it ran."""
    return in_backward(x, lambda g: log.append(f"{name} {g.sum().item():.10f}"))


@module_of(lambda: {"linear": nn.Linear(6, 6)})
def Inner(self, x: Tensor, y: Tensor, way: str) -> Tensor | tuple[Tensor, Tensor]:
    """It depends on its second argument, and on its first when it is told so."""
    if way == "detached":
        return self.linear(x.detach()) + y
    if way == "only detached":
        return self.linear(x.detach() + y.detach())
    if way == "left out":
        return y
    if way == "returned":
        return y, self.linear(x.detach())
    if way == "overwritten":
        x.copy_(self.linear(y))
        return x * 2
    return self.linear(x) + y


@module_of(lambda: {"inner": Inner(), "linear": nn.Linear(6, 6)})
def Middle(self, x: Tensor, y: Tensor, way: str) -> Tensor:
    """Between the ranks: what it calls is its caller's rank's again."""
    out = self.inner(noted(self.linear(x), "in the middle"), y, way)
    return out if isinstance(out, Tensor) else sum(out)


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.remote = kind()

    def forward(self, x: Tensor, way: str) -> Tensor:
        y = noted(self.second(x), "y")
        y.register_hook(lambda g: log.append(f"hook of y {'none' if g is None else g.sum()}"))
        x = checkpoint(self.first, x * self.third(x), use_reentrant=True)
        x = noted(x, "x")
        x.register_hook(lambda g: log.append(f"hook of x {'none' if g is None else g.sum()}"))
        out = self.remote(x, y, way)
        return out if isinstance(out, Tensor) else sum(out)


def gradients_of(named) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in named}


def train_alike(kind: type[nn.Module], pins: dict[str, int], ways: list[str]) -> None:
    """Step after step, each in its way, beside the plain model."""
    in_float64(0)
    plain = Net(kind)
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": 2,
            "auto_partition": False,
            "default_partition": 0,
            "active_microbatches": 1,
        }
    )
    net = copy.deepcopy(plain)
    model = distributed(net, pins)
    x = torch.randn(4, 6)

    @smp.step
    def step(model: nn.Module, x: Tensor, way: str) -> None:
        model.backward(model(x, way).square().mean())

    for way in ways:
        plain.zero_grad()
        log.clear()
        for part in x.chunk(2):
            (plain(part, way).square().mean() / 2).backward()
        wanted, lines = gradients_of(plain.named_parameters()), sorted(log)
        net.zero_grad()
        log.clear()
        step(model, x, way)

        logs = smp.allgather(log, smp.PP_GROUP)
        assert sorted(line for seen in logs for line in seen) == lines, way
        got = gradients_of(model.local_named_parameters())
        assert got
        for name, gradient in got.items():
            assert (gradient is None) == (wanted[name] is None), (way, name)
            if gradient is not None:
                torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "way", ["detached", "only detached", "left out", "returned", "overwritten", "used"]
)
@on_ranks(2)
def test_nothing_runs_before_an_argument_that_is_not_reached(way):
    train_alike(Inner, {"remote": 1}, [way] * 2)


@pytest.mark.parametrize("way", ["detached", "left out", "used"])
@on_ranks(2)
def test_nor_behind_a_module_that_hands_it_on(way):
    train_alike(Middle, {"remote": 1, "remote.inner": 0}, [way] * 2)


@on_ranks(2)
def test_each_call_says_what_it_reaches():
    ways = ["left out", "used", "detached", "used", "only detached"]
    train_alike(Inner, {"remote": 1}, ways)


@module_of(lambda: {"linear": nn.Linear(3, 3)})
def Many(self, xs: list[Tensor]) -> Tensor:
    """Its result depends on every third of its arguments."""
    return self.linear(sum(xs[::3]))


@module_of(
    lambda: {"scales": nn.ParameterList(torch.randn(3) for _ in range(70)), "remote": Many()}
)
def OfMany(self, x: Tensor) -> Tensor:
    return self.remote([x * scale for scale in self.scales])


@on_ranks(2)
def test_more_arguments_than_a_word_has_bits():
    torch.manual_seed(0)
    plain = OfMany().double()
    smp.init({"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0})
    net = copy.deepcopy(plain)
    model = distributed(net, {"remote": 1})
    x = torch.randn(4, 3).double()

    @smp.step
    def step(model: nn.Module, x: Tensor) -> None:
        model.backward(model(x).square().mean())

    plain(x).square().mean().backward()
    step(model, x)

    wanted = gradients_of(plain.named_parameters())
    for name, gradient in gradients_of(model.local_named_parameters()).items():
        if wanted[name] is None:
            assert gradient is None, name
        else:
            torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-12)
