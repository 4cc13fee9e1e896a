"""What does averaging gradients cost a training step of DistributedDataParallel?

    mpirun -np 2 --bind-to core python benchmarks/ddp_step.py

An MLP of 30 M parameters with DDP as it comes: over gloo, over smddp, and with PyTorch's
hook that leaves gradients as they are (``noop_hook``).  What a side takes above that one is
what communication costs it, after what DDP hides behind the backward.
"""

import argparse
import copy
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
from table import alternate, best_and_median, show, timed

WIDTH, LAYERS = 1732, 10
BATCHES = (16, 64, 256)
NOTHING = "no communication"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("smddp")
    torch.manual_seed(dist.get_rank())
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    net = nn.Sequential(*layers)

    def replicated(group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
        return DistributedDataParallel(
            copy.deepcopy(net), process_group=group, gradient_as_bucket_view=True
        )

    models = {
        NOTHING: replicated(),
        "gloo": replicated(dist.new_group(backend="gloo")),
        "smddp": replicated(),
    }
    models[NOTHING].register_comm_hook(None, noop_hook)
    for batch in BATCHES:
        x = torch.randn(batch, WIDTH)

        def side(model: nn.Module, x=x) -> float:
            model.zero_grad()
            dist.barrier()
            return timed(lambda: (model(x).square().mean().backward(), dist.barrier()))

        sides = {name: lambda m=model: side(m) for name, model in models.items()}
        for one in sides.values():
            one(), one()
        times = alternate(sides, args.rounds)
        if dist.get_rank() == 0:
            show(f"DDP step, 30 M parameters, batch {batch}", "ms", 1e3, times, "gloo")
            report(times)
    dist.destroy_process_group()


def report(times: dict[str, list[float]]) -> None:
    least = best_and_median(times[NOTHING])
    ours, theirs = (
        [a - b for a, b in zip(best_and_median(times[name]), least, strict=True)]
        for name in ("smddp", "gloo")
    )
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    print(f"\nabove {NOTHING}, smddp / gloo: best {ratios[0]:.2f}, median {ratios[1]:.2f}")


main()
