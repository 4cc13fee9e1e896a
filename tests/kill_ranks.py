"""Jobs of which one rank is killed at a random moment: ``python -m tests.kill_ranks``.

Ranks are forked from a process that has torch, so that a job starts in a second.  They
train, with DistributedDataParallel on the backend ``smddp``, with a pipeline, or with layers
that are split over all ranks, or over pairs of them in a pipeline; one gets SIGKILL.  While all
train, each of the others must say which one, and end.  While they start (``--moment start``),
they may not know each other yet: they get SIGTERM a moment later, as launchers send it, and
must end.  What is left in ``/dev/shm`` of a rank that was killed before it told the others
where it is, the next job removes.

With ``--rounds`` the times are judged, and what else is promised in time is measured too
(``tests/promises.py``): at the end stands a table of what was kept.
"""

import argparse
import atexit
import errno
import itertools
import os
import random
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn

import smp  # before the ranks are forked: importing takes a second
from tests import promises
from tests.promises import Promise
from tests.ranks import close_teams

MOMENTS = ("training", "start")
LATEST_S = 0.2  # of a kill, once all ranks train
NAMED_S = 0.2  # as promised
LAUNCHER_S = 0.25  # from the end of a rank to mpirun's SIGTERM for the others
START_S = 60.0
END_S = 30.0


class Plan(NamedTuple):
    kind: str
    size: int
    victim: int
    delay_s: float
    moment: str


def train_with_ddp(ready: Callable[[], None]) -> None:
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    dist.init_process_group("smddp")
    torch.manual_seed(dist.get_rank())
    layers = (nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 1))
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = torch.zeros(dist.get_world_size())
    for step in range(1_000_000):
        loss = model(torch.randn(8, 300)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_gather_into_tensor(losses, loss.detach().reshape(1))
        if step == 1:
            ready()


def train_with_a_pipeline(ready: Callable[[], None]) -> None:
    smp.init({"pipeline_parallel_degree": int(os.environ["WORLD_SIZE"]), "microbatches": 4})
    train_linears(ready)


class Loop(nn.Sequential):
    """Calls of its parts follow one another: those of other ranks are a chain."""

    def forward(self, x):
        for part in self:
            x = part(x)
        return x


def train_with_chains(ready: Callable[[], None]) -> None:
    size = int(os.environ["WORLD_SIZE"])
    smp.init({"pipeline_parallel_degree": size, "microbatches": 4})
    train_linears(ready, Loop(*(nn.Linear(64, 64) for _ in range(4 * size))), turns=4)


def train_with_split_layers(ready: Callable[[], None]) -> None:
    smp.init({"tensor_parallel_degree": int(os.environ["WORLD_SIZE"]), "microbatches": 4})
    train_linears(ready)


def train_with_split_layers_in_a_pipeline(ready: Callable[[], None]) -> None:
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 4})
    train_linears(ready)


def train_linears(
    ready: Callable[[], None], net: nn.Sequential | None = None, turns: int = 1
) -> None:
    """Train linears in a row, so many of one rank before those of the next one."""
    if net is None:
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2 * smp.size())))
    for i, part in enumerate(net):
        smp.set_partition(part, i // turns % smp.pp_size())
    smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01))

    @smp.step
    def train(model, x):
        loss = model(x).pow(2).mean()
        model.backward(loss)
        return loss

    for step in range(1_000_000):
        optimizer.zero_grad()
        train(model, torch.randn(16, 64))
        optimizer.step()
        if step == 1:
            ready()


KINDS = {
    "ddp": train_with_ddp,
    "pipeline": train_with_a_pipeline,
    "chains": train_with_chains,
    "tensor": train_with_split_layers,
    "tensor in a pipeline": train_with_split_layers_in_a_pipeline,
}

# How many ranks there may be.
SIZES = {
    "ddp": (2, 3),
    "pipeline": (2, 3),
    "chains": (2, 3),
    "tensor": (2, 3),
    "tensor in a pipeline": (4,),
}

# What a survivor must say.
NAMED = {
    "ddp": r"rank {} is lost",
    "pipeline": r"pp_rank {} is gone",
    "chains": r"pp_rank {} is gone",
    "tensor": r"\brank {}( \([^)]*\))? is (lost|gone)",
    "tensor in a pipeline": r"\brank {}( \([^)]*\))? is (lost|gone)",
}


