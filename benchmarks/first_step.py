"""What do tracing and partition cost before the first step, against a plain forward?

    mpirun -np 2 python benchmarks/first_step.py

A model of 1,000 modules whose forward takes 100 ms or more.
"""

import torch
from torch import nn

import smp
from table import show, timed

ROUNDS = 5


def make() -> nn.Module:
    blocks = (
        nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512)) for _ in range(250)
    )
    return nn.Sequential(*blocks)


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(64, 512)
    times: dict[str, list[float]] = {"plain forward": [], "first step less a step": []}
    modules = 0
    for _ in range(ROUNDS):
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
        net = make()
        modules = sum(1 for _ in net.modules())
        with torch.no_grad():
            net(x)
            times["plain forward"].append(timed(lambda net=net: net(x)))
        model = smp.DistributedModel(net)

        @smp.step
        def forward(x, model=model):
            with torch.no_grad():
                return model(x)

        first = timed(lambda step=forward: step(x))
        later = timed(lambda step=forward: step(x))
        times["first step less a step"].append(first - later)
        rank = smp.rank()
        smp.reset()
    if rank == 0:
        show(f"Tracing and partition of {modules} modules", "ms", 1e3, times, "plain forward")


main()
