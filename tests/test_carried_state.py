"""Spec: what a step leaves for the next one, and for the script between them."""

import copy
import os
import signal
import socket
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp import _core
from tests.models.partition import distributed
from tests.models.steps import mean_square
from tests.ranks import on_ranks
from tests.reference.compare import assert_same_bits

WIDTH = 4


class Layer(nn.Module):
    """Puts a new tensor in its buffer's place each time that it runs, and may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("nothing", None)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError("told to")
        self.seen = torch.cat([self.seen, x.detach()[:1, 0]])
        return torch.tanh(self.linear(x))


def make(layer: type[nn.Module] = Layer, **config: Any) -> smp.DistributedModel:
    """A layer on each of two ranks."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **config})
    return distributed(nn.Sequential(layer(), layer()), [0, 1])


train = smp.step(mean_square)


@smp.step
def evaluate(model: smp.DistributedModel, x: Tensor) -> Tensor:
    return model(x)


def scripts_state(model: smp.DistributedModel) -> dict[str, Any]:
    """What a step that fails leaves as it was; copies."""
    return copy.deepcopy(
        {
            "numbers": torch.random.get_rng_state(),
            **dict(model.local_named_buffers()),
            **{n: p.grad for n, p in model.local_named_parameters() if p.grad is not None},
        }
    )


@on_ranks(2)
@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["a layer raises", "the batch is empty"])
@pytest.mark.parametrize("graded", [False, True])
def test_a_step_that_fails_leaves_the_script_as_it_was(how, graded):
    """Buffers are the same objects, however the forward sets them; gradients too."""
    model = make()
    train(model, torch.randn(4, WIDTH))
    if not graded:
        model.zero_grad()
    objects = dict(model.local_named_buffers())
    model.module[1].fails = how == "a layer raises"
    x = torch.randn(4 if model.module[1].fails else 0, WIDTH)
    before = scripts_state(model)

    with pytest.raises((ArithmeticError, ValueError)):
        train(model, x)

    model.module[1].fails = False
    assert_same_bits(scripts_state(model), before)
    assert all(b is objects[name] for name, b in model.local_named_buffers())
    train(model, torch.randn(4, WIDTH))


@on_ranks(2)
def test_outputs_that_the_script_keeps_hold_no_memory_for_messages():
    """... and keep their values in the steps that follow."""
    model = make()
    model.eval()
    kept, copies = [], []
    for _ in range(4):
        kept += evaluate(model, torch.randn(20_000, WIDTH)).outputs
        copies = [*copies, *(output.clone() for output in kept[len(copies) :])]

    smp.barrier()
    assert smp.allgather(_core.counters()["pool_in_use"], smp.WORLD) == [0, 0]
    assert all(map(torch.equal, kept, copies))


@on_ranks(2)
@pytest.mark.parametrize("ends_in", [True, False])
def test_the_mode_in_which_a_step_leaves_the_model_is_that_of_all_ranks(ends_in):
    model = make()
    model.train(not ends_in)

    @smp.step
    def step(model: smp.DistributedModel, x: Tensor) -> Tensor:
        model.train(ends_in)
        return model(x)

    for _ in range(2):
        step(model, torch.randn(4, WIDTH))
        assert model.training is ends_in
        assert model.module[smp.pp_rank()].training is ends_in


@on_ranks(2)
def test_a_step_may_be_made_by_a_thread_of_the_script():
    """It has no signals; what it returns and leaves is as in the main thread."""
    model = make()
    x = torch.randn(4, WIDTH)
    want = train(model, x).reduce_mean()
    gradients = {n: p.grad.clone() for n, p in model.local_named_parameters()}
    model.zero_grad()
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda: made.append(train(model, x).reduce_mean()))
    thread.start()
    thread.join()

    assert torch.equal(made[0], want)
    assert_same_bits({n: p.grad for n, p in model.local_named_parameters()}, gradients)


class Signalled(nn.Linear):
    """Has SIGTERM sent to its process, and waits until the script's handler has run."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.heard: threading.Event | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.heard is not None and not self.heard.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
            assert self.heard.wait(60)
        return super().forward(x)


@on_ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_scripts_own_handler_hears_signals_in_a_step_and_its_descriptor_too(rank):
    model = make(Signalled)
    x = torch.randn(4, WIDTH)
    train(model, x)
    heard, numbers = threading.Event(), []

    def handler(number: int, frame: Any) -> None:
        numbers.append(number)
        heard.set()

    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    before = signal.signal(signal.SIGTERM, handler)
    signal.set_wakeup_fd(theirs.fileno())
    try:
        if smp.pp_rank() == rank:
            model.module[rank].heard = heard
        train(model, x)
        assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.set_wakeup_fd(-1) == theirs.fileno()
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)
    if smp.pp_rank() == rank:
        assert numbers == [signal.SIGTERM]
        assert ours.recv(16) == bytes([signal.SIGTERM])
    train(model, x)
    assert signal.getsignal(signal.SIGTERM) == before
    ours.close()
    theirs.close()
