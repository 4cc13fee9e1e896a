"""How long does a step without work take, by the model's number of parameters?

    mpirun -np 2 python benchmarks/empty_step.py

The step function calls no module.  The time is its begin and end on both ranks, with each
step's look at ``requires_grad`` and ``.grad`` of all parameters.
"""

import argparse

import torch
from torch import nn

import smp
from table import alternate, show, timed

PARAMETERS = (6, 200, 6000)


def a_side(parameters: int, steps: int) -> float:
    """Seconds of one step of a model with so many parameters, half of them on each rank."""
    smp.reset()
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
    layers = parameters // 4  # of each rank, with a weight and a bias
    net = nn.ModuleList(
        nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers))) for _ in range(2)
    )
    for rank, part in enumerate(net):
        smp.set_partition(part, rank)
    model = smp.DistributedModel(net)

    @smp.step
    def empty(model, x):
        return None

    x = torch.ones(1, 2)

    def loop():
        for _ in range(steps):
            empty(model, x)

    loop()
    return min(timed(loop) for _ in range(3)) / steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    names = {f"{n} parameters": n for n in PARAMETERS}
    sides = {name: lambda n=n: a_side(n, args.steps) for name, n in names.items()}
    times = alternate(sides, args.rounds)
    if smp.rank() == 0:
        show("A step without work", "ms", 1e3, times, f"{PARAMETERS[0]} parameters")


main()
