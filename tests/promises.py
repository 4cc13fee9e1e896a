"""How soon a user hears of trouble, as it is promised; measured by ``tests.kill_ranks``.

A machine may stall at any time, so a promise is kept when the median of all rounds is within
its limit; the worst is shown beside it.
"""

import os
import random
import select
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import smp
from tests.models.modules import in_backward
from tests.models.partition import distributed
from tests.models.steps import mean_square
from tests.ranks import call_on_ranks, job

WIDTH, MICROBATCHES = 16, 4
HEARD_S = END_S = 30.0


class Promise(NamedTuple):
    what: str
    limit_s: float
    times_s: list[float]  # one for each round

    def is_kept(self) -> bool:
        return statistics.median(self.times_s) <= self.limit_s

    def __str__(self) -> str:
        """A row, as tests/core/kills_test.c writes one."""
        median, worst = statistics.median(self.times_s), max(self.times_s)
        return (
            f"{self.what:<50}{len(self.times_s):>7}{1000 * median:>11.1f}{1000 * worst:>10.1f}"
            f"{1000 * self.limit_s:>10.0f}  {'kept' if self.is_kept() else 'NOT KEPT'}"
        )


HEAD = f"{'promise':<50}{'rounds':>7}{'median, ms':>11}{'worst':>10}{'limit':>10}"


# ------------------------------------------------------------------------ in a step


class Moment(NamedTuple):
    """Of one round on one rank, by the clock that all ranks of a host share."""

    began: float | None  # None: not by this rank
    raised: float


class Trouble(Exception):
    """Raised by a model."""


def trouble() -> None:
    raise Trouble


class CtrlC:
    """Of this process, which goes on when the signal is handled."""

    def __init__(self) -> None:
        self.heard = threading.Event()

    def _handle(self, number: int, frame: object) -> None:
        self.heard.set()
        raise KeyboardInterrupt

    def __enter__(self) -> "CtrlC":
        self.before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    def __call__(self) -> None:
        self.heard.clear()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert self.heard.wait(HEARD_S)


class Fault:
    """Happens once, after some passes.  No attribute of the module: a microbatch that changes
    one, after another has read it, is refused."""

    phase, passes, how = "", 0, staticmethod(trouble)
    began: float | None = None

    def __call__(self, phase: str) -> None:
        if phase == self.phase:
            self.passes -= 1
            if self.passes < 0:
                self.phase = ""
                self.began = time.monotonic()
                self.how()


class Faulty(nn.Linear):
    """A layer to which something happens in one of its passes."""

    def __init__(self, width: int):
        super().__init__(width, width)
        self.fault = Fault()

    def forward(self, x):
        return in_backward(self._forward(x), lambda _: self.fault("backward"))

    def _forward(self, x):
        self.fault("forward")
        return super().forward(x)


train = smp.step(mean_square)


def trouble_in_steps(rounds: int, how: str) -> list[Moment]:
    """In any layer, phase and microbatch; each rank's moments."""
    smp.init(
        {
            "pipeline_parallel_degree": smp.job.bootstrap.mpi_size(),
            "microbatches": MICROBATCHES,
        }
    )
    net = nn.Sequential(*(Faulty(WIDTH) for _ in range(2 * smp.size())))
    model = distributed(net, [i % smp.size() for i in range(len(net))])
    x = torch.randn(2 * MICROBATCHES, WIDTH)
    train(model, x)
    draw = random.Random(0)
    moments = []
    with CtrlC() as ctrl_c:
        for _ in range(rounds):
            where = draw.randrange(len(net))
            phase, passes = draw.choice(["forward", "backward"]), draw.randrange(MICROBATCHES)
            mine = net[where].fault if where % smp.size() == smp.rank() else None
            if mine is not None:
                mine.phase, mine.passes = phase, passes
                mine.how = {"Ctrl-C": ctrl_c, "exception": trouble}[how]
            try:
                train(model, x)
                raise AssertionError("the step came to its end")
            except (Trouble, KeyboardInterrupt):
                moments.append(Moment(mine and mine.began, time.monotonic()))
    return moments


