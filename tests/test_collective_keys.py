"""Spec: smp/tensor_parallel/backward/keys.py: tp_ranks that are in different modules of equal
sizes hear of both, in the forward and in the backward."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import smp
from smp import _core
from smp.tensor_parallel.backward import keys, order, step_end
from tests.ranks import on_ranks
from tests.reference.whole_job import WholeJob, in_float64, split_over_all_ranks

WIDTH = 8
KINDS = ("linear", "rows", "embedding", "region")


def made(kind: str) -> nn.Module:
    """One that is split, from ``[samples, WIDTH]`` or ids to as many channels."""
    if kind == "embedding":
        return nn.Embedding(11, WIDTH)
    if kind != "region":
        return nn.Linear(WIDTH, WIDTH)
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    return GPT2MLP(2 * WIDTH, GPT2Config(n_embd=WIDTH, resid_pdrop=0.0))


class TwoAlike(nn.Module):
    """Two modules of equal sizes, which may be called in the other order."""

    def __init__(self, kind: str):
        super().__init__()
        marks = {"by_outputs": True} if kind == "rows" else {}
        with smp.tensor_parallelism(**marks):
            self.one, self.other = made(kind), made(kind)
        smp.set_tensor_parallelism(self.one, True, **marks)
        smp.set_tensor_parallelism(self.other, True, **marks)
        self.strays = False

    def forward(self, x: Tensor, which: str = "") -> Tensor:
        if which:
            return getattr(self, which)(x)
        calls = [self.one, self.other]
        y, z = (call(x) for call in (calls[::-1] if self.strays else calls))
        return torch.tanh(y) + z


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batch_of(kind: str) -> Any:
    """Of equal sizes on all ranks."""

    def batch(rank: int, step: int) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(10 * step + rank)
        if kind == "embedding":
            return (torch.randint(0, 11, (4,), generator=generator),)
        return (torch.randn(4, 3, WIDTH, generator=generator),)

    return batch


def job_of(kind: str) -> WholeJob:
    split_over_all_ranks()
    in_float64(5)
    return WholeJob(TwoAlike(kind), loss_of, batch_of(kind))


def check_next_step(job: WholeJob) -> None:
    """It equals one of a job that never failed."""
    job.optimizer.zero_grad()
    job.step(0)
    job.check_parameters()


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, 3)
def test_ranks_in_different_modules_hear_of_both(kind):
    job = job_of(kind)
    for _ in range(2):
        job.net.strays = smp.rank() == smp.size() - 1
        with pytest.raises(step_end.PeerFailed, match="ran other modules") as caught:
            job._train(job.model, *job.batch(smp.rank(), 0))
        assert {"'one' (forward)", "'other' (forward)"} <= paths_in(caught.value)
        assert re.match(r"smp: module '\w+' \(microbatch 0, forward\): ", str(caught.value))
        job.net.strays = False
        check_next_step(job)


def paths_in(error: BaseException) -> set[str]:
    said = str(error)
    assert "key" not in said
    return set(re.findall(r"for module ('\S+' \(\w+\))", said))


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_outside_of_a_step(kind):
    job = job_of(kind)
    mine = (job.net.one, job.net.other)[smp.rank()]
    (x,) = job.batch(smp.rank(), 0)
    with torch.no_grad():
        with pytest.raises(step_end.PeerFailed) as caught:
            mine(x)
        assert {"'one' (forward)", "'other' (forward)"} <= paths_in(caught.value)
        assert re.match(r"smp: module '\w+' \(forward\): ", str(caught.value))
        job.net.one(x)
    check_next_step(job)


@pytest.mark.parametrize("which", ["one", "other"])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, 3)
@pytest.mark.sample(8)
def test_another_order_of_backwards(kind, which):
    """Of two modules, or of two calls of one, whose results the model returns."""
    job = job_of(kind)
    odd = smp.rank() == smp.size() - 1

    @smp.step
    def train(model: smp.DistributedModel, x: Tensor) -> None:
        losses = [model(x, which="one").square().mean(), model(x, which=which).sum()]
        for loss in losses[::-1] if odd else losses:
            model.backward(loss)

    with pytest.raises(step_end.PeerFailed, match="in another order") as caught:
        train(job.model, *job.batch(smp.rank(), 0))
    assert {"'one' (backward)", f"'{which}' (backward)"} <= paths_in(caught.value)
    assert re.match(r"smp: module '\w+' \(microbatch 0, backward\): ", str(caught.value))
    assert ("two calls of the module" in str(caught.value)) == (which == "one")
    check_next_step(job)


@on_ranks(2)
def test_a_scripts_own_operation_is_none_of_a_modules():
    job = job_of("linear")
    call = order.Call.of_module("a module of mine")
    terms = torch.ones(4)
    group = smp.get_tp_process_group()

    def add(is_async: bool) -> Any:
        return dist.all_reduce(terms, group=group, async_op=is_async)

    if smp.rank() == 0:
        with pytest.raises(step_end.PeerFailed, match=r"for module 'a module of mine' \(forw"):
            call.run(add)
    else:
        with pytest.raises(dist.DistBackendError, match=_core.WITH_KEY):
            add(False)
    assert torch.equal(terms, torch.ones(4))
    add(False)
    assert torch.equal(terms, torch.full((4,), 2.0))
    check_next_step(job)


@on_ranks(2)
def test_a_collective_that_does_not_begin_leaves_no_key():
    job = job_of("linear")
    if smp.rank() == 0:
        with pytest.raises(ValueError, match="no tensor"):
            order.Call.of_module("one").run(refuse)
    dist.barrier(smp.get_tp_process_group())
    check_next_step(job)


def refuse(_: Any) -> None:
    raise ValueError("no tensor")


def test_keys_differ_by_all_they_are_made_of():
    parts = [
        (path, phase, call, collective)
        for path in ("", "h.0.mlp", "h.1.mlp")
        for phase in range(len(_core.phases))
        for call in (0, 1, 2, 700)
        for collective in range(4)
    ]
    made_keys = [keys.of_collective(*one) for one in parts]
    assert len(set(made_keys)) == len(parts)
    assert all(0 <= key < 2**32 for key in made_keys)


def test_a_module_that_is_not_known_here():
    known = keys.of_collective("h.0.mlp", 1, 3, 0)
    error = _core.GroupError(
        f"rank 0 calls a{_core.WITH_KEY}{known:08x}, rank 1 b{_core.WITH_KEY}0badbad0"
    )
    error.keys = known, 0x0BADBAD0
    said = keys.explained(error)
    assert "a for module 'h.0.mlp' (backward), rank 1 b for a module that this rank" in said
    assert keys.explained(ValueError("no key here")) == "no key here"
