"""Parameters that every tp_rank has whole, and that see the samples of all: "scaled batch".

They are of users' own distributed modules.  The reference is ``tests/reference/whole_job.py``,
in float64.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import smp
from smp.nn import utils as tp
from smp.tensor_parallel import primitives
from tests.models.modules import module_of
from tests.ranks import on_ranks
from tests.reference.whole_job import WholeJob, assert_near, in_float64, split_over_all_ranks

WIDTH = 5


@module_of(
    lambda inner: {
        "gain": nn.Parameter(torch.randn(WIDTH)),
        "first": nn.Linear(WIDTH, inner),
        "second": nn.Linear(inner, WIDTH, bias=False),
    }
)
def Scaled(self, x: Tensor) -> Tensor:
    """The user's class."""
    return self.second(torch.tanh(self.first(self.gain * x)))


class SplitBehind(smp.nn.DistributedModule):
    """Channels are split behind the gain: of its gradient each tp_rank has a part."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        local = tp.get_local_channels(inner)
        with tp.parameter_creation_scope(self):
            self.gain = nn.Parameter(torch.ones(WIDTH))
        with tp.parameter_creation_scope(self), tp.initialize_with_output_partition(self):
            self.first = nn.Linear(WIDTH, local)
        with tp.parameter_creation_scope(self), tp.initialize_with_input_partition(self):
            self.second = nn.Linear(local, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        everyones, lengths = primitives.gather_all(x, 0)
        gain = tp.bwd_allreduce_for_tp(self.gain)
        part = self.second(torch.tanh(self.first(gain * everyones)))
        return primitives.reduce_scatter(part, 0, lengths)


class AllOnEach(smp.nn.DistributedModule):
    """Every tp_rank computes all of it, for all samples."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        with tp.parameter_creation_scope(self):
            self.gain = nn.Parameter(torch.ones(WIDTH))
            self.first = nn.Linear(WIDTH, inner)
            self.second = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x, lengths = primitives.entering(x, 0)
        everyones = primitives.gather_alike(x, 0, lengths)
        y = self.second(torch.tanh(self.first(self.gain * everyones)))
        return primitives.own_part(y, 0, lengths)


KINDS = {"split behind": SplitBehind, "all on each": AllOnEach}
EACH = pytest.mark.parametrize("kind", KINDS)


def made(kind: str) -> nn.Module:
    """Two of them in a model, with parameters that see own samples, and split ones."""
    smp.tp_register_with_module(Scaled, KINDS[kind])
    in_float64(4)
    with smp.tensor_parallelism():
        first, second, last = Scaled(7), Scaled(4), nn.Linear(WIDTH, 3)
    return nn.Sequential(nn.LayerNorm(WIDTH), first, nn.LayerNorm(WIDTH), second, last)


def batch(rank: int, step: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (torch.randn(3 + 2 * rank, WIDTH, generator=generator, dtype=torch.float64),)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


def check(kind: str, **config: Any) -> WholeJob:
    """Steps with torch's clipping and ours, and the state of model and optimizer."""
    split_over_all_ranks(**config)
    net = made(kind)
    if smp.pp_size() > 1:
        for number, module in enumerate(net):
            smp.set_partition(module, int(number >= 2))
    job = WholeJob(net, squares, batch)
    assert all(type(module) is KINDS[kind] for module in job.net[1:4:2])
    for step in range(3):
        job.step(step, max_norm=0.02)
    job.train(3)  # without zero_grad()
    job.check_gradients()
    want = nn.utils.clip_grad_norm_(job.plain.parameters(), 0.02)
    assert_near(nn.utils.clip_grad_norm_(job.model.parameters(), 0.02), want, "norm")
    job.check_gradients()
    job.check_parameters()
    job.check_state()
    states = job.optimizer.state_dict()["state"]
    for number, moments in job.plain_optimizer.state_dict()["state"].items():
        assert_near(states[number]["exp_avg"], moments["exp_avg"], f"moment of {number}")
    return job


@EACH
@on_ranks(2, 3)
def test_they_equal_the_plain_models(kind):
    job = check(kind)
    gain = job.net[1].gain
    assert job.model.is_scaled_batch_parameter(gain)
    assert not job.model.is_distributed_parameter(gain)
    names = {name for name, _ in job.model.scaled_batch_reducer_named_parameters()}
    assert {"1.gain", "3.gain"} < names
    assert not names & {name for name, _ in job.model.default_reducer_named_parameters()}


@EACH
@on_ranks(4, timeout_s=120)
def test_they_equal_the_plain_models_in_a_pipeline(kind):
    job = check(kind, tensor_parallel_degree=2, pipeline_parallel_degree=2, microbatches=3)
    gain = f"{2 * smp.pp_rank() + 1}.gain"
    assert gain in dict(job.model.local_named_parameters())


@EACH
@pytest.mark.stress
@on_ranks(4, timeout_s=120)
def test_they_equal_the_plain_models_in_replicas(kind):
    check(kind, tensor_parallel_degree=2)


@on_ranks(4, timeout_s=120)
def test_they_are_averaged_over_the_replicas_alone():
    """The tp_ranks' gradients are one gradient."""
    smp.init({"tensor_parallel_degree": 2})
    job = WholeJob(made("split behind"), squares, batch)
    groups: dict[int, list[int]] = {}

    def over_the_buckets_group(_: Any, bucket: Any) -> torch.futures.Future:
        group = bucket.process_group()
        for parameter in bucket.parameters():
            groups[id(parameter)] = dist.get_process_group_ranks(group)
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        size = dist.get_world_size(group)
        return work.get_future().then(lambda done: done.value()[0] / size)

    job.model.register_comm_hook(None, over_the_buckets_group)
    job.step(0)
    for name, parameter in job.net.named_parameters():
        of_all = name.startswith(("1.", "3.")) or name == "4.weight"
        wanted = smp.get_rdp_group() if of_all else smp.get_dp_group()
        assert groups[id(parameter)] == list(wanted), name
