"""Microbatches of split models: as many samples as each rank likes, which need not divide.

The reference is ``tests/reference/whole_job.py``, in float64: a rank's loss is the mean over
its microbatches, by their share of its samples.  In a pipeline the requests of the ranks come
in other orders each time (``SMP_JITTER``).
"""

import os
from typing import Any

import pytest
import torch

import smp
from tests import test_distributed_transformer as transformer
from tests.models import families
from tests.ranks import on_ranks
from tests.reference.whole_job import Batch, WholeJob

MICROBATCHES = 3
PIPELINES = pytest.mark.parametrize("pipeline", [1, 2])


def begin(pipeline: int = 1, same: bool = False, **config: Any) -> None:
    """``smp.init`` of 4 ranks in pairs, which have the ``same`` samples or own ones; in a
    pipeline with delays."""
    if pipeline > 1:
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        os.environ["SMP_JITTER"] = str(11 + rank)  # csrc/common/jitter.h
    smp.init(
        {
            "tensor_parallel_degree": 2,
            "pipeline_parallel_degree": pipeline,
            "prescaled_batch": same,
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


@PIPELINES
@pytest.mark.parametrize("name", families.FAMILIES)
@pytest.mark.sample(5)
@on_ranks(4, timeout_s=120)
def test_microbatches_of_a_family(name, pipeline, monkeypatch):
    """Mixtral's loss is not a mean over samples: each microbatch has its own."""
    families.compute_in_float64(monkeypatch, name)
    begin(pipeline, microbatches=MICROBATCHES)

    def batch(rank: int, step: int) -> families.Batch:
        return families.batch_of(name, rank, step, samples_of(rank))

    WholeJob(families.made(name), families.loss, batch).run(2, max_norm=0.3)


@PIPELINES
@pytest.mark.parametrize("optimize", ["speed", "memory", "channels"])
@pytest.mark.parametrize("kind", ["gpt", "untied, with a bias, types", "cross"])
@pytest.mark.sample(3)
@on_ranks(4, timeout_s=120)
def test_microbatches_of_a_language_model(kind, optimize, pipeline):
    """Its loss is a mean over the labels that count: microbatches have few or many."""
    begin(pipeline, microbatches=MICROBATCHES, optimize=optimize)
    transformer.check_lm(kind, batch=uneven(transformer.texts(kind)))
