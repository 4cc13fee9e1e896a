"""The system equals the cut loop, bit for bit: random module trees on 2 to 4 ranks.

Each rank builds the same tree, runs smp's step with a partition that pins every module,
and compares its parameters' gradients, its buffers and the outputs with the reference
(``tests/reference/cut_loop.py``), which it computes by itself in its own process.
"""

import copy
import random

import pytest
import torch

import smp
from tests.models.random_tree import ALL, describe, make_tree, random_partition
from tests.ranks import on_ranks
from tests.reference.compare import assert_same_bits, assert_same_outputs, gradients
from tests.reference.cut_loop import cut_loop

STEPS = 2

# A second forward in backward updates running statistics at a time that depends on the
# schedule, in one process too.
ORDER_IS_NOT_DEFINED = {"reentrant_checkpoint", "checkpoint"}


def backward_first_is_second(microbatches: int) -> list[tuple[int, str]]:
    """All forwards, last one first; then backward 1 before 0 and so on."""
    forwards = [(i, "forward") for i in reversed(range(microbatches))]
    swapped = [i ^ 1 if (i ^ 1) < microbatches else i for i in range(microbatches)]
    return forwards + [(i, "backward") for i in swapped]


SCHEDULES = {"simple": "simple", "interleaved": "interleaved", "own": backward_first_is_second}


def features_for(seed: int, schedule: str) -> set[str]:
    """All features, without those whose order a schedule cannot keep."""
    features = set(ALL)
    if seed % 2:
        features -= {"batch_norm", "buffer"}
    else:
        features -= ORDER_IS_NOT_DEFINED
    if schedule != "interleaved":
        features -= {"two_backwards"}
    if schedule == "own":
        features -= {"batch_norm", "buffer"}
    return features


def check_tree(seed: int, schedule: str, microbatches: int) -> None:
    """One tree, ``STEPS`` steps: outputs, gradients and buffers have the same bits."""
    tree = make_tree(seed, features_for(seed, schedule))
    rank_of = random_partition(tree.model, smp.pp_size(), seed)
    reference = copy.deepcopy(tree.model)
    for path, module in tree.model.named_modules():
        smp.set_partition(module, rank_of[path])
    model = smp.DistributedModel(tree.model)
    step = smp.step(tree.step)
    generator = torch.Generator().manual_seed(seed)
    for number in range(STEPS):
        batch = tree.make_batch(2 * microbatches + seed % 3, generator)
        torch.manual_seed(seed + number)
        got = step(model, *batch)
        torch.manual_seed(seed + number)
        want = cut_loop(
            tree.step,
            reference,
            batch,
            rank_of=rank_of,
            ranks=smp.pp_size(),
            microbatches=microbatches,
        )
        try:
            mine = {name: p.grad for name, p in model.local_named_parameters()}
            assert_same_bits(mine, gradients(reference))
            buffers = dict(reference.named_buffers())
            assert_same_bits(dict(model.local_named_buffers()), buffers)
            by_microbatch = [{k: v[i] for k, v in got.items()} for i in range(microbatches)]
            assert_same_outputs(by_microbatch, want.outputs)
        except AssertionError as error:
            raise AssertionError(
                f"seed {seed}, step {number}: {error}\n{describe(reference, rank_of)}"
            ) from None


@on_ranks(2, 3, 4, timeout_s=200)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5])
def test_random_trees_equal_the_cut_loop(schedule, microbatches):
    """Outputs, gradients and buffers are bit-equal to the cut loop, on every schedule."""
    smp.init(
        {
            "pipeline_parallel_degree": int(smp.bootstrap.mpi_size()),
            "microbatches": microbatches,
            "active_microbatches": microbatches,
            "pipeline": SCHEDULES[schedule],
        }
    )
    first = random.Random(f"{schedule} {microbatches} {smp.size()}").randrange(10**6)
    for seed in range(first, first + 7):
        check_tree(seed, schedule, microbatches)
