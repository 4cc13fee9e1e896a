"""Recommenders whose tables are split over the TP_GROUP, against plain ones (section 7.3 of
the SageMaker paper)."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from tests.models.recommenders import DLRM, NCF, MakeTable
from tests.ranks import on_ranks
from tests.reference.whole_job import WholeJob, in_float64, split_over_all_ranks

ROWS = (11, 5, 7)


def ncf(make_table: MakeTable) -> nn.Module:
    return NCF(users=23, items=9, mlp_width=20, gmf_width=7, make_table=make_table)


def pairs(rank: int, step: int) -> tuple[Tensor, ...]:
    """Users, items and clicks; other numbers of samples on each rank."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    samples = (4 + rank,)
    users = torch.randint(0, 23, samples, generator=generator)
    items = torch.randint(0, 9, samples, generator=generator)
    clicks = torch.randint(0, 2, samples, generator=generator)
    return users, items, clicks.double()


def dlrm(make_table: MakeTable) -> nn.Module:
    return DLRM(numbers=3, rows=ROWS, width=5, make_table=make_table)


def features(rank: int, step: int) -> tuple[Tensor, ...]:
    """Numbers, categories and clicks."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    samples = 3 + 2 * rank
    numbers = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    categories = [torch.randint(0, n, (samples,), generator=generator) for n in ROWS]
    clicks = torch.randint(0, 2, (samples,), generator=generator)
    return numbers, torch.stack(categories, 1), clicks.double()


def clicked(model: nn.Module, *batch: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(*batch[:-1]), batch[-1])


MODELS = {"ncf": (ncf, pairs), "dlrm": (dlrm, features)}


def check(name: str, sparse: bool, same: bool) -> None:
    make, batch = MODELS[name]
    split_over_all_ranks(prescaled_batch=same)
    in_float64(1)
    net = make(functools.partial(nn.Embedding, sparse=sparse))
    for module in net.modules():
        if isinstance(module, nn.Embedding):
            smp.set_tensor_parallelism(module)
    job = WholeJob(
        net,
        clicked,
        (lambda rank, step: batch(1, step)) if same else batch,
        lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    )
    tables = [m for m in job.net.modules() if isinstance(m, smp.nn.DistributedEmbedding)]
    assert len(tables) == (4 if name == "ncf" else len(ROWS))
    assert sum(1 for _ in job.model.distributed_modules()) == len(tables)
    for step in range(3):
        job.optimizer.zero_grad()
        job.plain_optimizer.zero_grad()
        job.train(step)
        assert all(table.weight.grad.is_sparse is sparse for table in tables)
        for parameter in (*job.net.parameters(), *job.plain.parameters()):
            parameter.grad = parameter.grad.to_dense()
        job.check_gradients()
        job.optimizer.step()
        job.plain_optimizer.step()
    job.check_parameters()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_a_recommender_equals_the_plain_one(name, sparse):
    check(name, sparse, same=False)


@pytest.mark.stress
@pytest.mark.sample(5)
@pytest.mark.parametrize("same", [False, True], ids=["other samples", "same samples"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2, 3)
def test_a_recommender_over_more_ranks(name, sparse, same):
    check(name, sparse, same)