def deadlocks_in_steps(rounds: int) -> list[Moment]:
    """Microbatches pass a module with buffers in order, which this schedule does not allow."""
    turns = [(1, "forward"), (1, "backward"), (0, "forward"), (0, "backward")]
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "pipeline": turns})
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    model = distributed(net, [0, 1])
    moments = []
    for _ in range(rounds):
        smp.barrier()
        began = time.monotonic()
        try:
            train(model, torch.randn(4, WIDTH))
            raise AssertionError("the step came to its end")
        except RuntimeError as error:
            assert "a deadlock" in str(error)
            moments.append(Moment(began, time.monotonic()))
    return moments


def times_of(by_rank: list[list[Moment]]) -> list[float]:
    """From the last beginning of a round to when the last rank had raised."""
    return [
        max(moment.raised for moment in moments)
        - max(moment.began for moment in moments if moment.began is not None)
        for moments in zip(*by_rank, strict=True)
    ]


# ----------------------------------------------------------------- the end of a script


SCRIPT = """
import atexit, os, sys, time
atexit.register(lambda: print("ended", time.monotonic(), flush=True))  # the last to be called
from tests.models.jobs import *

model = chain(nn.Linear(8, 8), nn.Linear(8, 8), microbatches=2)
for _ in range(5):
    train(model, torch.randn(4, 8))
print("runs", os.getpid(), flush=True)
while not Path(sys.argv[0]).with_suffix(".go").exists():
    os.sched_yield()
smp.barrier()
"""

RAISES = """
if smp.rank() == 0:
    print("raises", time.monotonic(), flush=True)
    raise ValueError("nobody catches this")
train(model, torch.randn(4, 8))
"""

ENDS = """
print("ends", time.monotonic(), flush=True)
"""


@contextmanager
def running(script: str) -> Iterator[tuple[subprocess.Popen, list[int]]]:
    """A job of two ranks that comes to the end of SCRIPT in the block; their pidfds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(SCRIPT + script)
        with job(2, path) as process:
            lines = [process.stdout.readline() for _ in range(2)]
            pidfds = [os.pidfd_open(int(line.removeprefix("runs"))) for line in lines]
            path.with_suffix(".go").touch()
            yield process, pidfds
        for pidfd in pidfds:
            os.close(pidfd)


def end_after_an_exception() -> float:
    """How long until the last rank's process has ended."""
    with running(RAISES) as (process, pidfds):
        raised = float(process.stdout.readline().removeprefix("raises"))
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], END_S)[0], "a rank has not ended"
        took_s = time.monotonic() - raised
        process.communicate(timeout=END_S)
    assert process.returncode != 0
    return took_s


def end_in_order() -> float:
    """How long until all that this library does at the end is done; what MPI and torch do
    then is theirs."""
    with running(ENDS) as (process, _):
        said, errors = process.communicate(timeout=END_S)
    assert process.returncode == 0, errors
    times = {word: [] for word in ("ends", "ended")}
    for line in said.splitlines():
        word, at = line.split()
        times[word].append(float(at))
    return max(times["ended"]) - max(times["ends"])


# ------------------------------------------------------------------------------ all


def measured(rounds: int) -> list[Promise]:
    """All that is promised where no rank is killed.  A script of its own takes seconds, so
    there are fewer of them."""
    scripts = max(1, rounds // 5)

    def on(size: int, function: Callable, *args: object) -> list[float]:
        return times_of(call_on_ranks(size, function, rounds, *args))

    promises = []
    for how, limit_s in (("exception", 0.05), ("Ctrl-C", 0.1)):
        for size in (2, 3):
            what = f"{how} in a step: all of {size} ranks raise it"
            promises.append(Promise(what, limit_s, on(size, trouble_in_steps, how)))
    what = "deadlock of a step: both ranks raise it"
    promises.append(Promise(what, 1.0, on(2, deadlocks_in_steps)))
    for what, limit_s, end in (
        ("uncaught exception: both ranks have ended", 1.0, end_after_an_exception),
        ("end of the script: both ranks have shut down", 2.0, end_in_order),
    ):
        promises.append(Promise(what, limit_s, [end() for _ in range(scripts)]))
    return promises
