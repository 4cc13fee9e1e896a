"""How close to the ideal pipeline does a loop over blocks come on more ranks than cores?

    mpirun -np 4 python benchmarks/sleeping_stages.py [--block-ms 5] [--static-mode]

The blocks sleep, for ``--block-ms`` forward and twice as long backward, so the ranks need
hardly any processor: what is left of the ideal is the order and the messages.  The ideal is
T1 (m + p - 1) / (m p), with T1 the time of one process for the same blocks and m = 8
microbatches, measured in the same run: sleeps take longer than asked for.  The sides are
chains and requests for each block (``fast_mode=False``), by ``active_microbatches``.  With
``--static-mode`` chains alone run: the other side would be another order.
"""

import argparse
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import smp
from smp.modules.remote_modules import TRAINS
from table import alternate, machine, timed

MICROBATCHES = 8
WIDTH = 8


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * ctx.seconds)
        return grad, None


class Block(nn.Module):
    def __init__(self, seconds: float):
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x, mask):
        return Sleep.apply(self.linear(x), self.seconds) * mask


class Net(nn.Module):
    """A root with a loop, as models of transformers are."""

    def __init__(self, blocks: int, seconds: float):
        super().__init__()
        self.blocks = nn.ModuleList(Block(seconds) for _ in range(blocks))

    def forward(self, x):
        mask = torch.ones_like(x)
        for block in self.blocks:
            x = block(x, mask)
        return x.square().mean()


def step_of(blocks: int, seconds: float, active: int, static_mode: bool):
    """A step, and a function to turn its chains on or off."""
    smp.reset()
    smp.init(
        {
            "pipeline_parallel_degree": -1,
            "microbatches": MICROBATCHES,
            "active_microbatches": active,
            "static_mode": static_mode,
        }
    )
    net = Net(blocks * smp.pp_size(), seconds)
    smp.set_partition(net, 0)
    for at, block in enumerate(net.blocks):
        smp.set_partition(block, at // blocks)
    model = smp.DistributedModel(net)

    @smp.step
    def train(x):
        model.backward(model(x))

    train(torch.ones(MICROBATCHES, WIDTH))
    tables = smp.state.job("the benchmark").runtime.tables
    flags = tables.entry_flags

    def run(chains: bool) -> float:
        tables.entry_flags = flags if chains else bytes(f & TRAINS for f in flags)
        dist.barrier()
        return timed(lambda: (train(torch.ones(MICROBATCHES, WIDTH)), dist.barrier()))

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=3, help="of each rank")
    parser.add_argument("--block-ms", type=float, default=5)
    parser.add_argument("--static-mode", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    seconds = args.block_ms / 1e3
    rows = []
    smp.init({"pipeline_parallel_degree": -1})
    ranks, every = smp.pp_size(), {smp.pp_size() + 2, MICROBATCHES}  # the default
    alone = Net(args.blocks * ranks, seconds)

    def one_process():
        for _ in range(MICROBATCHES):
            alone(torch.ones(1, WIDTH)).backward()

    for active in sorted(every):
        run = step_of(args.blocks, seconds, active, args.static_mode)
        sides = {
            "T1": lambda: timed(one_process) if smp.rank() == 0 else 0.0,
            "a request for each block": partial(run, False),
            "chains": partial(run, True),
        }
        if args.static_mode:
            del sides["a request for each block"]
        for name, side in sides.items():
            for _ in range(7 if args.static_mode and name == "chains" else 1):  # it records 5
                side()
        times = alternate(sides, args.rounds)
        share = (MICROBATCHES + ranks - 1) / (MICROBATCHES * ranks)
        ideal = [t * share for t in times.pop("T1")]
        rows += [(active, name, ideal, rounds) for name, rounds in times.items()]
    if smp.rank() == 0:
        report(ranks, args, rows)


def report(ranks: int, args: argparse.Namespace, rows: list) -> None:
    blocks = f"{args.blocks} blocks of {args.block_ms:g} ms a rank"
    print(f"\np = {ranks}, m = {MICROBATCHES}, {blocks}")
    print(f"{machine()}, torch {torch.__version__}\n")
    print("| active | side | min (ms) | best / ideal | median of ideal reached |")
    print("|---|---|---|---|---|")
    for active, name, ideal, rounds in rows:
        reached = statistics.median(i / t for i, t in zip(ideal, rounds, strict=True))
        best, of_best = min(rounds) * 1e3, min(ideal) / min(rounds)
        print(f"| {active} | {name} | {best:.0f} | {of_best:.3f} | {reached:.3f} |")


main()
