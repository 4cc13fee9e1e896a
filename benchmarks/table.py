"""Timing rounds and the table that every benchmark prints.

Sides alternate in one run, so that what else the machine does hits all of them alike.
"""

import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping


def best_and_median(rounds: list[float]) -> tuple[float, float]:
    """Minimum and median of the rounds, in the unit they have."""
    return min(rounds), statistics.median(rounds)


def alternate(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call each side once a round; a side returns its own time in seconds."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(side())
    return times


def timed(function: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def machine() -> str:
    """The machine in a few words: processor, cores, Python."""
    model = platform.machine()
    try:
        with open("/proc/cpuinfo") as info:
            models = [line for line in info if line.startswith("model name")]
        model = f"{models[0].split(':')[1].strip()}, {len(models)} cores"
    except (OSError, IndexError):
        pass
    return f"{model}, Python {platform.python_version()}"


def show(
    title: str, unit: str, scale: float, times: Mapping[str, list[float]], base: str
) -> None:
    """Print the table: minimum, median, and the median's ratio to the base side."""
    import torch

    print(f"\n{title}\n{machine()}, torch {torch.__version__}")
    print(
        f"command: {' '.join(sys.orig_argv[1:] if hasattr(sys, 'orig_argv') else sys.argv)}\n"
    )
    print(f"| side | min ({unit}) | median ({unit}) | {base} / side |")
    print("|---|---|---|---|")
    reference = best_and_median(times[base])[1]
    for name, rounds in times.items():
        low, middle = best_and_median(rounds)
        print(
            f"| {name} | {low * scale:.2f} | {middle * scale:.2f} | {reference / middle:.2f} |"
        )
