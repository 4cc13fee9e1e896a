"""What does it cost a gather over the TP_GROUP that lengths are not known?

    mpirun -np 2 --bind-to core python benchmarks/gather_lengths.py

"known" is ``primitives.gather`` of lengths that the caller has, "unknown" is
``smp.nn.utils.fused_allgather_for_tp``, which finds out.  A size is that of one rank's tensor;
no gradients.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import smp
from smp.tensor_parallel import primitives
from table import alternate, show, timed

# Bytes of one rank's tensor -> calls in a round.
SIZES = {64: 400, 4 << 10: 400, 64 << 10: 200, 1 << 20: 20}


def side(call: Callable[[Tensor], Tensor], x: Tensor, calls: int) -> float:
    dist.barrier()

    def run() -> None:
        for _ in range(calls):
            call(x)

    return timed(run) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41)
    args = parser.parse_args()
    torch.set_num_threads(1)
    smp.init({"tensor_parallel_degree": int(os.environ["OMPI_COMM_WORLD_SIZE"])})
    for nbytes, calls in SIZES.items():
        x = torch.rand(nbytes // 4)
        lengths = [x.numel()] * smp.tp_size()
        sides = {
            "known": partial(side, lambda x, n=lengths: primitives.gather(x, 0, n), x, calls),
            "unknown": partial(
                side, lambda x: smp.nn.utils.fused_allgather_for_tp(x, 0), x, calls
            ),
        }
        for one in sides.values():
            one()
        times = alternate(sides, args.rounds)
        if smp.rank() == 0:
            show(f"gather of {nbytes} B, {smp.tp_size()} ranks", "us", 1e6, times, "known")


main()
