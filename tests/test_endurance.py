"""Spec: nothing grows over many steps, or starts and stops; forks, memory, uneven ranks."""

import ctypes
import gc
import os
import resource
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import smp
from tests import heap
from tests.models.partition import distributed
from tests.models.steps import mean_square
from tests.ranks import on_ranks
from tests.test_collectives import job

pytestmark = pytest.mark.stress

WARM_UP, STEPS = 60, 1200
CYCLES = 25
MAY_GROW = 4 << 20  # bytes
HEAP_MAY_GROW = 100_000  # bytes: what threads keep of what they have freed
SOME = 12  # objects that may come and go; a step in 20 fails


class Part(nn.Linear):
    """A layer that raises, or takes too much memory, when it is told to."""

    fails = False
    bytes_wanted = 0

    def forward(self, x):
        if self.fails:
            raise ArithmeticError("told to")
        torch.empty(self.bytes_wanted, dtype=torch.uint8)
        return torch.relu(super().forward(x))


def make(**config) -> smp.DistributedModel:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **config})
    net = nn.Sequential(Part(16, 16), Part(16, 16), nn.BatchNorm1d(16))
    return distributed(net, [0, 1, 0])


train = smp.step(mean_square)


@smp.step
def evaluate(model, x):
    return model(x)


def resident_bytes() -> int:
    """Without what the allocator keeps for later: how much that is differs from run to run."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def in_use() -> dict[str, int]:
    """What must not grow."""
    gc.collect()
    objects = gc.get_objects()
    return {
        "objects": len(objects) // SOME,
        "tensors": sum(issubclass(type(o), torch.Tensor) for o in objects),
        "pool": smp._core.counters().get("pool_in_use", 0),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


@on_ranks(2)
def test_nothing_grows_over_many_steps():
    """Steps that train, evaluate, and fail: resident memory, objects, tensors, threads."""
    model = make()
    x = torch.randn(8, 16)

    def run(steps: int) -> None:
        for step in range(steps):
            model.module[1].fails = step % 20 == 19
            try:
                train(model, x).reduce_mean()
            except ArithmeticError:
                assert model.module[1].fails
            model.module[1].fails = False
            model.zero_grad()
            if step % 10 == 0:
                with torch.no_grad():
                    evaluate(model, x).concat()

    run(WARM_UP)
    before, resident, allocated = in_use(), resident_bytes(), heap.bytes_in_use()
    run(STEPS)

    after = in_use()
    assert all(after[kind] <= before[kind] + 1 for kind in before), (before, after)
    assert heap.bytes_in_use() - allocated < HEAP_MAY_GROW
    assert resident_bytes() - resident < MAY_GROW


@on_ranks(2)
def test_starting_and_stopping_leaves_nothing():
    """init and shutdown in a loop, with a step now and then."""
    for cycle in range(CYCLES):
        model = make()
        if cycle % 8 == 0:
            train(model, torch.randn(8, 16))
        del model
        smp.reset()
        if cycle == 8:
            before, resident, allocated = in_use(), resident_bytes(), heap.bytes_in_use()
    after = in_use()
    assert all(after[kind] <= before[kind] + 1 for kind in before), (before, after)
    assert heap.bytes_in_use() - allocated < HEAP_MAY_GROW
    assert resident_bytes() - resident < MAY_GROW


@on_ranks(2)
def test_nothing_grows_over_many_collectives_groups_and_starts(tmp_path):
    """... of smddp alone, synchronous and not, with messages and mismatches between."""

    def collectives(rounds: int) -> None:
        x = torch.ones(100)
        for i in range(rounds):
            large = torch.ones(200_000)  # a new one, which nobody keeps
            works = [dist.all_reduce(each, async_op=True) for each in (x, large)]
            works[1].get_future().then(lambda _: None)
            for work in works:
                work.wait()
            dist.all_reduce(x, dist.ReduceOp.MAX)
            if dist.get_rank() == 0:
                dist.send(large, 1, tag=i)
            else:
                dist.recv(large, 0, tag=i)
            if i % 20 == 19:
                if dist.get_rank() == 0:
                    dist.send(torch.ones(5_000), 1, tag=rounds + i)  # which nobody receives
                with pytest.raises(dist.DistBackendError, match="rank 0 calls all-reduce"):
                    dist.all_reduce(x[dist.get_rank() :])

    hook = sys.excepthook
    for cycle in range(CYCLES):
        sys.excepthook = hook  # torch adds one each time
        (tmp_path / str(cycle)).mkdir(exist_ok=True)
        with job(tmp_path / str(cycle)):
            collectives(60)
            for _ in range(3):
                group = dist.new_group([0, 1])
                dist.barrier(group)
                dist.destroy_process_group(group)
        if cycle == 8:
            before, resident, allocated = in_use(), resident_bytes(), heap.bytes_in_use()
    after = in_use()
    assert all(after[kind] <= before[kind] + 1 for kind in before), (before, after)
    assert heap.bytes_in_use() - allocated < HEAP_MAY_GROW
    assert resident_bytes() - resident < MAY_GROW


@on_ranks(2)
def test_init_works_after_one_that_failed():
    degree = 2 if smp_rank() == 0 else 1
    with pytest.raises(ValueError, match="configurations differ.*pipeline_parallel_degree"):
        smp.init({"pipeline_parallel_degree": degree})
    assert not smp.is_initialized()

    train(make(), torch.randn(8, 16))


def smp_rank() -> int:
    return int(os.environ["OMPI_COMM_WORLD_RANK"])


@on_ranks(2)
def test_workers_of_a_data_loader_fork_from_a_running_rank():
    """A forked child has no threads or locks of ours; pool memory it sees is left alone."""
    model = make()
    x = torch.randn(64, 16)
    loader = DataLoader(
        TensorDataset(x), batch_size=8, num_workers=2, multiprocessing_context="fork"
    )
    alone = [train(model, part).reduce_mean() for part in x.split(8)]
    seen = []
    for _ in range(2):  # workers start in the middle of training, twice
        for (batch,) in loader:
            assert torch.equal(batch, x[8 * (len(seen) % 8) :][:8])
            seen.append(train(model, batch).reduce_mean())
    assert len(seen) == 16
    assert torch.equal(torch.stack(seen[:8]), torch.stack(alone))


@on_ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_out_of_memory_raises_on_every_rank_with_its_memory_by_kind(rank):
    model = make()
    x = torch.randn(8, 16)
    train(model, x)

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if smp.pp_rank() == rank:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (256 << 20), hard))
        model.module[rank].bytes_wanted = 8 << 30
    try:
        with pytest.raises(RuntimeError, match="allocate memory") as caught:
            train(model, x)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        model.module[rank].bytes_wanted = 0
    notes = "\n".join(caught.value.__notes__)
    assert f"memory of pp_rank {rank}: parameters" in notes
    assert f"raised on pp_rank {rank} in " in notes
    train(model, x)


@on_ranks(2)
@pytest.mark.parametrize("leaves", [0, 1])
def test_a_rank_that_makes_fewer_steps_is_named(leaves):
    """The others do not wait for it for ever."""
    model = make()
    x = torch.randn(8, 16)
    train(model, x)
    if smp.pp_rank() == leaves:
        smp.reset()
        return
    with pytest.raises(
        ConnectionError, match=f"pp_rank {leaves} has left .* the same number of steps"
    ):
        train(model, x)
