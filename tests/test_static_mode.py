"""Spec: schedules.md, section 4: static mode replays the order of the fastest recorded step on
every rank, and a step unlike the recorded ones ends in its own order, with one warning."""

import os
import re
import warnings

import pytest
import torch
from torch import nn

import smp
from smp import _core
from tests.models.modules import module_of
from tests.models.partition import distributed
from tests.ranks import on_ranks
from tests.test_chains import Blocks
from tests.test_remote_calls import Run, rows
from tests.test_remote_calls import train as one_batch

WIDTH, MICROBATCHES, RECORDED = 4, 4, 3
SAYS = "on .*rank [01].* (lacks work|has work that is not).*: microbatch [0-3], .*ward: "
AS_EVER = [1] * MICROBATCHES
OTHERS = {"more": [2] * MICROBATCHES, "less": [0] * MICROBATCHES, "less of one": [1, 1, 0, 1]}
JOBS = {
    "pipeline": {},
    "simple": {"pipeline": "simple"},
    "no chains": {"fast_mode": False},
    "slices": {"tensor_parallel_degree": 2},
    "replicas": {"ddp": True},
    "replicas in one order": {"ddp": True, "deterministic_server": True},
}


@module_of(lambda: {"up": nn.Linear(WIDTH, WIDTH), "down": nn.Linear(WIDTH, WIDTH)})
def Block(self, x):
    return self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks in a loop, some of them more than once, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.passes = [1] * MICROBATCHES  # by microbatch

    def forward(self, x, microbatch):
        for _ in range(self.passes[microbatch or 0]):
            for block in self.blocks:
                x = x + block(x)
        return self.head(torch.relu(x)) + self.blocks[1](x)


def started(**config):
    os.environ["SMP_JITTER"] = str(11 + int(os.environ["OMPI_COMM_WORLD_RANK"]))
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": MICROBATCHES,
            "static_mode": True,
            "static_mode_recording_steps": RECORDED,
            **config,
        }
    )
    torch.manual_seed(3)
    net, plain = Net().double(), Net().double()
    plain.load_state_dict(net.state_dict())
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(net.blocks[2].up)
    owners = {"": 0} | {f"blocks.{at}": at // 2 for at in range(len(net.blocks))}
    return distributed(net, owners, broadcast_buffers=False), net, plain


@smp.step
def train(model, x):
    y = model(x, _core.current())
    model.backward(y.square().mean())
    return y


@smp.step
def evaluate(model, x):
    return model(x, _core.current())


def order():
    """The order of this rank's work in the last step."""
    return [event[2:] for event in _core.timeline()]


def one_step(model, net, plain, passes=AS_EVER, samples=2 * MICROBATCHES):
    """The order of a step that is right."""
    net.passes = plain.passes = passes
    count = min(samples, MICROBATCHES)
    x = torch.randn(samples, WIDTH, dtype=torch.float64)
    model.zero_grad()
    plain.zero_grad()
    got = train(model, x).concat()
    want = [plain(part, at) for at, part in enumerate(x.chunk(count))]
    torch.testing.assert_close(got, torch.cat(want).detach())
    (sum(y.square().mean() for y in want) / count).backward()
    wanted = dict(plain.named_parameters())
    for name, parameter in model.local_named_parameters():
        want = wanted[name].grad
        if want is None or parameter.grad is None:
            assert parameter.grad is want
        elif parameter.grad.shape == want.shape:
            torch.testing.assert_close(parameter.grad, want)
    return order()


def replays(model, net, plain, passes=AS_EVER, times=4):
    orders = [one_step(model, net, plain, passes) for _ in range(times)]
    return all(one == orders[0] for one in orders)


def check(config):
    model, net, plain = started(**config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def told():
            here = [str(w.message) for w in caught if "static mode" in str(w.message)]
            caught.clear()
            return sum(smp.allgather(here, smp.CommGroup.WORLD), [])

        for _ in range(2 + RECORDED):
            one_step(model, net, plain)
        assert replays(model, net, plain, times=20)
        with torch.no_grad():  # another kind of step has an order of its own
            model.eval()
            evaluate(model, torch.randn(MICROBATCHES, WIDTH, dtype=torch.float64))
            model.train()
        one_step(model, net, plain, samples=MICROBATCHES - 1)  # at the end of an epoch
        assert replays(model, net, plain)
        assert told() == []
        for passes in (*OTHERS.values(), AS_EVER):
            for _ in range(1 + RECORDED):
                one_step(model, net, plain, passes)
            # The replicas' pipelines have orders of their own.
            apart = 2 if config == JOBS["replicas"] else 1
            texts = told()
            assert len(texts) == apart, texts
            assert all(re.search(SAYS, text) for text in texts), texts
            assert replays(model, net, plain, passes)


@on_ranks(2)
@pytest.mark.parametrize("job", ["pipeline", "simple", "no chains"])
def test_a_step_like_the_recorded_ones_has_their_order(job):
    check(JOBS[job])


@on_ranks(4)
@pytest.mark.parametrize("job", ["slices", "replicas", "replicas in one order"])
def test_likewise_with_several_pipelines(job):
    check(JOBS[job])


@on_ranks(2)
def test_a_branch_that_flips_in_each_step_and_an_exception_are_right():
    model, net, plain = started()
    for step in range(4 * RECORDED):
        one_step(model, net, plain, [step % 2, 1, 1 + step % 3, 1])
    for _ in range(1 + RECORDED):
        one_step(model, net, plain)
    with pytest.raises(TypeError):
        one_step(model, net, plain, [1, 1, None, 1])
    assert replays(model, net, plain)


@on_ranks(2)
def test_replayed_steps_have_the_bits_of_the_cut_loop():
    run = Run(
        Blocks("plain"),
        tuple(f"far.blocks.{i}" for i in range(4)),
        static_mode=True,
        static_mode_recording_steps=RECORDED,
    )
    for number in range(RECORDED + 4):
        run.check(one_batch, rows(6, number), plain=False)
