"""Spec: design.md, section 3, "Order", rule 5: modules that change their buffers.

Microbatches overtake one another on their way to such a module, and still pass it in
order.
"""

import copy
import os
import pickle
import select
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import smp
from smp.execution import first_step
from smp.partitioning.tracing import trace
from smp.partitioning.turns import turns_of
from tests.models.modules import module_of
from tests.models.partition import distributed
from tests.models.steps import total
from tests.ranks import on_ranks
from tests.reference.compare import assert_same_bits
from tests.reference.cut_loop import cut_loop

WIDTH = 16


def begin(**config):
    smp.init({"pipeline_parallel_degree": 2, **config})


@module_of(lambda: {"seen": nn.Buffer(torch.zeros(0)), "scale": nn.Parameter(torch.ones(()))})
def Norm(self, x):
    """A module that changes its buffer, behind a branch or a hook."""
    self.seen = torch.cat([self.seen, x.detach()[:1, 0]])
    return x * self.scale


class Gated(nn.Module):
    """The first microbatch, which is traced, does not call ``norm``."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.far = nn.Linear(WIDTH, WIDTH)
        self.norm = Norm()
        if how == "a hook":
            self.norm.register_forward_pre_hook(lambda module, args: None)

    def forward(self, x):
        if self.how == "a branch" and x[0, 0] == 0:
            return self.far(x)
        call = self.norm.forward if self.how == "forward alone" else self.norm
        if x[0, 0] != 2:
            x = x + 0 * self.far(x)  # all but number 2 take a way round
        return call(x) if self.how == "a hook" else call(x=x)


@on_ranks(2)
@pytest.mark.parametrize("how", ["a call", "a branch", "a hook", "forward alone"])
@pytest.mark.parametrize("owner", [0, 1])
def test_buffers_change_in_the_order_of_microbatches(how, owner):
    """Forward requests of a module with buffers run in microbatch order."""
    begin(microbatches=4, active_microbatches=4)
    gated = Gated(how)
    model = distributed(gated, {"": 0, "far": 1, "norm": owner})

    step = smp.step(total)

    step(model, torch.arange(4.0).repeat_interleave(2)[:, None].expand(8, WIDTH))

    if smp.pp_rank() == owner:
        want = [1.0, 2.0, 3.0] if how == "a branch" else [0.0, 1.0, 2.0, 3.0]
        assert gated.norm.seen.tolist() == want
        if how != "a hook":  # which is a lambda
            copied = pickle.loads(pickle.dumps(gated.norm))
            assert type(copied) is Norm and torch.equal(copied.seen, gated.norm.seen)


class Tells(Norm):
    """In evaluation: how many microbatches have trained it."""

    def forward(self, x):
        return super().forward(x) if self.training else x * 0 + len(self.seen)


@module_of(lambda: {"far": nn.Linear(WIDTH, WIDTH), "norm": Tells()})
def Switching(self, x):
    """Evaluates ``norm`` before it trains it; all but number 2 take a way round before."""
    if x[0, 0] != 2:
        x = x + 0 * self.far(x)
    self.norm.eval()
    trained = self.norm(x)
    self.norm.train()
    return trained + 0 * self.norm(x)


@on_ranks(2)
@pytest.mark.parametrize("owner", [0, 1])
def test_a_module_that_a_step_evaluates_and_trains_is_passed_in_order_in_both(owner):
    begin(microbatches=4, active_microbatches=4)
    net = Switching()
    model = distributed(net, {"": 0, "far": 1, "norm": owner})

    @smp.step
    def step(model, x):
        y = model(x)
        model.backward(y.sum())
        return y

    for number in range(2):
        out = step(model, torch.arange(4.0).repeat_interleave(2)[:, None].expand(8, WIDTH))
        assert [y[0, 0].item() for y in out.outputs] == [4 * number + n for n in range(4)]


@module_of(
    lambda there: {
        "there": there,
        "seen": nn.Buffer(torch.zeros(0)),
        "scale": nn.Parameter(torch.ones(())),
    }
)
def Counted(self, x):
    """Tells ``Held`` that microbatch 1 has come here."""
    self.seen = torch.cat([self.seen, x.detach()[:1, 0]])
    if x[0, 0] == 1 and self.there.exists():
        os.close(os.open(self.there, os.O_WRONLY))  # waits for who reads
        self.there.unlink()
    return x * self.scale


@module_of(lambda there: {"there": there, "scale": nn.Parameter(torch.ones(()))})
def Held(self, x):
    """Holds microbatch 0 until it is told."""
    if x[0, 0] == 0 and self.there.exists():
        reads = os.open(self.there, os.O_RDONLY | os.O_NONBLOCK)
        told = select.poll()
        told.register(reads)
        assert told.poll(60_000), "microbatch 1 waits for microbatch 0's forward"
        os.close(reads)
    return x * self.scale


@module_of(lambda there: {"norm": Counted(there)})
def Around(self, x):
    return self.norm(x).square()  # keeps what it squares


@on_ranks(3)
def test_a_forward_that_runs_again_in_backward_is_no_call_more(tmp_path):
    """Microbatch 1 still enters while 0, which has called as often as traced, is under way."""
    smp.init({"pipeline_parallel_degree": 3, "microbatches": 2, "active_microbatches": 2})
    there = tmp_path / "there"
    net = nn.Sequential(Around(there), Held(there))
    model = distributed(net, {"": 0, "0": 0, "0.norm": 1, "1": 2})
    smp.set_activation_checkpointing(net[0])

    step = smp.step(total)

    x = torch.arange(2.0)[:, None].expand(2, WIDTH).clone().requires_grad_()
    step(model, x)
    if smp.rank() == 1:
        runs = len(net[0].norm.seen)
        assert runs == 4  # twice for each microbatch
        os.mkfifo(there)
    smp.barrier()
    step(model, x)


@on_ranks(2)
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_a_microbatch_that_leaves_a_gate_out_holds_up_nobody_behind_it(pipeline):
    """Its forward is over when its backward begins, which itself may wait for the others."""
    begin(microbatches=3, active_microbatches=3, pipeline=pipeline)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Norm())
    model = distributed(net, [0, 1])

    @smp.step
    def step(model, x, left_out):
        y = model.module[0](x)
        if x[0, 0] not in left_out:
            y = model.module[1](y)
        model.backward(y.sum())

    x = torch.arange(3.0)[:, None].expand(3, WIDTH).clone()
    step(model, x, [])
    for left_out in ([0], [1], [0, 1], [0, 1, 2]):
        before = len(net[1].seen)
        step(model, x, left_out)
        came = len(net[1].seen) - before
        assert came == (3 - len(left_out) if smp.pp_rank() == 1 else 0)


@module_of(lambda: {"far": nn.Linear(WIDTH, WIDTH), "norm": Norm()})
def Overtaken(self, x, number):
    """The way to the gate is longer for microbatch 0, and behind it numbers are drawn."""
    y = x
    for _ in range(3 if number == 0 else 1):
        y = self.far(y)
    return self.norm(y) * torch.rand(()) + torch.rand(WIDTH)


@on_ranks(2)
def test_behind_a_gate_each_microbatch_draws_its_own_numbers():
    """... though another one drew while it waited."""
    begin(microbatches=3, active_microbatches=3)
    net = Overtaken()
    plain = copy.deepcopy(net)
    options = {"rank_of": {"": 0, "norm": 0, "far": 1}, "ranks": 2, "microbatches": 3}
    model = distributed(net, options["rank_of"])

    def step(model, x):
        y = model(x, int(x[0, 0]))
        model.backward(y.square().sum())
        return y

    x = torch.arange(3.0)[:, None].expand(3, WIDTH).clone()
    for _ in range(3):
        torch.manual_seed(4)
        got = smp.step(step)(model, x)
        torch.manual_seed(4)
        want = cut_loop(step, plain, (x,), **options).outputs
        assert_same_bits(dict(enumerate(got)), dict(enumerate(want)))


class Kinds(nn.Module):
    """Modules with buffers: statistics, one that nobody changes, one that is changed twice."""

    def __init__(self):
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.table = nn.Linear(WIDTH, WIDTH)
        self.table.register_buffer("values", torch.ones(WIDTH))
        self.norm = Norm()
        self.idle = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(self.norm(self.table(self.statistics(x))))


@pytest.mark.parametrize("trains", [True, False])
def test_gates_are_before_what_a_traced_run_changes_and_what_training_may_change(trains):
    """BatchNorm's buffers stay as they are in evaluation; what did not run may run later."""
    net = Kinds().train(trains)
    one = SimpleNamespace(module=net)
    seen = trace(net, lambda: net(torch.ones(2, WIDTH)))

    its = turns_of(net, seen)
    calls = {path: its.expected[gate] for path, gate in its.modules.items()}
    assert calls == {"statistics": 1, "norm": 2, "idle": 0}
    changed = {"statistics": tuple(net.statistics._buffers), "norm": ("seen",)}
    assert first_step._forward_state(one, seen) == ({}, changed)
    unknown = turns_of(net, None)
    assert [*unknown.modules] == ["statistics", "table", "norm", "idle"]
    assert unknown.expected == [0] * 4
    assert first_step._forward_state(one, None) == ({}, {})
