"""How fast does a GPU's tensor reach another rank, against a plain copy on the devices?

    mpirun -np 2 python benchmarks/device_pool.py [--mib 1]

Ten tensors of 64 MiB (``--mib``) go in a row from pp_rank 0 to a module of pp_rank 1, through
the device pool and through host memory.  The answer to the last one has an element of it.
Each rank has its own GPU, or both share the only one.
The plain copy is PyTorch's, from the one GPU to the other, or inside the only one.  A tensor
makes two of them, or one where the receiver has offered memory.  Every tensor that arrives is
checked before anything is timed.

Without a GPU it says so and ends; ``--stand-in`` runs it all the same, on the tests'
pretended accelerator, to try the program: such times say nothing.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

import smp
from table import show, timed

CALLS = 10  # in a row
ROUNDS = 10


class Taker(nn.Module):
    """Answers with nothing of what it gets, with its last element, or with its sum."""

    def forward(self, x, what):
        return {"nothing": lambda: 0, "last": lambda: x[-1:].clone(), "sum": x.sum}[what]()


class Sender(nn.Module):
    def __init__(self):
        super().__init__()
        self.far = Taker()

    def forward(self, x, calls, what):
        for _ in range(calls - 1):
            self.far(x, "nothing")
        return self.far(x, what)


def find_device(stand_in: bool) -> None:
    """See that there is one."""
    if stand_in:
        sys.path.append(str(Path(__file__).resolve().parent.parent))
        from tests import accelerator

        accelerator.use_driver()
        torch.ops.pretend.use_driver_memory(True)
    elif not torch.cuda.is_available():
        sys.exit("benchmarks/device_pool.py: there is no GPU here: nothing was measured")


def own_device() -> torch.device:
    """This rank's GPU, after ``smp.init``."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    number = smp.local_rank() % torch.accelerator.device_count() if kind.type == "cuda" else 0
    torch.accelerator.set_device_index(number)
    return torch.device(kind.type, number)


def seconds_to_other_rank(on: torch.device, x: torch.Tensor) -> list[float]:
    """For one tensor, by round; on pp_rank 0."""
    net = Sender().to(on)
    smp.set_partition(net, 0)
    smp.set_partition(net.far, 1)
    model = smp.DistributedModel(net)
    rounds = []

    @smp.step(non_split_inputs=["x"])
    def check(x):
        with torch.no_grad():
            return torch.stack([model(x, 1, "sum") for _ in range(4)])

    @smp.step(non_split_inputs=["x"])
    def measure(x):
        with torch.no_grad():
            for _ in range(ROUNDS):

                def calls():
                    model(x, CALLS, "last")
                    torch.accelerator.synchronize()

                rounds.append(timed(calls) / CALLS)
        return 0

    totals = check(x).outputs[0].cpu()
    assert torch.equal(totals, x.sum().cpu().expand(4)), "wrong bytes arrived"
    measure(x)
    rounds.clear()
    measure(x)
    return rounds


def seconds_of_plain_copy(x: torch.Tensor) -> list[float]:
    there = x.device
    if x.device.type == "cuda" and torch.cuda.device_count() > 1:
        there = torch.device("cuda", 1)
    y = torch.empty_like(x, device=there)
    rounds = []
    for _ in range(ROUNDS):

        def copies():
            for _ in range(CALLS):
                y.copy_(x, non_blocking=True)
            torch.accelerator.synchronize()

        rounds.append(timed(copies) / CALLS)
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--mib", type=int, default=64)
    stand_in, mib = (given := parser.parse_args()).stand_in, given.mib
    times: dict[str, list[float]] = {}
    reports = []
    find_device(stand_in)
    for name, pool in {"device pool": 2 * CALLS * mib << 20, "through host memory": 0}.items():
        smp.init(
            {
                "pipeline_parallel_degree": 2,
                "microbatches": 1,
                "comm_device_pool_bytes": pool,
            }
        )
        on = own_device()
        x = torch.arange(mib << 18, dtype=torch.int32).to(on)  # the sum is exact
        if smp.pp_rank() == 0:
            times.setdefault("plain copy", seconds_of_plain_copy(x))
        smp.barrier()
        rounds = seconds_to_other_rank(on, x)
        if smp.pp_rank() == 0:
            times[name] = rounds
            reports.append(f"{name}:\n{smp.comm_report()}")
        smp.reset()
    if reports:
        print(*reports, sep="\n\n")
        name = torch.cuda.get_device_name() if on.type == "cuda" else "a stand-in: no figures"
        show(f"{mib} MiB to the other rank, {name}", "us", 1e6, times, "plain copy")


main()
