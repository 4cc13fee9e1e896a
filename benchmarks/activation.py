"""How fast does a 16 MiB activation get to the other rank and is read there?

    mpirun -np 2 python benchmarks/activation.py

smp: one remote call under no_grad with a 16 MiB argument, whose owner reads it whole (a
sum) and returns a number.  gloo and MPI: send, receive into fresh memory, the same sum,
and a number back.  The read is part of every side.
"""

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn

import smp
from table import alternate, show, timed

BYTES = 16 << 20
CALLS = 10
ROUNDS = 15


class Reader(nn.Module):
    def forward(self, x):
        return x.sum()


class Sender(nn.Module):
    def __init__(self):
        super().__init__()
        self.far = Reader()

    def forward(self, x, calls):
        for _ in range(calls):
            self.far(x)


def main() -> None:
    torch.set_num_threads(1)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
    net = Sender()
    smp.set_partition(net, 0)
    smp.set_partition(net.far, 1)
    model = smp.DistributedModel(net)
    x = torch.randn(BYTES // 4)
    seconds = [0.0]

    @smp.step(non_split_inputs=["x"])
    def send(x):
        with torch.no_grad():
            seconds[0] = timed(lambda: model(x, CALLS)) / CALLS

    def ours() -> float:
        send(x)
        return seconds[0]

    def over(send_to, receive_from) -> float:
        def loop():
            for _ in range(CALLS):
                if smp.rank() == 0:
                    send_to(x, 1)
                    receive_from(torch.empty(1), 1)
                else:
                    fresh = torch.empty(BYTES // 4)
                    receive_from(fresh, 0)
                    send_to(fresh.sum().reshape(1), 0)

        dist.barrier()
        return timed(loop) / CALLS

    world = MPI.COMM_WORLD

    def mpi_send(tensor, rank):
        world.Send(tensor.numpy(), rank)

    def mpi_receive(tensor, rank):
        world.Recv(tensor.numpy(), rank)

    sides = {
        "gloo": lambda: over(dist.send, dist.recv),
        "Open MPI": lambda: over(mpi_send, mpi_receive),
        "smp": ours,
        "the sum alone": lambda: timed(x.sum),
    }
    for side in sides.values():
        side()
    times = alternate(sides, ROUNDS)
    if smp.rank() == 0:
        show("16 MiB to the other rank, and read there", "ms", 1e3, times, "gloo")


main()
