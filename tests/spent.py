"""Where the time of a test run goes, by file and by cause; conftest shows it at the end.

Causes: ranks that start for tests that share them (``starting``), jobs of their own
(``jobs``), and the rest (``here``: pytest's own process, and programs that it waits for).
Of shared ranks at work, ``computing`` is the processor time of the busiest rank, and
``waiting`` what is left of the time.
"""

import collections
import time
from collections.abc import Iterator
from contextlib import contextmanager

CAUSES = ("starting", "jobs", "computing", "waiting", "here")

file = ""  # whose test runs
seconds: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
within = 0  # how many causes are being timed; the outermost counts


def add(cause: str, amount_s: float) -> None:
    seconds[file][cause] += amount_s


@contextmanager
def on(cause: str) -> Iterator[None]:
    """What passes in this block is spent on it; not again by a block inside."""
    global within
    begin = time.monotonic()
    within += 1
    try:
        yield
    finally:
        within -= 1
        if within == 0:
            add(cause, time.monotonic() - begin)


def table(most: int = 25) -> Iterator[str]:
    """The lines of the report: the files that took longest, then all."""
    total: collections.Counter[str] = collections.Counter()
    for spent in seconds.values():
        total.update(spent)
    yield "".join(f"{head:>10}" for head in ("seconds", *CAUSES))
    longest = sorted(seconds.items(), key=lambda item: -item[1].total())
    for name, spent in [*longest[:most], ("all", total)]:
        numbers = [spent.total(), *(spent[cause] for cause in CAUSES)]
        yield "".join(f"{number:10.1f}" for number in numbers) + f"  {name}"
