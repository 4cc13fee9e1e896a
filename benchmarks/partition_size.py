"""How the time of a decision of the partitioner grows with the number of modules.

    python benchmarks/partition_size.py

Processor time, the least of several runs, on 8 ranks: of ``smp._core.partition`` for trees of
three shapes, in which each module has a parameter and runs at a random place of the order;
and of the whole decision for modules of PyTorch, which are read, too.
"""

import random
import time
from array import array
from collections.abc import Callable

import torch
from torch import nn

from smp import _core
from smp.partitioning.partition import make_partition

RANKS = 8
SIZES = (100, 1_000, 10_000, 100_000)
RUNS = 10

# By its number, the module that module i + 1 is in.
SHAPES: dict[str, Callable[[int], int]] = {
    "in one row": lambda i: 0,
    "nested": lambda i: i,
    "in tens": lambda i: i // 10,
}


def decision(shape: str, modules: int) -> Callable[[], object]:
    """From flat arrays to the rank of every module."""
    numbers = array("i", range(modules))
    parents = array("i", map(SHAPES[shape], range(modules - 1)))
    order = list(range(modules))
    random.Random(1).shuffle(order)
    arrays = (parents, numbers[1:], array("q", [1]) * modules, numbers, numbers)
    first_run = array("q", order)
    return lambda: _core.partition(RANKS, 1.0, -1, modules, *arrays, first_run=first_run)


def decision_of_modules(shape: str, modules: int) -> Callable[[], object]:
    """From a model that was not traced."""
    made = [nn.Module() for _ in range(modules)]
    for number, module in enumerate(made):
        module.weight = nn.Parameter(torch.zeros(1))
        if number > 0:
            made[SHAPES[shape](number - 1)].add_module(str(number), module)
    return lambda: make_partition(made[0], None, degree=RANKS, memory_weight=1.0)


def milliseconds(decide: Callable[[], object], runs: int = RUNS) -> float:
    """Of the processor, in the fastest of several runs."""
    times = []
    for _ in range(runs):
        began = time.process_time()
        decide()
        times.append(time.process_time() - began)
    return min(times) * 1e3


def main() -> None:
    print(f"| modules | {' | '.join(SHAPES)} | in tens, of PyTorch |")
    print(f"|{'---|' * (len(SHAPES) + 2)}")
    for modules in SIZES:
        sides = [decision(shape, modules) for shape in SHAPES]
        sides.append(decision_of_modules("in tens", modules))
        row = [f"{milliseconds(side):.3f}" for side in sides]
        print(f"| {modules:,} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