def be_rank(plan: Plan, rank: int, port: int, ready: int, folder: Path) -> NoReturn:
    """Train until an error; the time and what it said go into a file.

    Ends without the caller's own cleaning up, which is its parent's.
    """
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(plan.size),
        LOCAL_WORLD_SIZE=str(plan.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    with open(folder / f"{rank}.output", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        KINDS[plan.kind](lambda: os.write(ready, b"."))
    except Exception as error:
        noticed = time.monotonic()
        (folder / f"{rank}.error").write_text(f"{noticed} {error}")
        traceback.print_exc()
    except KeyboardInterrupt:  # what SIGTERM is inside a step
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def started(plan: Plan, folder: Path) -> Iterator[list[int]]:
    """The ranks' processes, which start or all train; none outlives the block."""
    reads, writes = os.pipe()
    port = free_port()
    pids: list[int] = []
    try:
        for rank in range(plan.size):
            pid = os.fork()
            if pid == 0:
                os.close(reads)
                be_rank(plan, rank, port, writes, folder)
            pids.append(pid)
        os.close(writes)
        for _ in range(plan.size if plan.moment == "training" else 0):
            if not select.select([reads], [], [], START_S)[0] or not os.read(reads, 1):
                raise RuntimeError("a rank does not train")
        yield pids
    finally:
        os.close(reads)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass  # it has ended, and was waited for


def end_of(pid: int) -> int | None:
    """Its exit code, as of subprocess; None: it runs and runs."""
    fd = os.pidfd_open(pid)
    ended = select.select([fd], [], [], END_S)[0]
    os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if ended else None


def stale_files() -> set[str]:
    """Our socket files at which nobody listens."""
    stale = set()
    for path in Path("/dev/shm").glob("smp*"):
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                stale.add(path.name)
    return stale


def terminate(pid: int) -> None:
    """As a launcher does with a rank that still runs."""
    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        os.kill(pid, signal.SIGTERM)


def kill_one(plan: Plan, folder: Path) -> tuple[list[str], float]:
    """What went wrong, and how many seconds it took until the last survivor knew."""
    wrong = []
    slowest_s = 0.0
    before = stale_files()
    with started(plan, folder) as pids:
        threading.Event().wait(plan.delay_s)
        killed = time.monotonic()
        os.kill(pids[plan.victim], signal.SIGKILL)
        if plan.moment == "start":
            threading.Event().wait(LAUNCHER_S)
            for pid in pids:
                terminate(pid)
        codes = [end_of(pid) for pid in pids]
    if plan.moment == "start":
        for rank, code in enumerate(codes):
            if rank != plan.victim and code not in (1, -signal.SIGTERM):
                said = (folder / f"{rank}.output").read_text()
                wrong.append(f"rank {rank} ended with {code}: {said}")
        return wrong, time.monotonic() - killed
    for rank, code in enumerate(codes):
        if rank == plan.victim:
            continue
        said = (folder / f"{rank}.output").read_text()
        error = folder / f"{rank}.error"
        if code != 1:
            wrong.append(f"rank {rank} ended with {code}: {said}")
        elif not error.exists():
            wrong.append(f"rank {rank} raised nothing: {said}")
        else:
            at, text = error.read_text().split(" ", 1)
            slowest_s = max(slowest_s, float(at) - killed)
            if not re.search(NAMED[plan.kind].format(plan.victim), text):
                wrong.append(f"rank {rank} says {text}")
    left = stale_files() - before
    if left:
        wrong.append(f"left {left}")
    return wrong, slowest_s


def start_s(kind: str, size: int) -> float:
    """How long ranks take from the fork until all train; then they are killed."""
    folder = Path(tempfile.mkdtemp())
    begin = time.monotonic()
    try:
        with started(Plan(kind, size, 0, 0.0, "training"), folder):
            return time.monotonic() - begin
    finally:
        shutil.rmtree(folder)


def kill_and_report(plan: Plan) -> tuple[list[str], float]:
    folder = Path(tempfile.mkdtemp())  # whose end is not the forked ranks' business
    try:
        wrong, took_s = kill_one(plan, folder)
    finally:
        shutil.rmtree(folder)
    for what in wrong:
        print(f"FAILED {plan}: {what}", flush=True)
    return wrong, took_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--moment", choices=MOMENTS, action="append")
    parser.add_argument("--kills", type=int, default=15, help="of each kind, at each moment")
    parser.add_argument(
        "--rounds", type=int, default=0, help="of each promise without kills; 0: none is judged"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    failed = 0
    kept = []
    for kind, moment in itertools.product(options.kind or KINDS, options.moment or MOMENTS):
        # Ranks meet at the end of their start; most of it is Python's imports.
        early_s, late_s = 0.0, LATEST_S
        if moment == "start":
            start_s(kind, max(SIZES[kind]))  # warms the system's caches
            late_s = start_s(kind, max(SIZES[kind]))
            early_s = late_s / 2
        before = stale_files()
        times = []
        for _ in range(options.kills):
            size = draw.choice(SIZES[kind])
            delay_s = draw.uniform(early_s, late_s)
            wrong, took_s = kill_and_report(
                Plan(kind, size, draw.randrange(size), delay_s, moment)
            )
            times.append(took_s)
            failed += bool(wrong)
        if moment == "training":
            kept.append(Promise(f"rank killed, {kind}: all others name it", NAMED_S, times))
        until = "the last survivor knew it" if moment == "training" else "all had ended"
        print(
            f"{kind}, {moment}: {len(times)} kills; {until} after "
            f"{1000 * sorted(times)[len(times) // 2]:.1f} ms (median), "
            f"{1000 * max(times):.1f} ms (slowest)",
            flush=True,
        )
        if moment == "start":
            unknown = stale_files() - before
            wrong, _ = kill_and_report(Plan(kind, min(SIZES[kind]), 1, 0.0, "training"))
            left = stale_files() - before
            print(f"... {len(unknown)} files left for the next job, {len(left)} after it")
            failed += bool(left or wrong)
    if options.rounds > 0:
        kept += promises.measured(options.rounds)
        close_teams()
        print(promises.HEAD, *kept, sep="\n")
        failed += sum(not promise.is_kept() for promise in kept)
    print(f"{failed} failed")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
