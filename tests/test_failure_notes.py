"""Spec: what the notes of a failed step say: the memory of the rank that has none left."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import smp
from smp import _core
from tests.ranks import on_ranks

MIB = 1 << 20
NO_MEMORY = [
    MemoryError("no memory"),
    torch.OutOfMemoryError("no memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"),
]


class FailsInBackward(torch.autograd.Function):
    """The identity; its backward raises what its layer holds."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.layer.error


class Layer(nn.Module):
    """1 MiB of parameters and 2 MiB of buffers; ``error``: what it raises."""

    error: Exception | None = None
    phase = "forward"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, MIB // 32))
        self.register_buffer("table", torch.zeros(2 * MIB, dtype=torch.uint8))

    def forward(self, x):
        if self.error is not None and not smp.is_tracing():
            if self.phase == "forward":
                raise self.error
            x = FailsInBackward.apply(x, self)
        return x * self.weight.mean()


def make(**config: Any) -> smp.DistributedModel:
    """A layer on each of two ranks."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **config})
    net = nn.Sequential(Layer(), Layer())
    for rank, layer in enumerate(net):
        smp.set_partition(layer, rank)
    return smp.DistributedModel(net)


@smp.step
def train(model, x):
    model.backward(model(x.requires_grad_()).sum())


def notes_of_failed_step(model: smp.DistributedModel, error: Exception) -> str:
    with pytest.raises(type(error)) as caught:
        train(model, torch.ones(4, 2))
    return "\n".join(caught.value.__notes__)


@on_ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", range(len(NO_MEMORY)))
def test_without_memory_every_rank_hears_what_the_ranks_memory_holds(rank, number):
    model = make()
    train(model, torch.ones(4, 2))
    if smp.pp_rank() == rank:
        model.module[rank].error = NO_MEMORY[number]

    notes = notes_of_failed_step(model, NO_MEMORY[number])

    assert notes.count("memory of") == notes.count(f"memory of pp_rank {rank}") > 0
    told = r"parameters 1 MiB, gradients 1 MiB, buffers 2 MiB, pool for messages \d+ of (\d+)"
    found = re.search(told, notes)
    assert found and int(found[1]) == _core.counters()["pool_size"] >> 20


@on_ranks(2)
@pytest.mark.parametrize("before", [0, 1])
def test_gradients_that_no_parameter_shows_yet_count_as_memory(before):
    """The layer's weight has its gradient when the backward fails further on; ``before``:
    MiB that it had when the step began."""
    model = make(microbatches=1)
    layer = model.module[1]
    layer.phase, layer.error = "backward", MemoryError()
    if before:
        layer.weight.grad = torch.ones_like(layer.weight)

    assert f"gradients {before + 1} MiB" in notes_of_failed_step(model, MemoryError())


@on_ranks(2)
def test_an_error_of_another_kind_says_nothing_of_memory():
    model = make()
    train(model, torch.ones(4, 2))
    if smp.pp_rank() == 1:
        model.module[1].error = RuntimeError("no good")

    assert "memory of" not in notes_of_failed_step(model, RuntimeError("no good"))
