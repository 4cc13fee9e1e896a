"""What do different samples on each tp_rank save a recommender, against the same on all?

    mpirun -np 2 python benchmarks/ncf.py [--dense] [--batch 256] [--rounds 15]

The model and the sizes of Table 3 of the SageMaker paper: neural collaborative filtering of
318,133 users and 1,792 items, whose four tables are split over one TP_GROUP along their
vectors.  Both sides train on the same global batch, ``--batch`` samples a rank: "smp" has each
rank's own go through the model (indices are gathered, vectors come by an all-to-all); "same
batch" feeds all of them to every rank (``prescaled_batch``: slices of vectors are gathered).
A step is forward, backward and SGD.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from table import best_and_median, machine, timed

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.models.recommenders import NCF  # noqa: E402

USERS, ITEMS, MLP, GMF = 318_133, 1792, 512, 64
SIDES = {"smp": False, "same batch": True}  # name -> prescaled_batch

Batch = tuple[Tensor, Tensor, Tensor]


def split_over_all_ranks(prescaled_batch: bool) -> None:
    size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    smp.init({"tensor_parallel_degree": size, "prescaled_batch": prescaled_batch})


def make_net(sparse: bool) -> nn.Module:
    """With zeros in the tables, which cost less to make than random numbers."""

    def table(rows: int, width: int) -> nn.Module:
        whole = torch.zeros(rows, width)
        return smp.nn.DistributedEmbedding(rows, width, weight=whole, sparse=sparse)

    return NCF(USERS, ITEMS, MLP, GMF, make_table=table)


def trainer(net: nn.Module) -> Callable[[Batch], Tensor]:
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))

    @smp.step
    def step(model: nn.Module, users: Tensor, items: Tensor, clicks: Tensor) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(model(users, items), clicks)
        model.backward(loss)
        return loss

    def train(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = step(model, *batch)
        optimizer.step()
        return loss

    return train


def batches(count: int, samples: int) -> list[Batch]:
    """Of the whole TP_GROUP, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(0, USERS, (samples,), generator=generator),
            torch.randint(0, ITEMS, (samples,), generator=generator),
            torch.randint(0, 2, (samples,), generator=generator).float(),
        )
        for _ in range(count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dense", action="store_true", help="gradients of whole tables")
    parser.add_argument("--batch", type=int, default=256, help="samples of a rank")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20, help="of a side in a round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    nets = {}
    for name, same in SIDES.items():
        split_over_all_ranks(same)
        nets[name] = make_net(not args.dense)
        size, rank = smp.tp_size(), smp.tp_rank()
        smp.reset()
    whole = batches(args.steps, size * args.batch)
    own = [tuple(t.chunk(size)[rank] for t in batch) for batch in whole]
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(args.rounds):
        for name, same in SIDES.items():
            split_over_all_ranks(same)
            train = trainer(nets[name])
            fed = whole if same else own
            for batch in fed[:3]:
                train(batch)  # the first ones compare the ranks' samples
            dist.barrier()
            seconds = timed(functools.partial(run, train, fed))
            times[name].append(seconds / args.steps)
            smp.reset()
    if rank == 0:
        report(args, size, times)


def run(train: Callable[[Batch], Tensor], fed: list[Batch]) -> None:
    for batch in fed:
        train(batch)
    dist.barrier()


def report(args: argparse.Namespace, size: int, times: dict[str, list[float]]) -> None:
    kind = "dense" if args.dense else "sparse"
    print(f"NCF, {kind} gradients, {size} ranks, {args.batch} samples a rank")
    print(f"{machine()}, torch {torch.__version__}")
    print(f"command: {' '.join(sys.orig_argv[1:])}\n")
    print("| side | min (ms) | median (ms) | samples/s | same batch / side: best, median |")
    print("|---|---|---|---|---|")
    base = best_and_median(times["same batch"])
    for name, rounds in times.items():
        low, middle = best_and_median(rounds)
        throughput = size * args.batch / low
        print(
            f"| {name} | {low * 1e3:.2f} | {middle * 1e3:.2f} | {throughput:,.0f} | "
            f"{base[0] / low:.2f}, {base[1] / middle:.2f} |"
        )


main()
