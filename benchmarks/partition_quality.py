"""How near the partitioner's decisions come to the best there are.

    python benchmarks/partition_quality.py

Random small trees, each with a random cost for every module: the cost of the fullest rank
over the least that any assignment of the modules to the ranks has (all are tried).  How long
a decision takes is in partition_speed.py.
"""

import argparse
import random
import statistics
from array import array

from smp import _core

SEEDS = 200
MOST_BYTES = 1000
MEMORY_ALONE = 1.0  # memory_weight: costs are the parameters' bytes


def random_tree(draw: random.Random, modules: int, most_children: int) -> tuple[list, list]:
    """Parents of modules 1 and on, each before its children; bytes by module."""
    parents, room = [], [(0, most_children)]
    for module in range(1, modules):
        at = draw.randrange(len(room))
        parent, left = room[at]
        parents.append(parent)
        room[at] = (parent, left - 1)
        if left == 1:
            room.pop(at)
        room.append((module, most_children))
    return parents, [draw.randint(1, MOST_BYTES) for _ in range(modules)]


def decide(parents: list[int], cost: list[int], ranks: int) -> list[float]:
    """The cost of each rank."""
    modules = len(cost)
    _, _, _, costs = _core.partition(
        ranks,
        MEMORY_ALONE,
        -1,
        modules,
        array("i", parents),
        array("i", range(1, modules)),
        array("q", cost),
        array("i", range(modules)),
        array("i", range(modules)),
        first_run=array("q", range(modules)),
        activation_bytes=array("q", [0] * modules),
        seconds=None,
        chain=array("b", [0] * modules),
        pin=array("i", [-1] * modules),
    )
    return list(array("d", costs))


def least(cost: list[int], ranks: int) -> int:
    """The least cost of the fullest rank over all assignments, whatever the tree."""
    order = sorted(cost, reverse=True)
    best = sum(cost)
    loads = [0] * ranks

    def place(at: int) -> None:
        nonlocal best
        if at == len(order):
            best = min(best, max(loads))
            return
        for load in set(loads):  # ranks alike are alike
            rank = loads.index(load)
            if load + order[at] < best:
                loads[rank] += order[at]
                place(at + 1)
                loads[rank] -= order[at]

    place(0)
    return best


def ratios(seeds: int, ranks: int, modules: int, most_children: int) -> list[float]:
    out = []
    for seed in range(seeds):
        parents, cost = random_tree(random.Random(seed), modules, most_children)
        fullest = max(decide(parents, cost, ranks)) * sum(cost)
        out.append(fullest / least(cost, ranks))
    return out


def row(seeds: int, ranks: int, modules: int, most_children: int) -> str:
    """A row of the table; the same on every machine."""
    got = sorted(ratios(seeds, ranks, modules, most_children))
    shown = statistics.mean(got), statistics.median(got), got[int(0.95 * len(got))], got[-1]
    said = " | ".join(f"{ratio:.2f}" for ratio in shown)
    return f"| {ranks} | {modules} | {most_children} | {said} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS, help="trees of each kind")
    options = parser.parse_args()
    print("| ranks | modules | children at most | mean | median | 95 of 100 | worst |")
    print("|---|---|---|---|---|---|---|")
    for ranks in (2, 4):
        for modules in (6, 12):
            for children in (2, 12):
                print(row(options.seeds, ranks, modules, children))


if __name__ == "__main__":
    main()
