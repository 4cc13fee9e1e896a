"""Does memory stay flat over many steps?  Trains, evaluates, and fails now and then.

    mpirun -np 2 python benchmarks/soak.py [steps]

Prints, for each rank, resident memory, Python objects, tensors and bytes of the pool in
use, at ten moments.  After the first they must not grow.
"""

import argparse
import gc
import os

import torch
from torch import nn

import smp

MOMENTS = 10
RAISE_EVERY = 50
EVALUATE_EVERY = 10


class Part(nn.Linear):
    """A layer that raises when it is told to."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ArithmeticError("told to")
        return torch.relu(super().forward(x))


def resident_kib() -> int:
    """Of this process, in KiB."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024


def report(step: int) -> None:
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(o), torch.Tensor) for o in objects)
    pool = smp._core.counters()["pool_in_use"]
    threads = len(os.listdir("/proc/self/task"))
    print(
        f"rank {smp.rank()}{step:>8} steps{resident_kib():>10} KiB{len(objects):>9} objects"
        f"{tensors:>6} tensors{pool:>9} B of pool{threads:>4} threads",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", type=int, nargs="?", default=10_000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4})
    net = nn.Sequential(*(Part(64, 64) for _ in range(4)), nn.BatchNorm1d(64))
    for i, part in enumerate(net):
        smp.set_partition(part, i % 2)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-4))

    @smp.step
    def train(model, x):
        loss = model(x).pow(2).mean()
        model.backward(loss)
        return loss

    @smp.step
    def evaluate(model, x):
        return model(x)

    x = torch.randn(32, 64)
    for step in range(steps + 1):
        if step % max(1, steps // MOMENTS) == 0:
            report(step)
        optimizer.zero_grad()
        net[1].fails = step % RAISE_EVERY == RAISE_EVERY - 1
        try:
            train(model, x).reduce_mean()
            optimizer.step()
        except ArithmeticError:
            pass
        net[1].fails = False
        if step % EVALUATE_EVERY == 0:
            with torch.no_grad():
                evaluate(model, x).concat()


if __name__ == "__main__":
    main()
