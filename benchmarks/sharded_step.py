"""How long is a step with shards on the ranks, against plain data parallelism, and how much
memory does it take?

    mpirun -np 2 --bind-to core python benchmarks/sharded_step.py [--batch 16] [--rounds 5]

An MLP of 30 M parameters with AdamW; a step is forward, backward, exchange and update, on one
microbatch:

- "smp": plain replicas;
- "smp, sharded": ``shard_optimizer_state``;
- "smp, parameters": ``sharded_data_parallel_degree``, all gathered at a step's begin;
- "smp, on demand": the same with room for two layers, ``sdp_max_live_parameters``;
- "DDP" and "ZeRO": torch's DistributedDataParallel over smddp, with AdamW and with
  ZeroRedundancyOptimizer;
- "FSDP2": torch's ``fully_shard`` of each layer over smddp.

A round is a job of each side: a few steps to warm up, then the mean of the others.  The second
table has the growth of a rank's resident memory from before the model to the peak of the steps
after the first ones, by ``MALLOC_MMAP_THRESHOLD_=65536`` without holes in the heap.
"""

import argparse
import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
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


def in_smp(shape: tuple[int, int], **options: object) -> float:
    smp.reset()
    smp.init(options)
    begin_memory()
    model = smp.DistributedModel(net(shape[1]))
    optimizer = smp.DistributedOptimizer(adamw(model.parameters()))
    return seconds(smp_step, model, optimizer, shape)


def in_ddp(shape: tuple[int, int], sharded: bool) -> float:
    smp.reset()
    smp.init({})
    begin_memory()
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


def in_fsdp(shape: tuple[int, int]) -> float:
    smp.reset()
    smp.init({})
    begin_memory()
    model, mesh = net(shape[1]), DeviceMesh.from_group(smp.get_dp_process_group(), "cpu")
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return seconds(ddp_step, model, adamw(model.parameters()), shape)


def in_status(name: str) -> float:
    """MiB of this process, as proc(5) has them."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(name))


before: list[float] = []
peaks: dict[str, list[float]] = {}


def begin_memory() -> None:
    gc.collect()
    before[:] = [in_status("VmRSS")]


def with_peak(name: str, side: Callable[[], float]) -> Callable[[], float]:
    def measured() -> float:
        taken = side()
        mine = in_status("VmHWM") - before[0]
        peaks.setdefault(name, []).append(max(smp.allgather(mine, smp.WORLD)))
        return taken

    return measured


def seconds(
    step: Callable, model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, int]
) -> float:
    """Of one step of a job, the slowest rank's mean."""
    x = torch.randn(shape)
    for number in range(WARM + STEPS):
        if number == WARM:
            smp.memory_report(reset_peak=True)
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
    dp = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    shards = {
        "sharded_data_parallel_degree": dp,
        "sdp_param_persistence_threshold": args.width + 1,
        "sdp_gradient_clipping": 0,
    }
    few = {**shards, "sdp_max_live_parameters": 2 * args.width**2}
    sides = {
        "smp": lambda: in_smp(shape),
        "smp, sharded": lambda: in_smp(shape, shard_optimizer_state=True),
        "smp, parameters": lambda: in_smp(shape, **shards),
        "smp, on demand": lambda: in_smp(shape, **few),
        "DDP": lambda: in_ddp(shape, False),
        "ZeRO": lambda: in_ddp(shape, True),
        "FSDP2": lambda: in_fsdp(shape),
    }
    sides = {name: with_peak(name, side) for name, side in sides.items()}
    times = alternate(sides, args.rounds)
    if smp.rank() == 0:
        title = f"A step of 10 layers of width {args.width}, batch {args.batch}"
        show(title, "ms", 1e3, times, "smp")
        show("Peak memory of a rank", "MiB", 1, peaks, "smp")
    dist.barrier()


if __name__ == "__main__":
    main()
