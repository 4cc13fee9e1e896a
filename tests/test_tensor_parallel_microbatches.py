"""Microbatches of split models: as many samples as each rank likes, which need not divide.

The reference is ``tests/reference/whole_job.py``, in float64: a rank's loss is the mean over
its microbatches, by their share of its samples.  In a pipeline the requests of the ranks come
in other orders each time (``SMP_JITTER``).
"""

import os
from typing import Any

import pytest
import torch
from torch import nn

import smp
from tests import test_distributed_transformer as transformer
from tests import test_tensor_parallel_families as families
from tests import test_tensor_parallel_families2 as families2
from tests.ranks import on_ranks
from tests.reference.whole_job import Batch, Loss, WholeJob

MICROBATCHES = 3
PIPELINES = pytest.mark.parametrize("pipeline", [1, 2])


def begin(pipeline: int, **config: Any) -> None:
    """``smp.init`` of 4 ranks in pairs; in a pipeline with delays."""
    if pipeline > 1:
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        os.environ["SMP_JITTER"] = str(11 + rank)  # csrc/common/jitter.h
    smp.init(
        {
            "tensor_parallel_degree": 2,
            "pipeline_parallel_degree": pipeline,
            "microbatches": MICROBATCHES,
            **config,
        }
    )


def samples_of(rank: int) -> int:
    """Microbatches of 2, 1 and 1 samples; of 2, 2 and 1; of 2 each..."""
    return 4 + rank


def uneven(batch: Batch) -> Batch:
    """A family's batches, with `samples_of` each rank."""

    def of_rank(rank: int, step: int) -> tuple:
        count = samples_of(rank)
        several = [batch(rank, 10 * more + step) for more in range(count)]
        return tuple(
            None if column[0] is None else torch.cat(column)[:count]
            for column in zip(*several, strict=True)
        )

    return of_rank


def check(net: nn.Module, loss: Loss, batch: Batch) -> None:
    job = WholeJob(net, loss, batch)
    for step in range(2):
        job.step(step, max_norm=0.3)
    job.check_parameters()


@PIPELINES
@pytest.mark.parametrize("name", families.FAMILIES)
@pytest.mark.sample(3)
@on_ranks(4, timeout_s=120)
def test_microbatches_of_a_family(name, pipeline, monkeypatch):
    families.in_float64(name, monkeypatch)
    begin(pipeline)
    net = families.small(name)

    def batch(rank: int, step: int) -> tuple:
        ids = torch.randint(
            1,
            families.VOCABULARY,
            (samples_of(rank), 6 + rank % 2),
            generator=torch.Generator().manual_seed(100 * step + rank),
        )
        mask = torch.ones_like(ids)
        mask[-1, -2:] = 0  # of one microbatch alone
        return ({"input_ids": ids, "attention_mask": mask},)

    check(net, families.token_loss, batch)


@PIPELINES
@pytest.mark.parametrize("family", families2.FAMILIES)
@pytest.mark.sample(4)
@on_ranks(4, timeout_s=120)
def test_microbatches_of_other_families(family, pipeline, monkeypatch):
    """Mixtral's loss is not a mean over samples: each microbatch has its own."""
    families2.compute_in_float64(monkeypatch, family)
    begin(pipeline)
    one = families2.FAMILIES[family]
    check(families2.made(family), one.loss, uneven(one.batch))


@PIPELINES
@pytest.mark.parametrize("optimize", ["speed", "memory", "channels"])
@pytest.mark.parametrize("kind", ["gpt", "untied, with a bias, types", "cross"])
@pytest.mark.sample(4)
@on_ranks(4, timeout_s=120)
def test_microbatches_of_a_language_model(kind, optimize, pipeline):
    """Its loss is a mean over the labels that count: microbatches have few or many."""
    begin(pipeline, optimize=optimize)
    transformer.check_lm(kind, batch=uneven(transformer.texts(kind)))
