"""Random module trees of which some modules are split equal the plain tree in one process.

    SEEDS=5 python -m pytest -m "" tests/test_tensor_parallel_trees.py    # five times as many

Modules are marked at random, the partition is random, and each rank has delays of its own: the
collectives of microbatches neither mix nor wait for one another.  The reference is the plain
loop over all ranks' samples, in float64.
"""

import copy
import itertools
import os
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.models.random_tree import (
    ALL,
    ORDERED,
    Hooks,
    Tree,
    describe,
    make_tree,
    random_partition,
)
from tests.ranks import SEEDS, on_ranks
from tests.reference.cut_loop import plain_loop
from tests.reference.whole_job import assert_near, compare_slice, own

STEPS = 2

# Statistics and masks that one process over all samples draws otherwise.
OF_A_BATCH = ORDERED | {"dropout"}


def features_for(alike: bool) -> set[str]:
    """All but those whose results are a rank's own.

    Args:
        alike: whether the ranks of a TP_GROUP have the same samples; with others they would
            choose other branches.
    """
    return set(ALL) - OF_A_BATCH - (set() if alike else {"branch"})


def mark_at_random(net: nn.Module, draw: random.Random) -> None:
    """Some modules are split, whole or with parts left out, along either axis."""
    for module in net.modules():
        if draw.random() < 0.5:
            by_rows = draw.random() < 0.4
            smp.set_tensor_parallelism(module, by_outputs=by_rows, vocab_parallel=by_rows)
        elif draw.random() < 0.3:
            smp.set_tensor_parallelism(module, False)
    for module in net.modules():
        if isinstance(module, Hooks):
            smp.set_tensor_parallelism(module.child, False)


def batch_of(tree: Tree, seed: int, microbatches: int, rank: int) -> tuple[Tensor, ...]:
    """A rank's samples; other numbers of them on each, which microbatches share unevenly."""
    rows = (2 + rank % 2) * microbatches + (seed + rank) % 3
    return tree.make_batch(rows, torch.Generator().manual_seed(100 * seed + rank))


def check_tree(seed: int, microbatches: int, alike: bool) -> int:
    """One tree, ``STEPS`` steps: outputs, gradients and parameters.

    Returns:
        how many of its modules are split.
    """
    tree = make_tree(seed, features_for(alike), torch.float64)
    mark_at_random(tree.model, random.Random(f"marks of {seed}"))
    rank_of = random_partition(tree.model, smp.pp_size(), seed)
    plain = copy.deepcopy(tree.model)
    for path, module in tree.model.named_modules():
        smp.set_partition(module, rank_of[path])
    model = smp.DistributedModel(tree.model)
    step = smp.step(tree.step)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    count = smp.dp_size()
    try:
        for number in range(STEPS):
            batches = [
                batch_of(tree, seed + number, microbatches, 0 if alike else rank)
                for rank in range(count)
            ]
            optimizer.zero_grad()
            plain_optimizer.zero_grad()
            got = step(model, *batches[smp.dp_rank()])
            results = [
                plain_loop(tree.step, plain, batch, microbatches=microbatches)
                for batch in batches
            ]
            for index, want in enumerate(results[smp.dp_rank()].outputs):
                for key in ("loss", "out"):
                    assert_near(got[key][index], want[key], f"{key} of microbatch {index}")
            wanted = dict(plain.named_parameters())
            for parameter in wanted.values():
                if parameter.grad is not None:
                    parameter.grad /= count
            for name, parameter in model.local_named_parameters():
                gradient = wanted[name].grad
                compare_slice(parameter.grad, gradient, parameter, f"gradient of {name}")
            optimizer.step()
            plain_optimizer.step()
            for name, parameter in model.local_named_parameters():
                compare_slice(own(parameter), wanted[name].detach(), parameter, name)
    except AssertionError as error:
        split = [one.path for one in model._smp_split if not one.reason]
        raise AssertionError(
            f"seed {seed}, step {number}: {error}\nsplit: {split}\n{describe(plain, rank_of)}"
        ) from None
    return sum(not one.reason for one in model._smp_split)


def check_trees(
    trees: int, tp: int, microbatches: int, alike: bool, pipeline: str = "interleaved"
) -> None:
    """That many trees; which ones follows from all the rest."""
    size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    what = f"{tp} of {size}, {microbatches} {alike} {pipeline}"
    first = random.Random(what).randrange(10**6)
    os.environ["SMP_JITTER"] = str(first + rank)
    smp.init(
        {
            "tensor_parallel_degree": tp,
            "pipeline_parallel_degree": size // tp,
            "microbatches": microbatches,
            "active_microbatches": microbatches,
            "pipeline": pipeline,
            "prescaled_batch": alike,
        }
    )
    seeds = itertools.count(first)
    for _ in range(trees):
        while check_tree(next(seeds), microbatches, alike) == 0:
            pass  # nothing of it is split


def every_batch(function: Callable) -> Callable:
    """Run the test with 1 to 5 microbatches, of own samples and of the same ones."""
    alike = pytest.mark.parametrize("alike", [False, True], ids=["own", "same"])
    function = alike(function)
    return pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5])(function)


@pytest.mark.sample(4)
@on_ranks(2, timeout_s=120 * SEEDS)
@every_batch
def test_random_trees_equal_the_plain_ones(alike, microbatches):
    check_trees(SEEDS, 2, microbatches, alike)


@pytest.mark.sample(3)
@on_ranks(4, timeout_s=120 * SEEDS)
@every_batch
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_random_trees_in_a_pipeline_equal_the_plain_ones(pipeline, alike, microbatches):
    """... where the servers of the tp_ranks run requests in orders of their own."""
    check_trees(SEEDS, 2, microbatches, alike, pipeline)


@pytest.mark.stress
@pytest.mark.sample(6)
@on_ranks(3, 6, timeout_s=200 * SEEDS)
@every_batch
def test_random_trees_over_three_ranks_equal_the_plain_ones(alike, microbatches):
    check_trees(SEEDS, 3, microbatches, alike)
