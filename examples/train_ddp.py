"""Trains a small network with plain DistributedDataParallel over the backend smddp.

    mpirun -np 2 python examples/train_ddp.py
    torchrun --nproc-per-node 2 examples/train_ddp.py

Nothing here is ours but one import and the name of the backend: --backend gloo is the same
program on PyTorch's own.  It learns to add two numbers from their digits, drawn as dots.
"""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401  (the backend smddp)

# Three dots wide and five high, the rows from top to bottom.
DIGITS = [
    "###,#.#,#.#,#.#,###",
    "..#,..#,..#,..#,..#",
    "###,..#,###,#..,###",
    "###,..#,###,..#,###",
    "#.#,#.#,###,..#,..#",
    "###,#..,###,..#,###",
    "###,#..,###,#.#,###",
    "###,..#,..#,..#,..#",
    "###,#.#,###,#.#,###",
    "###,#.#,###,..#,###",
]
SUMS = 19  # 0 to 18


def draw_batch(size: int, noise: float) -> tuple[Tensor, Tensor]:
    """Pictures [size, 2 * 15] of two digits side by side, with noise; their sums [size]."""
    dots = torch.tensor([[float(dot == "#") for dot in d.replace(",", "")] for d in DIGITS])
    numbers = torch.randint(10, (size, 2))
    pictures = dots[numbers].flatten(1)
    return pictures + noise * torch.randn_like(pictures), numbers.sum(1)


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(30, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, SUMS),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="smddp")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=256, help="of all ranks together")
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # DDP starts all ranks from the parameters of rank 0 anyway
    model = DistributedDataParallel(make_model(args.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)  # each rank draws pictures of its own

    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        pictures, sums = draw_batch(args.batch // size, noise=0.2)
        loss = F.cross_entropy(model(pictures), sums)
        optimizer.zero_grad()
        loss.backward()  # gradients are averaged meanwhile
        optimizer.step()
        if step % 50 == 0:
            mean = loss.detach()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            if rank == 0:
                ms = 1000 * (time.perf_counter() - start) / step
                print(f"step {step:4}   loss {mean.item():.4f}   {ms:.1f} ms a step")

    pictures, sums = draw_batch(1000, noise=0.2)
    right = (model(pictures).argmax(1) == sums).float().mean()
    dist.all_reduce(right, dist.ReduceOp.AVG)
    if rank == 0:
        print(
            f"{size} ranks on {args.backend}: {100 * right.item():.1f} % of the sums are right"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
