"""Operations of smddp on tensors of devices that NCCL does not serve: through host memory.

The reference is the same operation on tensors in host memory, bit by bit.
"""

from contextlib import nullcontext as nothing
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import smp
from smp.collectives import shared_gpus
from smp.collectives.process_group import ProcessGroup
from tests.devices import DEVICES
from tests.ranks import on_ranks
from tests.reference.collectives import drawn
from tests.test_collectives import Nccl, job, refused, same
from tests.test_device_gather import job_on

on_devices = pytest.mark.parametrize("device", DEVICES[1:])


def operations(rank: int, size: int, to: torch.device | str, **how: bool) -> dict[str, tuple]:
    """By name: what calls it, and the tensors that it fills on this rank."""

    def own(*shape: int) -> torch.Tensor:
        return drawn(rank, shape or (4, 6), torch.float32).to(to)

    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(shape or (4, 6), device=to)

    last = size - 1
    summed, gaps, half, reduced, sent = own(), own(8, 6)[::2], own().half(), own(), own()
    joined, swapped = empty(4 * size, 6), empty(12, 6)
    gathered, listed, at_root = ([empty() for _ in range(size)] for _ in range(3))
    part, uneven, given = empty(12 // size, 6), empty(1 + rank, 6), empty()
    terms = [own(1 + r, 6) for r in range(size)]
    is_root = rank == last
    return {
        "all_reduce": (lambda: dist.all_reduce(summed, **how), [summed]),
        "with gaps": (lambda: dist.all_reduce(gaps, **how), [gaps]),
        "half": (lambda: dist.all_reduce(half, dist.ReduceOp.MAX, **how), [half]),
        "reduce": (lambda: dist.reduce(reduced, last, **how), [reduced] if is_root else []),
        "broadcast": (lambda: dist.broadcast(sent, last, **how), [sent]),
        "all_gather": (lambda: dist.all_gather(gathered, own(), **how), gathered),
        "of one": (lambda: dist.all_gather_into_tensor(joined, own(), **how), [joined]),
        "scattered": (lambda: dist.reduce_scatter_tensor(part, own(12, 6), **how), [part]),
        "uneven": (lambda: dist.reduce_scatter(uneven, terms, **how), [uneven]),
        "gather": (
            lambda: dist.gather(own(), at_root if is_root else None, last, **how),
            at_root if is_root else [],
        ),
        "scatter": (
            lambda: dist.scatter(given, [own()] * size if is_root else None, last, **how),
            [given],
        ),
        "all to all": (lambda: dist.all_to_all_single(swapped, own(12, 6), **how), [swapped]),
        "lists": (lambda: dist.all_to_all(listed, [own()] * size, **how), listed),
    }


@on_ranks(2, 3)
@on_devices
@pytest.mark.parametrize("is_async", [False, True])
def test_every_operation_is_that_of_host_memory(device, is_async, tmp_path):
    how = {"async_op": True} if is_async else {}
    with job_on(device, tmp_path, memory="0") as (rank, size, on):
        dist.group.WORLD._through_host[None] = True  # one GPU for each there may be
        there, here = (operations(rank, size, where, **how) for where in (on, "cpu"))
        for name, (call, results) in there.items():
            reference, wanted = here[name]
            for work in (call(), reference()):
                if is_async:
                    work.wait()
                    work.get_future().wait()
            for got, want in zip(results, wanted, strict=True):
                assert got.device.type == on.type and same(got.cpu(), want), name
        assert dist.group.WORLD._nccl is None
        (use,) = [use for use in smp.comm_report().groups if use.name == "0"]
        assert use.device_operations == 0


@on_ranks(2)
@on_devices
def test_tensors_are_sent_and_coalesced(device, tmp_path):
    with job_on(device, tmp_path) as (rank, size, on):
        group = dist.group.WORLD
        group._through_host.update({None: True, 1 - rank: True})
        got = torch.zeros(6, 4, device=on)[::2]
        sent = dist.isend(drawn(rank, (3, 4), torch.float32).to(on), 1 - rank)
        dist.irecv(got, 1 - rank).wait()
        sent.wait()
        assert same(got.cpu(), drawn(1 - rank, (3, 4), torch.float32))

        if on.type == "cuda":  # the pretended accelerator has no sparse tensors
            table = torch.sparse_coo_tensor([[rank, 2]], [1.0, 2.0 + rank], (4,)).to(on)
            dist.all_reduce(table)
            assert table.to_dense().cpu().tolist() == [1, 1, 5, 0]

        terms = [torch.full((n,), float(rank), device=on) for n in (3, 4)]
        with dist._coalescing_manager(device=on):
            for term in terms:
                dist.all_reduce(term)
        assert [term.cpu().unique().item() for term in terms] == [1, 1]
        dist.barrier()


def has_nccl(monkeypatch) -> None:
    """Also where this torch has none."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)


class Stream:
    """In place of a device's."""

    def __init__(self, waited=()):
        self.synchronize = lambda: waited.append("synchronized")


@on_ranks(3)
def test_ranks_that_share_a_gpu_are_seen_and_named_once(tmp_path, monkeypatch):
    """NCCL serves the others; what two ranks send each other depends on these two alone."""
    with job(tmp_path) as (rank, size):
        has_nccl(monkeypatch)
        monkeypatch.setattr(shared_gpus, "_warned", False)
        monkeypatch.setattr(shared_gpus, "name_of", lambda d: f"Model, GPU-{max(rank, 1)}")
        device, group = torch.device("cuda", 0), dist.group.WORLD
        with pytest.warns() if rank == 0 else nothing() as warned:
            alone = group._goes_through_host(device, (rank + 1) % 3)
            assert alone == (rank == 0)
            assert group._goes_through_host(device)
            assert dist.new_group()._goes_through_host(device)
        if rank == 0:
            (warning,) = warned
            said = "ranks 0 and 1 share a GPU (Model, GPU-1)"
            assert said in str(warning.message) and "MPS" in str(warning.message)
            assert "through host memory (ranks 0, 1 share a GPU)" in str(smp.comm_report())
        monkeypatch.setattr(shared_gpus, "name_of", lambda d: f"Model, GPU-{rank}")
        group = dist.new_group()
        assert not group._goes_through_host(device)

        waited = []
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream(waited))
        options = dist.BarrierOptions()
        options.device = device
        dist.group.WORLD.barrier(options).wait()
        assert waited == ["synchronized"]


@on_ranks(2)
def test_who_calls_without_a_gpu_is_named_after_the_timeout(tmp_path, monkeypatch):
    has_nccl(monkeypatch)
    monkeypatch.setattr(shared_gpus, "name_of", lambda d: "a GPU")
    with job(tmp_path) as (rank, size):
        group: ProcessGroup = dist.new_group(timeout=timedelta(seconds=0.2))
        if rank == 0:
            said = refused(lambda: group._goes_through_host(torch.device("cuda", 0)))
            assert "rank 1 had no CUDA tensor in an operation of this group within 0.2" in said
        dist.barrier()
