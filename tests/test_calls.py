"""Spec: csrc/server/calls.h: a call's number depends on the program alone."""

import os

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import smp
from smp import _core
from tests.models.modules import module_of
from tests.models.partition import distributed
from tests.ranks import on_ranks

WIDTH = 4
numbers: dict[tuple[int, str], list[int]] = {}  # by microbatch and what was called


@module_of(lambda name: {"name": name, "linear": nn.Linear(WIDTH, WIDTH)})
def Noting(self, x):
    """A linear module that notes the numbers of the tasks it runs in."""
    here = _core.current()
    if here is not None:
        numbers.setdefault((here, self.name), []).append(_core.task_number())
    return self.linear(x)


class Nested(nn.Module):
    """``far`` calls home; ``often`` is called twice, and again in the backward."""

    def __init__(self):
        super().__init__()
        self.far = Noting("far")
        self.far.home = Noting("home")
        self.often = Noting("often")

    def forward(self, x):
        x = self.far.home(self.far(x))
        return self.often(x) + checkpoint(self.often, 2 * x, use_reentrant=True)


@on_ranks(2)
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_no_timing_changes_the_number_of_a_call(pipeline):
    os.environ["SMP_JITTER"] = str(7 + len(pipeline))
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 3, "pipeline": pipeline})
    model = distributed(Nested(), {"": 0, "far": 1, "far.home": 0, "often": 1})

    @smp.step
    def step(model, x):
        model.backward(model(x).sum())

    seen = []
    for _ in range(4):
        numbers.clear()
        step(model, torch.ones(3, WIDTH))
        seen.append({key: list(value) for key, value in numbers.items()})
    assert all(one == seen[0] for one in seen)
    if smp.pp_rank() == 1:
        assert len(seen[0]) == 6 and all(len(seen[0][mb, "often"]) == 3 for mb in range(3))
        own = [number for value in seen[0].values() for number in value]
        assert len(set(own)) == len(own)
