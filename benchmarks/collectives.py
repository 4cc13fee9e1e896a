"""How fast are the collectives of the backend smddp, beside gloo and Open MPI?

    mpirun -np 2 --bind-to core python benchmarks/collectives.py

Each call finds its input just written, as a backward or an optimizer leaves it, and its
result is read whole (a sum) inside the timed part; all-reduce works in place.  A size is
that of one rank's input.  Open MPI is called through mpi4py, on the tensors' own memory.
"By hand" is what the machine's memory allows: the inputs lie in memory that all ranks have,
and each does the copies and sums of its part with torch, between barriers.
"""

import argparse
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
from table import alternate, show, timed

ROUNDS = 15
# Bytes of one rank's input -> calls in a round.
SIZES = {4 << 10: 200, 256 << 10: 40, 16 << 20: 4}

Call = Callable[[Tensor, Tensor], Tensor]  # input, output -> where the result is


def over(group: dist.ProcessGroup) -> dict[str, Call]:
    def all_reduce(x: Tensor, out: Tensor) -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    def all_gather(x: Tensor, out: Tensor) -> Tensor:
        dist.all_gather_into_tensor(out, x, group=group)
        return out

    def reduce_scatter(x: Tensor, out: Tensor) -> Tensor:
        dist.reduce_scatter_tensor(out, x, group=group)
        return out

    return {
        "all-reduce": all_reduce,
        "all-gather": all_gather,
        "reduce-scatter": reduce_scatter,
    }


def over_mpi(comm: MPI.Comm) -> dict[str, Call]:
    def all_reduce(x: Tensor, out: Tensor) -> Tensor:
        comm.Allreduce(MPI.IN_PLACE, x.numpy())
        return x

    def all_gather(x: Tensor, out: Tensor) -> Tensor:
        comm.Allgather(x.numpy(), out.numpy())
        return out

    def reduce_scatter(x: Tensor, out: Tensor) -> Tensor:
        comm.Reduce_scatter_block(x.numpy(), out.numpy())
        return out

    return {
        "all-reduce": all_reduce,
        "all-gather": all_gather,
        "reduce-scatter": reduce_scatter,
    }


def shared_by_all(numel: int) -> list[Tensor]:
    """A tensor of each rank, in memory that all of them have."""
    folder = [tempfile.mkdtemp(dir="/dev/shm") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    tensors = []
    for rank in range(dist.get_world_size()):
        file = f"{folder[0]}/{rank}"
        tensors.append(torch.from_file(file, shared=True, size=numel))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return tensors


def by_hand(inputs: list[Tensor]) -> dict[str, Call]:
    """The same copies and sums by torch, between barriers of smddp.

    Args:
        inputs: of all ranks, in memory that all have; a call's ``x`` is this rank's.
    """
    ranks, rank = len(inputs), dist.get_rank()

    def reduce_part(out: Tensor) -> None:
        first, second, *others = (
            x.chunk(ranks)[rank] for x in [inputs[rank], *inputs[:rank], *inputs[rank + 1 :]]
        )
        torch.add(first, second, out=out)
        for other in others:
            out += other

    def all_reduce(x: Tensor, out: Tensor) -> Tensor:
        dist.barrier()
        reduce_part(x.chunk(ranks)[rank])
        dist.barrier()
        for other in range(ranks):
            if other != rank:
                x.chunk(ranks)[other].copy_(inputs[other].chunk(ranks)[other])
        dist.barrier()
        return x

    def all_gather(x: Tensor, out: Tensor) -> Tensor:
        dist.barrier()
        for to, each in zip(out.chunk(ranks), inputs, strict=True):
            to.copy_(each)
        dist.barrier()
        return out

    def reduce_scatter(x: Tensor, out: Tensor) -> Tensor:
        dist.barrier()
        reduce_part(out)
        dist.barrier()
        return out

    return {
        "all-reduce": all_reduce,
        "all-gather": all_gather,
        "reduce-scatter": reduce_scatter,
    }


def output_bytes(operation: str, nbytes: int, ranks: int) -> int:
    """What a rank gets of inputs of ``nbytes``; all-reduce is in place."""
    return {"all-gather": nbytes * ranks, "reduce-scatter": nbytes // ranks}.get(operation, 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")  # names that newer versions of torch call otherwise
    torch.set_num_threads(1)
    dist.init_process_group("smddp")
    ours = dist.group.WORLD
    assert ours is not None
    gloo = dist.new_group(backend="gloo")
    ranks = dist.get_world_size()
    ways = {"gloo": over(gloo), "Open MPI": over_mpi(MPI.COMM_WORLD), "smddp": over(ours)}
    for nbytes, calls in SIZES.items():
        fresh = torch.rand(nbytes // 4)
        x = torch.empty_like(fresh)
        inputs = shared_by_all(x.numel())
        own = inputs[dist.get_rank()]
        ways["by hand"] = by_hand(inputs)
        for operation in ways["smddp"]:
            numel = output_bytes(operation, nbytes, ranks) // 4

            def side(call: Call, x: Tensor, out: Tensor, fresh=fresh, calls=calls) -> float:
                seconds = 0.0
                dist.barrier()
                for _ in range(calls):
                    x.copy_(fresh)
                    seconds += timed(lambda: call(x, out).sum())
                return seconds / calls

            out = torch.empty(numel)
            sides = {
                name: partial(side, way[operation], own if name == "by hand" else x, out)
                for name, way in ways.items()
            }
            if numel:
                pool = ours.allocate_tensor(numel, dtype=x.dtype, device=x.device)
                sides["smddp, pool"] = partial(side, ways["smddp"][operation], x, pool)
            result = out if numel else x
            sides["the sum alone"] = lambda result=result: timed(result.sum)
            for one in sides.values():
                one()
            times = alternate(sides, args.rounds)
            if dist.get_rank() == 0:
                size = f"{nbytes >> 10} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"
                show(f"{operation} of {size}, {ranks} ranks", "us", 1e6, times, "gloo")
    dist.destroy_process_group()


main()
