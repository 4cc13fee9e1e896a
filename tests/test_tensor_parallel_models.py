"""Random models whose weights are split equal the plain ones, or are refused by name.

    SEEDS=50 python -m pytest -m "" tests/test_tensor_parallel_models.py    # 500 models

The reference is ``tests/reference/whole_job.py``, in float64.
"""

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.models.random_marked import WORDS, Model
from tests.ranks import SEEDS, on_ranks
from tests.reference.whole_job import WholeJob, assert_near

EACH = 5


def batch(rank: int, step: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (torch.randint(WORDS, (2 + rank, 5), generator=generator),)


def alike(rank: int, step: int) -> tuple[Tensor]:
    return batch(0, step)


def squares(model: nn.Module, ids: Tensor) -> Tensor:
    return (model(ids) - 1).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Gradients that are 0 but for rounding, as a key's bias has, stay small."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def outcome(seed: int, prescaled: bool) -> str:
    """ "" for a model that is equal, else how it was refused.

    Raises:
        AssertionError: it is different.
    """
    torch.manual_seed(seed)
    try:
        job = WholeJob(Model(seed), squares, alike if prescaled else batch, sgd).run(2)
        if smp.pp_size() == 1:
            (ids,) = job.batch(smp.dp_rank(), 5)
            job.model.eval()
            with torch.no_grad():
                assert_near(job.model(ids), job.plain.eval()(ids), "outputs of an evaluation")
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        assert "smp: " in str(error), f"seed {seed}: {error!r}"
        return str(error)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return ""


def check(first: int, count: int, **config: Any) -> None:
    """That many models; not all are refused."""
    torch.set_default_dtype(torch.float64)
    refused = []
    for seed in range(first, first + count):
        smp.reset()
        smp.init(config)
        refused.append(outcome(seed, config["prescaled_batch"]))
    assert "" in refused, refused


@pytest.mark.parametrize("prescaled", [False, True], ids=["own samples", "same samples"])
@pytest.mark.parametrize("first", range(0, EACH * SEEDS, EACH))
@on_ranks(2, 3, timeout_s=120)
def test_a_random_model_is_equal_or_refused_by_name(first, prescaled):
    degree = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    check(first, EACH, tensor_parallel_degree=degree, prescaled_batch=prescaled)


@pytest.mark.parametrize("prescaled", [False, True], ids=["own samples", "same samples"])
@pytest.mark.parametrize("first", range(0, EACH * SEEDS, EACH))
@on_ranks(4, timeout_s=120)
def test_a_random_model_in_a_pipeline_is_equal_or_refused_by_name(first, prescaled):
    check(
        1000 + first,
        EACH,
        tensor_parallel_degree=2,
        pipeline_parallel_degree=2,
        microbatches=2,
        active_microbatches=2,
        prescaled_batch=prescaled,
    )
