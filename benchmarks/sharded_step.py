"""How long is a step with sharded optimizer state, against plain data parallelism?

    mpirun -np 2 --bind-to core python benchmarks/sharded_step.py [--batch 16] [--rounds 5]

An MLP of 30 M parameters with AdamW; a step is forward, backward, exchange and update, on one
microbatch:

- "smp": plain replicas;
- "smp, sharded": ``shard_optimizer_state``;
- "DDP" and "ZeRO": torch's DistributedDataParallel over smddp, with AdamW and with
  ZeroRedundancyOptimizer.

A round is a job of each side: a few steps to warm up, then the mean of the others.
"""

import argparse
import gc
import time
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import smp
from table import alternate, show

LAYERS, WARM, STEPS = 10, 3, 10


@smp.step
def smp_step(model: nn.Module, x: Tensor) -> None:
    model.backward(model(x).square().mean())


def ddp_step(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def net(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS))
    return nn.Sequential(*layers)


def adamw(parameters: Iterator[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def in_smp(shape: tuple[int, int], sharded: bool) -> float:
    smp.reset()
    smp.init({"shard_optimizer_state": sharded})
    model = smp.DistributedModel(net(shape[1]))
    optimizer = smp.DistributedOptimizer(adamw(model.parameters()))
    return seconds(smp_step, model, optimizer, shape)


def in_ddp(shape: tuple[int, int], sharded: bool) -> float:
    smp.reset()
    smp.init({})
    model = DistributedDataParallel(net(shape[1]), process_group=smp.get_dp_process_group())
    optimizer = adamw(model.parameters())
    if sharded:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            process_group=smp.get_dp_process_group(),
            lr=1e-4,
        )
    return seconds(ddp_step, model, optimizer, shape)


def seconds(
    step: Callable, model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, int]
) -> float:
    """Of one step of a job, the slowest rank's mean."""
    x = torch.randn(shape)
    for number in range(WARM + STEPS):
        if number == WARM:
            smp.barrier()
            start = time.perf_counter()
        optimizer.zero_grad()
        step(model, x)
        optimizer.step()
    smp.barrier()
    taken = (time.perf_counter() - start) / STEPS
    del model, optimizer
    gc.collect()
    return max(smp.allgather(taken, smp.WORLD))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=1732, help="of each of the 10 layers")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    shape = args.batch, args.width
    sides = {
        "smp": lambda: in_smp(shape, False),
        "smp, sharded": lambda: in_smp(shape, True),
        "DDP": lambda: in_ddp(shape, False),
        "ZeRO": lambda: in_ddp(shape, True),
    }
    times = alternate(sides, args.rounds)
    if smp.rank() == 0:
        title = f"A step of 10 layers of width {args.width}, batch {args.batch}"
        show(title, "ms", 1e3, times, "smp")
    dist.barrier()


if __name__ == "__main__":
    main()
