"""``x.register_hook`` in modules: on what they are given and on what they return."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import smp
from smp.partitioning.tracing import trace
from tests.models.modules import module_of
from tests.ranks import on_ranks
from tests.reference.whole_job import in_float64

log: list[str] = []


def note(name: str, factor: float):
    def hook(gradient: Tensor) -> Tensor:
        log.append(f"{name} {gradient.sum().item():.10f}")
        return gradient * factor

    return hook


class Hooking(nn.Module):
    """It hooks its argument, its result, what is its own, or nothing."""

    def __init__(self, *what: str) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(6, 6), what

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if "argument" in self.what:
            x.register_hook(note("argument", 0.5))
        if "keyword" in self.what:
            scale.register_hook(note("keyword", 0.5))
        inner = self.linear(x)
        if "inner" in self.what:
            inner.register_hook(note("inner", 0.5))
        out = torch.tanh(inner) * (1 if scale is None else scale)
        if "result" in self.what:
            out.register_hook(note("result", 3.0))
        return out


class Net(nn.Module):
    """Its caller's hooks are behind the module's, and it uses what they have in common."""

    def __init__(self, *what: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.hooking = Hooking(*what)
        self.rest = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scale = x.square()
        y = self.hooking(x, scale=scale)
        y.register_hook(note("caller's", 0.25))
        return self.rest(y + x) + scale


class Deep(nn.Module):
    """The module that hooks is called by one in the middle."""

    def __init__(self, *what: str) -> None:
        super().__init__()
        self.before = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
        self.net = Net(*what)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.before(x))


WHAT = [("argument",), ("keyword",), ("result",), ("argument", "result"), ("inner",), ()]


@pytest.mark.parametrize("what", WHAT, ids=" ".join)
def test_the_traced_run_sees_who_hooks_what_its_caller_has_too(what):
    net = Net(*what)
    modules = trace(net, lambda: net(torch.randn(2, 6))).modules

    is_of_both = bool(what) and what != ("inner",)
    assert modules[""].hooking == (("hooking",) if is_of_both else ())
    assert all(seen.hooking == () for path, seen in modules.items() if path)


def test_torchs_own_tools_do_not_count():
    net = Net()

    def run() -> None:
        with FlopCounterMode(display=False):
            net(torch.randn(2, 6))

    assert all(seen.hooking == () for seen in trace(net, run).modules.values())


@pytest.mark.parametrize("owner", ["smp.nn.embedding", "torch.nn.utils", "smpl", __name__])
def test_our_own_hooks_do_not_count(owner):
    hook = note("of a library", 1.0)
    hook.__module__ = owner

    @module_of()
    def Inner(self, x: Tensor) -> Tensor:
        x.register_hook(hook)
        return x * 2

    net = nn.Sequential(nn.Linear(6, 6), Inner())
    hooking = trace(net, lambda: net(torch.randn(2, 6))).modules[""].hooking

    assert hooking == (() if owner.startswith(("smp.", "torch.")) else ("1",))


@pytest.mark.parametrize("what", WHAT, ids=" ".join)
@pytest.mark.parametrize("kind", [Net, Deep])
@on_ranks(2)
def test_hooks_see_whole_gradients_in_the_order_of_their_registration(kind, what):
    in_float64(0)
    plain = kind(*what)
    net = copy.deepcopy(plain)
    x = torch.randn(4, 6)
    log.clear()
    for part in x.chunk(2):
        (plain(part).square().mean() / 2).backward()
    wanted = list(log)
    log.clear()

    # One microbatch after the other, so that their lines are not mixed.
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "active_microbatches": 1})
    model = smp.DistributedModel(net)

    @smp.step
    def step(model: nn.Module, x: Tensor) -> None:
        model.backward(model(x).square().mean())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            net.zero_grad()
            log.clear()
            step(model, x)

    logs = smp.allgather(log, smp.PP_GROUP)
    assert sorted(line for lines in logs for line in lines) == sorted(wanted)
    if what != ("inner",):
        assert wanted in logs  # on one rank, in this order
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    local = dict(model.local_named_parameters())
    assert local
    for name, parameter in local.items():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=1e-12)
