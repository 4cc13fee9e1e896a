"""Spec: api.md, section 3: a batch with fewer samples than microbatches has one in each.

Ranks whose modules meet in collectives have as many microbatches as the one with the fewest;
all train as the plain model does on every rank's samples.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import smp
from tests.ranks import call_on_ranks, on_ranks
from tests.reference.whole_job import WholeJob, assert_near, in_float64

WIDTH = 6
MICROBATCHES = 4
# Of dp_rank 0 and of all others, by step.
SAMPLES = [(2, 8), (8, 8), (3, 8), (9, 1), (8, 8)]
TURNS = [(i, phase) for phase in ("forward", "backward") for i in (2, 0, 3, 1)]

PIPELINE = {"pipeline_parallel_degree": 2}
SLICES = {"tensor_parallel_degree": 2}
CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "pipeline": (2, PIPELINE),
    "simple": (2, {**PIPELINE, "pipeline": "simple"}),
    "a list of turns": (2, {**PIPELINE, "pipeline": TURNS}),
    "turns that are made": (
        2,
        {**PIPELINE, "pipeline": lambda count: [t for t in TURNS if t[0] < count]},
    ),
    "replicas": (2, {"ddp": True}),
    "pipelines": (4, {**PIPELINE, "ddp": True}),
    "pipelines in one order": (4, {**PIPELINE, "ddp": True, "deterministic_server": True}),
    "slices": (2, SLICES),
    "slices of one batch": (2, {**SLICES, "prescaled_batch": True}),
    "pipelines of slices": (4, {**PIPELINE, **SLICES}),
    "replicas of slices": (4, {**SLICES, "ddp": True}),
}


class Counted(nn.Linear):
    """Counts samples, so that microbatches pass it in their order."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return super().forward(x)


def make() -> nn.Module:
    in_float64(3)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Counted(), nn.Linear(WIDTH, WIDTH))
    smp.set_tensor_parallelism(net[0])
    smp.set_partition(net, 0)
    smp.set_partition(net[2], smp.pp_size() - 1)
    return net


def batch(dp_rank: int, step: int) -> tuple[Tensor, Tensor]:
    if smp.state.cfg.prescaled_batch:
        dp_rank = 0
    generator = torch.Generator().manual_seed(100 * step + dp_rank)
    x = torch.randn(2, SAMPLES[step][dp_rank > 0], WIDTH, generator=generator)
    return x[0], x[1]


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def expected(step: int, in_one_order: bool) -> int:
    """How many microbatches this rank has."""
    replicas = smp.get_dp_group()
    together = replicas if in_one_order else smp.get_tp_group()
    return min(MICROBATCHES, *(len(batch(replicas.index(r), step)[0]) for r in together))


def train_and_evaluate(name: str) -> None:
    config = CONFIGS[name][1]
    smp.init({"microbatches": MICROBATCHES, "active_microbatches": MICROBATCHES, **config})
    job = WholeJob(make(), loss, batch)

    @smp.step
    def evaluate(model, x):
        return model(x)

    for step in range(len(SAMPLES)):
        job.step(step)
        x, _ = batch(smp.dp_rank(), step)
        job.model.eval()
        with torch.no_grad():
            out = evaluate(job.model, x)
            assert len(out) == expected(step, "deterministic_server" in config)
            assert_near(out.concat(), job.plain(x), f"output of step {step}")
        job.model.train()
    job.check_parameters()
    if smp.dp_size() == 1 and smp.pp_rank() == smp.pp_size() - 1:
        assert job.net[2].seen == 2 * sum(first for first, _ in SAMPLES)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_last_batch_trains_and_evaluates_as_in_one_process(name):
    size, config = CONFIGS[name]
    call_on_ranks(size, train_and_evaluate, name)


@pytest.mark.parametrize("degree", [1, 2])
@on_ranks(4)
def test_a_rank_without_samples_fails_the_step_on_all(degree):
    """... and the next one works, in which it has some."""
    smp.init({**SLICES, "pipeline_parallel_degree": degree, "microbatches": MICROBATCHES})
    model = smp.DistributedModel(make())

    @smp.step
    def train(model, x, y):
        model.backward(loss(model, x, y))

    empty, full = (torch.zeros(rows, WIDTH) for rows in (0, 8))
    for _ in range(2):
        given = empty if smp.tp_rank() == 1 else full
        with pytest.raises((ValueError, RuntimeError), match="'x' has 0 samples on axis 0"):
            train(model, given, given)
        train(model, full, full)


class Synchronised(nn.SyncBatchNorm):
    """Meets the other replicas in a collective, also on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.detach().sum(0)
        if self.training:
            dist.all_reduce(total)
        return x + 0 * total


@on_ranks(2)
def test_replicas_whose_sync_batch_norms_meet_have_as_many_microbatches():
    smp.init({"ddp": True, "microbatches": MICROBATCHES})
    in_float64(3)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Synchronised(WIDTH))
    WholeJob(net, loss, batch).step(0)
