"""How long does a decision take, from flat arrays to the rank of every module?

    python benchmarks/partition_speed.py

Times ``smp._core.partition`` on T5-11B and on 100,000 modules in several shapes; the
answer is checked first.
"""

import random
from array import array
from collections.abc import Callable

from smp import _core
from smp.partitioning.partition import _FlatModel
from smp.partitioning.tracing import trace
from t5_11b_partition import inputs, t5_11b
from table import best_and_median, machine, timed

REPEATS = 50
MODULES = 100_000


def t5(devices: int) -> Callable[[], tuple]:
    model = t5_11b()
    given = inputs(1, 256, 128)
    flat = _FlatModel(model, trace(model, lambda: model(**given), meta=True))

    def decide() -> tuple:
        return _core.partition(
            devices,
            1.0,
            -1,
            len(flat.paths),
            flat.edge_parent,
            flat.edge_child,
            flat.parameter_bytes,
            flat.use_module,
            flat.use_parameter,
            first_run=flat.order,
            activation_bytes=flat.activation_bytes,
            chain=flat.chain,
        )

    return decide


def made_up(devices: int, parents: list[int], shuffled: bool) -> Callable[[], tuple]:
    """A model in which module i + 1 is in module ``parents[i]``, each with a parameter."""
    numbers = array("i", range(MODULES))
    order = list(range(MODULES))
    if shuffled:
        random.Random(1).shuffle(order)
    arrays = (array("i", parents), numbers[1:], array("q", [1]) * MODULES, numbers, numbers)
    first_run = array("q", order)
    return lambda: _core.partition(devices, 1.0, -1, MODULES, *arrays, first_run=first_run)


CASES = {
    "T5-11B, 8 ranks": lambda: t5(8),
    "100,000 in one row, 8 ranks": lambda: made_up(8, [0] * (MODULES - 1), False),
    "the same, shuffled order": lambda: made_up(8, [0] * (MODULES - 1), True),
    "the same, 512 ranks": lambda: made_up(512, [0] * (MODULES - 1), True),
    "100,000 nested, 8 ranks": lambda: made_up(8, list(range(MODULES - 1)), False),
    "100,000 in tens, 8 ranks": lambda: made_up(8, [i // 10 for i in range(MODULES - 1)], True),
}


def main() -> None:
    print(f"best and median of {REPEATS}, {machine()}\n")
    print(f"| {'model':<28} | {'min ms':>8} | {'median ms':>9} | most x ranks |")
    print("|---|---|---|---|")
    for name, make in CASES.items():
        decide = make()
        costs = array("d", decide()[3])
        worst = max(costs) * len(costs)  # 1: perfectly even
        assert 0.999 < sum(costs) < 1.001 and worst < 2, (name, worst)
        best, median = best_and_median([timed(decide) * 1e3 for _ in range(REPEATS)])
        print(f"| {name:<28} | {best:>8.3f} | {median:>9.3f} | {worst:>12.3f} |")


if __name__ == "__main__":
    main()
