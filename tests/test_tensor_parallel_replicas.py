"""Replicas of split models, on ranks with samples of their own or of their TP_GROUP.

T 2, R 2, and stages in place of replicas.  The reference is ``tests/reference/whole_job.py``,
in float64.
"""

import functools
from typing import Any

import pytest
from torch import nn

import smp
from smp.state_mod import state
from tests import test_distributed_transformer as transformer
from tests import test_tensor_parallel_losses as losses
from tests.models import families
from tests.ranks import on_ranks
from tests.reference.whole_job import Batch, Loss, WholeJob
from tests.test_tensor_parallel import next_token_loss, small_gpt2, tokens
from tests.test_tensor_parallel_microbatches import MICROBATCHES, begin, uneven

SAMPLES = pytest.mark.parametrize("same", [False, True], ids=["own samples", "same samples"])
PIPELINES = pytest.mark.parametrize("pipeline", [1, 2], ids=["replicas", "stages"])
OPTIMIZE = pytest.mark.parametrize("optimize", ["speed", "memory", "channels"])


def rdp_of(dp_rank: int) -> int:
    return state.job("rdp_of").placement.coordinates(smp.get_dp_group()[dp_rank]).rdp


def fed(batch: Batch, same: bool) -> Batch:
    """The batch of a rank, or that of its TP_GROUP: more samples in the second one."""
    return (lambda rank, step: batch(rdp_of(rank), step)) if same else batch


def check(net: nn.Module, loss: Loss, batch: Batch, same: bool, **options: Any) -> None:
    job = WholeJob(net, loss, fed(batch, same), **options).run(2, max_norm=0.1)
    job.check_state()


@SAMPLES
@PIPELINES
@OPTIMIZE
@pytest.mark.parametrize("kind", ["gpt", "untied, with a bias, types", "cross", "gpt-j"])
@pytest.mark.sample(4)
@on_ranks(4, timeout_s=120)
def test_a_language_model(kind, optimize, pipeline, same):
    begin(pipeline, same, optimize=optimize)
    transformer.check_lm(kind, batch=fed(transformer.texts(kind), same))


@OPTIMIZE
@pytest.mark.parametrize("kind", ["gpt", "untied, with a bias, types"])
@pytest.mark.sample(3)
@on_ranks(4, timeout_s=120)
def test_microbatches_of_the_same_samples_in_stages(kind, optimize):
    begin(2, same=True, optimize=optimize, microbatches=MICROBATCHES)
    batch = uneven(transformer.texts(kind))
    transformer.check_lm(kind, batch=fed(batch, same=True))


@SAMPLES
@PIPELINES
@pytest.mark.sample(3)
@on_ranks(4, timeout_s=120)
def test_gpt2(pipeline, same):
    begin(pipeline, same)

    def batch(rank: int, step: int) -> tuple:
        return tokens(rank, step, masked=pipeline == 1)

    check(small_gpt2(), next_token_loss, batch, same)


@SAMPLES
@PIPELINES
@pytest.mark.parametrize("name", ["llama, 1 head of keys", "t5", "mixtral"])
@pytest.mark.sample(4)
@on_ranks(4, timeout_s=120)
def test_a_family(name, pipeline, same, monkeypatch):
    """The one head of keys is whole on every tp_rank, which has a part of its gradient."""
    families.compute_in_float64(monkeypatch, name)
    begin(pipeline, same)
    batch = functools.partial(families.batch_of, name)
    check(families.made(name), families.loss, batch, same)


@SAMPLES
@PIPELINES
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.sample(2)
@on_ranks(4)
def test_a_loss_of_split_classes(reduction, pipeline, same):
    begin(pipeline, same)
    net = losses.made(lambda: losses.Classifier(reduction=reduction, label_smoothing=0.1))
    check(net, losses.own_loss, losses.labelled, same)


@SAMPLES
@PIPELINES
@pytest.mark.sample(2)
@on_ranks(4)
def test_a_tied_head(pipeline, same):
    begin(pipeline, same)

    def batch(rank: int, step: int) -> tuple:
        _, labels = losses.labelled(rank, step)
        return labels.abs() % losses.CLASSES, labels

    check(losses.made(losses.Tied), losses.own_loss, batch, same)


# ------------------------------------------------------------------- how they are exchanged


OPTIONS = [
    {"gradient_as_bucket_view": True},
    {"overlapping_allreduce": False},
    {"bucket_cap_mb": 1e-4},
    {"backward_passes_per_step": 2},
]


@PIPELINES
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
@pytest.mark.sample(4)
@on_ranks(4, timeout_s=120)
def test_options_of_the_exchange(options, pipeline):
    """Gradients add up over two steps, twice."""
    begin(pipeline)

    def batch(rank: int, step: int) -> tuple:
        return tokens(rank, step, masked=pipeline == 1)

    job = WholeJob(small_gpt2(), next_token_loss, batch, **options)
    every = options.get("backward_passes_per_step", 1)
    for step in range(4):
        job.train(step)
        if (step + 1) % every == 0:
            job.check_gradients()
        if step % 2:
            for optimizer in (job.optimizer, job.plain_optimizer):
                optimizer.step()
                optimizer.zero_grad()
    job.check_parameters()


@pytest.mark.parametrize("by_all", [True, False], ids=["by all", "by those left"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.sample(2)
@on_ranks(4, timeout_s=120)
def test_a_tp_group_that_ends_before_the_other(first, by_all):
    """It keeps the other company, and then has its parameters: of slices its peers'."""
    begin()
    job = WholeJob(small_gpt2(), next_token_loss, tokens)
    batches = {first: 1, 1 - first: 3}

    def end_of_step() -> None:
        for optimizer in (job.optimizer, job.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def train_plain(step: int) -> None:
        ended = [rank for rank in range(4) if step >= batches[rdp_of(rank)]]
        job.train_plain(step, ended, by_all)

    with job.model.join(divide_by_initial_world_size=by_all):
        for step in range(batches[smp.rdp_rank()]):
            job._train(job.model, *tokens(smp.dp_rank(), step))
            train_plain(step)
            job.check_gradients()
            end_of_step()
    for step in range(batches[smp.rdp_rank()], 3):
        train_plain(step)
        job.plain_optimizer.step()
        job.plain_optimizer.zero_grad()
    job.check_parameters()
