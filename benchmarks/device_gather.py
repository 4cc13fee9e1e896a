"""How fast do GPUs of one host gather tensors, against NCCL and a plain copy?

    mpirun -np 2 python benchmarks/device_gather.py

An all-gather of 1, 16 and 64 MiB from each rank: by the GPUs' own copies, by NCCL, and what
one rank gets of it in one copy, from another GPU or inside the only one.  The last table has
the same with a kernel beside it on another stream, a matrix product that fills the GPU: how
much longer that takes while an all-gather runs.  Every result is checked before anything is
timed.  NCCL does not run with two ranks on one GPU: its column is left out there.

Without a GPU it says so and ends; ``--stand-in`` runs it all the same, on the tests'
pretended accelerator, to try the program: such times say nothing.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
import smp
from table import show, timed

SIZES = (1 << 20, 16 << 20, 64 << 20)  # bytes of each rank
CALLS = 10  # in a row
ROUNDS = 10
PRODUCT = 8192  # rows of the matrices beside


def find_device(stand_in: bool) -> torch.device:
    """This rank's, made current."""
    if stand_in:
        sys.path.append(str(Path(__file__).resolve().parent.parent))
        from tests import accelerator

        accelerator.use_driver()
        return accelerator.load()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/device_gather.py: there is no GPU here: nothing was measured")
    on = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(on)
    return on


def seconds(call: Callable[[], object]) -> list[float]:
    """Of one of several calls in a row, by round."""
    rounds = []
    for _ in range(ROUNDS + 1):

        def calls() -> None:
            for _ in range(CALLS):
                call()
            torch.accelerator.synchronize()

        dist.barrier()
        rounds.append(timed(calls) / CALLS)
    return rounds[1:]


def plain_copy(out: torch.Tensor) -> Callable[[], object]:
    """What this rank gets from the others, in one copy."""
    part = out[: out.numel() // dist.get_world_size() * (dist.get_world_size() - 1)]
    there = part.device
    if there.type == "cuda" and torch.cuda.device_count() > 1:
        there = torch.device("cuda", (there.index + 1) % torch.cuda.device_count())
    source = torch.empty_like(part, device=there)
    return lambda: part.copy_(source, non_blocking=True)


def check(gather: Callable[[], object], own: torch.Tensor, out: torch.Tensor) -> None:
    """See that it gathers."""
    out.zero_()
    gather()
    parts = out.view(dist.get_world_size(), -1).cpu()
    for rank, part in enumerate(parts):
        assert torch.equal(part, (own - dist.get_rank() + rank).cpu()), "wrong bytes arrived"


def beside(ways: dict[str, Callable[[], object]], on: torch.device) -> dict[str, list[float]]:
    """Of a product of matrices, alone and while an all-gather runs on another stream."""
    a, b = (torch.ones(PRODUCT, PRODUCT, device=on, dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    aside = torch.cuda.Stream()
    times = {"product alone": seconds(lambda: torch.mm(a, b, out=c))}
    for name, gather in ways.items():

        def both(gather: Callable[[], object] = gather) -> None:
            with torch.cuda.stream(aside):
                gather()
            torch.mm(a, b, out=c)

        times[f"with {name}"] = seconds(both)
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stand-in", action="store_true")
    on = find_device(parser.parse_args().stand_in)
    dist.init_process_group("smddp")
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = on.type != "cuda" or torch.cuda.device_count() < size
    nccl = None if alone else dist.new_group(backend="nccl")
    where = torch.cuda.get_device_name() if on.type == "cuda" else "a stand-in: no figures"
    ways: dict[str, Callable[[], object]] = {}
    for bytes_ in SIZES:
        own = torch.arange(bytes_ // 4, dtype=torch.int32, device=on) + rank
        out = torch.empty(size * own.numel(), dtype=torch.int32, device=on)
        ways = {"smddp": lambda o=out, x=own: dist.all_gather_into_tensor(o, x)}
        if nccl is not None:
            ways["nccl"] = lambda o=out, x=own: dist.all_gather_into_tensor(o, x, nccl)
        for gather in ways.values():
            check(gather, own, out)
        times = {"plain copy": seconds(plain_copy(out))}
        times.update((name, seconds(gather)) for name, gather in ways.items())
        if rank == 0:
            title = f"{bytes_ >> 20} MiB of each of {size} ranks, {where}"
            show(title, "us", 1e6, times, "plain copy")
    if on.type == "cuda":
        times = beside(ways, on)
        if rank == 0:
            show(f"a product beside 64 MiB, {where}", "us", 1e6, times, "product alone")
    if rank == 0:
        print(smp.comm_report())
    dist.destroy_process_group()


main()
