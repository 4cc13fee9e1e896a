"""How fast does a tensor get to the other rank by send and recv, beside gloo and Open MPI?

    mpirun -np 2 --bind-to core python benchmarks/send_receive.py

Half of a round trip: rank 0 sends a tensor that it has just written, rank 1 receives it
into fresh memory, reads it (a sum) and sends 8 bytes back.  The trip back is part of the
time, so the row of 8 bytes is two messages by two.  "Memory and sum alone": half of what
rank 1 takes for these, without a message.
"""

import argparse
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
from table import alternate, show, timed

# Bytes of the tensor -> trips in a round.
SIZES = {8: 500, 64 << 10: 200, 1 << 20: 40, 16 << 20: 5}

Transfer = Callable[[Tensor], object]


def over(group: dist.ProcessGroup) -> tuple[Transfer, Transfer]:
    other = 1 - dist.get_rank()
    return (
        lambda x: dist.send(x, other, group=group),
        lambda x: dist.recv(x, other, group=group),
    )


def over_mpi(comm: MPI.Comm) -> tuple[Transfer, Transfer]:
    other = 1 - comm.rank
    return (lambda x: comm.Send(x.numpy(), other), lambda x: comm.Recv(x.numpy(), other))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("smddp")
    if dist.get_world_size() != 2:
        raise SystemExit("this benchmark is for two ranks: mpirun -np 2")
    gloo = dist.new_group(backend="gloo")
    world = dist.group.WORLD
    assert world is not None
    ways = {"gloo": over(gloo), "Open MPI": over_mpi(MPI.COMM_WORLD), "smddp": over(world)}
    answer = torch.zeros(1, dtype=torch.float64)
    for nbytes, trips in SIZES.items():
        fresh = torch.rand(nbytes // 4)

        def side(send: Transfer, receive: Transfer, fresh=fresh, trips=trips) -> float:
            x = torch.empty_like(fresh)
            seconds = 0.0
            dist.barrier()

            def out() -> None:
                send(x)
                receive(answer)

            def back() -> None:
                got = torch.empty_like(fresh)
                receive(got)
                got.sum()
                send(answer)

            for _ in range(trips):
                x.copy_(fresh)
                seconds += timed(out if dist.get_rank() == 0 else back)
            return seconds / trips / 2

        def alone(fresh=fresh, trips=trips) -> float:
            def read() -> None:
                torch.empty_like(fresh).sum()

            return sum(timed(read) for _ in range(trips)) / trips / 2

        sides = {name: lambda way=way: side(*way) for name, way in ways.items()}
        sides["memory and sum alone"] = alone
        for one in sides.values():
            one()
        times = alternate(sides, args.rounds)
        if dist.get_rank() == 0:
            size = f"{nbytes} B" if nbytes < 1024 else f"{nbytes >> 10} KiB"
            show(f"{size} to the other rank and 8 B back, half of it", "us", 1e6, times, "gloo")
    dist.destroy_process_group()


main()
