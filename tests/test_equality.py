"""The system equals the cut loop, bit for bit: random module trees on 2 to 4 ranks.

    SEEDS=5 python -m pytest -m "" tests/test_equality.py    # all, and five times as many

Each rank builds the same tree, runs smp's step with a partition that pins every module,
and compares its parameters' gradients, its buffers and the outputs with the reference
(``tests/reference/cut_loop.py``), which it computes by itself in its own process.
"""

import copy
import os
import random
from collections.abc import Callable

import pytest
import torch

import smp
from smp import _core
from tests import accelerator
from tests.devices import DEVICES, use
from tests.models.partition import distributed
from tests.models.random_tree import ALL, ORDERED, describe, make_tree, random_partition
from tests.ranks import SEEDS, on_ranks
from tests.reference.compare import assert_same_bits, assert_same_outputs, gradients
from tests.reference.cut_loop import cut_loop

STEPS = 2

# A second forward in backward updates running statistics at a time that depends on the
# schedule, in one process too.
ORDER_IS_NOT_DEFINED = {"reentrant_checkpoint", "checkpoint"}

# What runs a child several times.  With a branch in it, the data of a microbatch decide
# how often a module is called; whether a microbatch has called a module that changes
# buffers for the last time is then not known before its forward is over, and the system
# believes what it traced until it has seen more calls.
REPEATS = {"changed_list", "dataclass", "keywords", "parameter_argument", "reuse"}
REPEATS |= {"shared_module", "two_calls", "two_backwards"}


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
        features -= ORDERED
    else:
        features -= ORDER_IS_NOT_DEFINED
        # An attribute that the traced microbatch does not set can be read unseen.
        features -= {"branch"} if seed % 4 else REPEATS | {"carried", "grows"}
    if schedule != "interleaved":
        features -= {"two_backwards"}
    if schedule == "own":
        features -= ORDERED
    return features


def check_tree(seed: int, schedule: str, microbatches: int, device: torch.device) -> None:
    """One tree, ``STEPS`` steps: outputs, gradients and buffers have the same bits.

    In the last one there may be fewer samples than microbatches.
    """
    tree = make_tree(seed, features_for(seed, schedule))
    rank_of = random_partition(tree.model, smp.pp_size(), seed)
    tree.model.to(device)
    reference = copy.deepcopy(tree.model)
    model = distributed(tree.model, rank_of)
    step = smp.step(tree.step)
    generator = torch.Generator().manual_seed(seed)
    for number in range(STEPS):
        rows = 2 * microbatches + seed % 3
        if number == STEPS - 1 and seed % 2:  # BatchNorm takes no single sample
            rows = max(1, microbatches - 1)
        batch = tree.make_batch(rows, generator)
        batch = tuple(tensor.to(device) for tensor in batch)
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
            assert_same_bits(gradients(model), gradients(reference))
            buffers = dict(reference.named_buffers())
            assert_same_bits(dict(model.local_named_buffers()), buffers)
            count = min(rows, microbatches)
            by_microbatch = [{k: v[i] for k, v in got.items()} for i in range(count)]
            assert_same_outputs(by_microbatch, want.outputs)
        except AssertionError as error:
            raise AssertionError(
                f"seed {seed}, step {number}: {error}\n{describe(reference, rank_of)}"
            ) from None


def check_trees(
    trees: int,
    schedule: str,
    microbatches: int,
    transport: str = "shm",
    delays: bool = False,
    device: str = "cpu",
) -> None:
    """That many trees; which ones follows from all the rest."""
    what = f"{schedule} {microbatches} {transport} {delays} {device}"
    first = random.Random(f"{what} {smp.job.bootstrap.mpi_size()}").randrange(10**6)
    if delays:
        os.environ["SMP_JITTER"] = str(first)  # csrc/common/jitter.h
    smp.init(
        {
            "pipeline_parallel_degree": int(smp.job.bootstrap.mpi_size()),
            "microbatches": microbatches,
            "active_microbatches": microbatches,
            "pipeline": SCHEDULES[schedule],
            "comm_transports": [transport],
            "fast_mode": first % 3 > 0,
        }
    )
    on = use(device)
    assert {peer.transport for peer in smp.comm_report().peers} == {transport}
    for seed in range(first, first + trees):
        check_tree(seed, schedule, microbatches, on)


def every_order(function: Callable) -> Callable:
    """Run the test with each kind of schedule and 1 to 5 microbatches."""
    function = pytest.mark.parametrize("schedule", SCHEDULES)(function)
    return pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5])(function)


@pytest.mark.sample(6)
@on_ranks(2, 3, 4, timeout_s=100 * SEEDS)
@every_order
def test_random_trees_equal_the_cut_loop(schedule, microbatches):
    """Outputs, gradients and buffers are bit-equal to the cut loop, on every schedule."""
    check_trees(2 * SEEDS, schedule, microbatches)


@pytest.mark.sample(6)
@on_ranks(2, 3, 4, timeout_s=100 * SEEDS)
@every_order
@pytest.mark.parametrize("transport", ["shm", "mpi"])
def test_whatever_the_transport_and_the_timing(transport, schedule, microbatches):
    """... for every transport and timing: with random delays at every hand-over."""
    check_trees(SEEDS, schedule, microbatches, transport, delays=True)


@pytest.mark.sample(2)
@on_ranks(2, 4, timeout_s=100 * SEEDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_over_ucx(schedule):
    """... also where the parts of messages may overtake each other."""
    check_trees(SEEDS, schedule, 3, "ucx", delays=True)


@pytest.mark.sample(3)
@on_ranks(2, timeout_s=100 * SEEDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("device", DEVICES[1:])
def test_on_an_accelerator(device, schedule, microbatches):
    """... and on an accelerator, where autograd has threads of its own."""
    transport = "mpi" if microbatches == 2 else "shm"

    check_trees(SEEDS, schedule, microbatches, transport, delays=True, device=device)
    if device == accelerator.NAME:
        assert accelerator.late_copies() > 0, "no copy was late: nothing was tried"


def check_on_gpus(device: str, schedule: str, microbatches: int) -> None:
    if device == accelerator.NAME:
        accelerator.use_driver()

    check_trees(2 * SEEDS, schedule, microbatches, delays=True, device=device)
    sent = smp.allgather(_core.counters()["device_tensors"], smp.WORLD)
    assert sum(sent) > 0, "no tensor was in a device pool: nothing was tried"


@pytest.mark.sample(2)
@on_ranks(2, timeout_s=100 * SEEDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("device", DEVICES[1:])
def test_on_gpus_of_one_host(device, schedule, microbatches):
    """... and when tensors go from GPU to GPU, through device pools."""
    check_on_gpus(device, schedule, microbatches)


@pytest.mark.stress
@on_ranks(3, timeout_s=100 * SEEDS)
@pytest.mark.parametrize("device", DEVICES[1:])
def test_on_three_gpus_of_one_host(device):
    check_on_gpus(device, "interleaved", 3)
