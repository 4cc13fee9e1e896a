"""How fast are the collectives of the backend smddp between hosts, beside gloo?

    python benchmarks/host_collectives.py [--ranks N]

The hosts are two network namespaces of this machine, each with a ``/dev/shm`` of its own,
joined by a veth pair: what limits large tensors is the kernel's TCP on the cores that all
share.  Inputs are written before each call; a time is that of the slowest rank, and does
not include reading the result.  Needs root, ``ip`` and ``unshare``.
"""

import argparse
import os
import subprocess
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
from table import alternate, show, timed
from two_hosts import ADDRESSES, on, two_hosts

# Bytes of one rank's input -> calls in a round.
SIZES = {8: 100, 4 << 10: 100, 256 << 10: 20, 16 << 20: 3, 128 << 20: 1}
OWN_SHM = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'

Call = Callable[[Tensor, Tensor], object]  # input, output


def wait_for_all(processes: list[subprocess.Popen]) -> None:
    try:
        if sum(process.wait() != 0 for process in processes):
            raise SystemExit(1)
    finally:
        for process in processes:
            process.kill()


def start_hosts() -> None:
    """This script once on each host, with shared memory of its own."""
    again = [sys.executable, *sys.argv]
    with two_hosts():
        wait_for_all(
            [
                subprocess.Popen(
                    on(host, "unshare", "-m", "sh", "-c", OWN_SHM, "sh", *again),
                    env=os.environ | {"HOST_OF_TWO": str(host)},
                )
                for host in range(2)
            ]
        )


def start_ranks(ranks: int) -> None:
    """This script once for each rank of this host."""
    here = ranks // 2
    first = int(os.environ["HOST_OF_TWO"]) * here
    common = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "net",
        "OMP_NUM_THREADS": "1",
    }
    wait_for_all(
        [
            subprocess.Popen(
                [sys.executable, *sys.argv], env=os.environ | common | {"RANK": str(rank)}
            )
            for rank in range(first, first + here)
        ]
    )


def calls(group: dist.ProcessGroup) -> dict[str, Call]:
    return {
        "all-reduce": lambda x, out: dist.all_reduce(x, group=group),
        "all-gather": lambda x, out: dist.all_gather_into_tensor(out, x, group=group),
        "reduce-scatter": lambda x, out: dist.reduce_scatter_tensor(
            out[: x.numel() // group.size()], x, group=group
        ),
        "broadcast": lambda x, out: dist.broadcast(x, 0, group=group),
    }


def compare(rounds: int) -> None:
    """What one rank does."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("smddp")
    ours = dist.group.WORLD
    assert ours is not None
    gloo = dist.new_group(backend="gloo")
    ranks = dist.get_world_size()
    for nbytes, count in SIZES.items():
        fresh = torch.rand(nbytes // 4)
        x = torch.empty_like(fresh)
        out = torch.empty(fresh.numel() * ranks)
        for operation in calls(ours):
            if nbytes // 4 % ranks != 0:
                continue

            def side(call: Call, fresh=fresh, x=x, out=out, count=count) -> float:
                seconds = torch.zeros(1)
                for _ in range(count):
                    x.copy_(fresh)
                    dist.barrier(gloo)  # or who sends alone would run ahead
                    seconds += timed(lambda: call(x, out))
                dist.all_reduce(seconds, dist.ReduceOp.MAX, gloo)
                return seconds.item() / count

            ways = {"gloo": calls(gloo)[operation], "smddp": calls(ours)[operation]}
            sides = {name: lambda way=way: side(way) for name, way in ways.items()}
            for one in sides.values():
                one()
            times = alternate(sides, rounds)
            if dist.get_rank() == 0:
                size = f"{nbytes} B" if nbytes < 1 << 10 else f"{nbytes >> 10} KiB"
                title = f"{operation} of {size}, {ranks} ranks on 2 hosts"
                show(title, "us", 1e6, times, "gloo")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=2, help="half of them on each host")
    args = parser.parse_args()
    if "RANK" in os.environ:
        compare(args.rounds)
    elif "HOST_OF_TWO" in os.environ:
        start_ranks(args.ranks)
    else:
        start_hosts()


main()
