"""What does one order of collectives cost in a pipeline, over having none?

    mpirun -np 4 python benchmarks/order.py

pp 2 x tp 2.  Each of 8 modules, half on each stage, sums 64 KiB over the tp_ranks in its
forward and in its backward.  "none" leaves the sums out, "ring" orders these collectives
alone, in the TP_GROUP, "server" is ``deterministic_server``, which orders all that runs on both
tp_ranks, and "server, held" is that with plain collectives, in which a rank does nothing else.
"""

import argparse
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import smp
from smp.tensor_parallel.backward import order
from table import machine, timed

MODULES = 8
MICROBATCHES = 8
SIDES = ("none", "ring", "server", "server, held")


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: "Summed") -> Tensor:
        ctx.module = module
        ctx.call = order.Call.of_module(module.path) if module.side != "server, held" else None
        return _sum(x, module, ctx.call)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        call = None if ctx.call is None else ctx.call.backward()
        return _sum(gradient, ctx.module, call), None


def _sum(x: Tensor, module: "Summed", call: order.Call | None) -> Tensor:
    out = x.clone()
    if call is None:
        dist.all_reduce(out, group=smp.get_dp_process_group())
    elif not smp.is_tracing():  # which one rank may do alone
        group = smp.get_tp_process_group()
        call.run(lambda is_async: dist.all_reduce(out, group=group, async_op=is_async))
    return out


class Summed(nn.Module):
    def __init__(self, width: int, path: str, side: str):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.path, self.side = path, side

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        return x if self.side == "none" else Sum.apply(x, self)


@smp.step
def train(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def seconds_of_a_step(side: str, nbytes: int, steps: int) -> float:
    """The best step of a job with this side; its slowest rank counts."""
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "tensor_parallel_degree": 2,
            "microbatches": MICROBATCHES,
            "deterministic_server": side.startswith("server"),
        }
    )
    width = 64
    torch.manual_seed(3)
    net = nn.Sequential(*(Summed(width, f"module {i}", side) for i in range(MODULES)))
    for i, module in enumerate(net):  # forth and back between the stages
        smp.set_partition(module, i % 2)
    model = smp.DistributedModel(net)
    x = torch.randn(MICROBATCHES * nbytes // (4 * width), width)
    for _ in range(3):
        train(model, x)
    best = min(timed(lambda: train(model, x)) for _ in range(steps))
    slowest = max(smp.allgather(best, smp.WORLD))
    smp.reset()
    return slowest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--bytes", type=int, default=64 << 10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(args.rounds):
        for side in SIDES:
            times[side].append(1e3 * seconds_of_a_step(side, args.bytes, args.steps))
    smp.init({})
    if smp.rank() == 0:
        show(times, args.bytes)


def show(times: dict[str, list[float]], nbytes: int) -> None:
    best = {side: min(rounds) for side, rounds in times.items()}
    ring = best["ring"] - best["none"]
    print(f"\nsums of {nbytes >> 10} KiB in {MODULES} modules, {MICROBATCHES} microbatches")
    print(f"{machine()}, torch {torch.__version__}\n")
    print("| side | best step (ms) | median of rounds (ms) | above none (ms) | of the ring's |")
    print("|---|---|---|---|---|")
    for side in SIDES:
        above = best[side] - best["none"]
        ratio = f"{above / ring:.2f}" if ring > 0 else "-"
        median = statistics.median(times[side])
        print(f"| {side} | {best[side]:.2f} | {median:.2f} | {above:.2f} | {ratio} |")


main()
