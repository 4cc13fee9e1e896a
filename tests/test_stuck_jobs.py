"""Spec: a stuck or deadlocked step says who waits for whom; signals reach a step."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch
from torch import nn

import smp
from smp.job import interrupts
from tests.models.jobs import chain, train
from tests.ranks import job, mpirun, on_ranks

SIGNALS = 20

STUCK = """
from tests.models.jobs import *

# The first backward with a gradient of its own imports half a second of modules.
torch.ones(1, requires_grad=True).sum().backward(torch.ones(()))

class Part(nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 5 and smp.pp_rank() == 1:
            {how}
        return super().forward(x)

model = chain(nn.Linear(16, 16), Part(16, 16), microbatches=2, watchdog_report_s=0.5)
for _ in range(100):
    train(model, torch.randn(16, 16))
print("finished")
"""

WAYS = {
    # To this thread: one to the process goes to the main thread, and this one runs meanwhile.
    "stopped": "signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)",
    "in circles": "while True: pass",
    "in C with the GIL": "ctypes.PyDLL(None).pause()",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
def test_the_watchdog_says_who_waits_for_whom_and_ends_the_job_when_told_to(script, way):
    """Request, module path, microbatch, phase, since when, and stacks."""
    done = mpirun(2, script(STUCK.format(how=WAYS[way])), env={"SMP_WATCHDOG_END_S": "4"})

    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "finished" not in said
    assert re.search(
        r"pp_rank 0: microbatch \d, (forward|backward): the step function waits for "
        r"(the backward of )?module '1' on pp_rank 1, since \d+\.\d s",
        said,
    ), said
    assert "ends the job (watchdog_end_s)" in said
    assert re.search(r"has not moved for \d+\.\d s, in step 3\n", said), said
    assert 'train.py", line' in said and "in train" in said  # the stack of a worker
    if way != "stopped":
        assert re.search(r"pp_rank 1: microbatch \d, forward: module '1' runs, since", said), (
            said
        )
        assert re.search(r'train.py", line \d+ in forward', said), said


ORDERS = """
import smp

smp.init({"pipeline_parallel_degree": 2, "watchdog_report_s": 0.5, "watchdog_end_s": 4})
if smp.rank() == 0:
    smp.barrier()
    smp.send(1, 1, smp.RankType.WORLD_RANK)
else:
    smp.recv_from(0, smp.RankType.WORLD_RANK)
    smp.barrier()
"""


def test_calls_that_wait_for_each_other_are_named_by_each_rank(script):
    """Each rank says in which call it waits, and for whom."""
    done = mpirun(2, script(ORDERS))

    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert re.search(r"has not moved for \d+\.\d s, after step 0\n", said), said
    assert re.search(r"pp_rank 0 waits in smp.barrier\(.*receiving from rank 1, since", said)
    assert re.search(r"pp_rank 1 waits in smp.recv_from\(.*receiving from rank 0, since", said)
    assert "ends the job (watchdog_end_s)" in said


ALONE = """
import torch
from torch import nn
import smp

smp.init({{"microbatches": 2, "watchdog_report_s": 1, "watchdog_end_s": 3, **{config}}})
with smp.tensor_parallelism(smp.tp_size() > 1):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
if smp.pp_size() > 1:
    smp.set_partition(net[0], 0)
    smp.set_partition(net[1], 1)
model = smp.DistributedModel(net)

@smp.step
def run(model, x):
    loss = model(x).sum()
    {backward}
    return loss

x = torch.randn(4, 8)
run(model, x)
if smp.rank() == 0:
    run(model, x)
smp.barrier()
"""


@pytest.mark.parametrize(
    ("config", "backward", "rank", "waits"),
    [
        ({"tensor_parallel_degree": 2, "ddp": True}, "", "rank {}", "waits for rank 1"),
        (
            {"pipeline_parallel_degree": 2},
            "",
            "pp_rank {}",
            "the step function waits for module '1' on pp_rank 1",
        ),
        ({"ddp": True}, "model.backward(loss)", "rank {}", "waits for rank 1"),
    ],
    ids=["slices", "pipeline", "replicas"],
)
def test_a_step_of_one_rank_alone_is_told_on_both_sides(script, config, backward, rank, waits):
    """Each rank's report names both places, and the job ends when told to."""
    done = mpirun(2, script(ALONE.format(config=config, backward=backward)))

    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "ends the job (watchdog_end_s)" in said
    reports = {
        said_of[0]: said_of[1]
        for said_of in re.findall(
            r"^smp: ((?:pp_)?rank \d) \(process \d+\) has not moved.*\n((?: .*\n)*)", said, re.M
        )
    }
    assert set(reports) == {rank.format(0), rank.format(1)}, said
    for report in reports.values():
        assert re.search(
            rf"{rank.format(1)} waits in smp.barrier\(.*from rank 0, since", report
        )
        assert re.search(rf"{rank.format(0)}.* the step function", report), said
    assert waits in reports[rank.format(1)], said


def test_a_rank_that_never_comes_is_named_by_who_waits(script):
    path = script("""
import threading
import smp

smp.init({"watchdog_report_s": 1, "watchdog_end_s": 2})
if smp.rank() == 1:
    threading.Event().wait()
smp.barrier()
""")

    done = mpirun(2, path)

    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert re.search(r"rank 0 waits in smp.barrier\(.*, since .*\n  rank 1 told nothing", said)
    assert "rank 1 (process" not in said


def deadlock(**config) -> str:
    """What a schedule fails with that ends microbatch 1 before it starts microbatch 0: these
    pass a module with buffers in order."""
    turns = [(1, "forward"), (1, "backward"), (0, "forward"), (0, "backward")]
    model = chain(nn.Linear(8, 8), nn.BatchNorm1d(8), microbatches=2, pipeline=turns, **config)

    with pytest.raises(RuntimeError, match="a deadlock") as caught:
        train(model, torch.randn(8, 8))

    return str(caught.value)


@on_ranks(2)
def test_a_deadlock_is_found_as_such():
    said = deadlock()
    assert "the step function waits for module '1' on pp_rank 1" in said
    assert "module '1' waits for earlier microbatches to pass this module" in said
    assert re.search(r"pp_rank 0 .*nothing to run", said)
    assert re.search(r"pp_rank 1 .*nothing to run", said)


@on_ranks(4)
@pytest.mark.parametrize(
    ("config", "place"),
    [({"ddp": True}, ""), ({"ddp": True, "tensor_parallel_degree": 2}, "tp_rank {}, ")],
    ids=["replicas", "slices"],
)
def test_where_a_pp_rank_is_several_ranks_these_are_named_by_their_global_numbers(
    config, place
):
    said = deadlock(**config)
    first, second = smp.get_pp_group()
    place = place.format(smp.tp_rank())
    near, far = f"rank {first} ({place}pp_rank 0)", f"rank {second} ({place}pp_rank 1)"
    assert f"the step function waits for module '1' on {far}" in said
    assert f"{near} has nothing to run" in said
    assert f"{far} has nothing to run" in said


class Enough(Exception):
    """Ends the loop on every rank."""


@on_ranks(2)
@pytest.mark.parametrize("interrupted", [0, 1])
def test_ctrl_c_at_any_instant_interrupts_the_step_on_every_rank(interrupted):
    """KeyboardInterrupt, whichever thread the signal came to; then the next step works."""
    inside, caught, finished = threading.Event(), threading.Event(), threading.Event()

    class Watched(nn.Linear):
        def forward(self, x):
            if finished.is_set():
                raise Enough
            inside.set()
            return super().forward(x)

    model = chain(Watched(8, 8), Watched(8, 8), microbatches=2)

    def interrupt():
        numbers = random.Random(1)
        for _ in range(SIGNALS):
            inside.wait()
            for _ in range(numbers.randrange(3000)):  # to some moment of the step
                pass
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            caught.wait()
            caught.clear()
        finished.set()

    x = torch.randn(8, 8)
    train(model, x)
    times = 0
    inside.clear()
    if smp.pp_rank() == interrupted:
        threading.Thread(target=interrupt, daemon=True).start()
    while True:
        try:
            while True:
                train(model, x)
        except KeyboardInterrupt:
            times += 1
            inside.clear()
            caught.set()
        except Enough:
            break
    finished.clear()
    train(model, x)
    assert times == SIGNALS or smp.pp_rank() != interrupted


@on_ranks(2)
@pytest.mark.parametrize("terminated", [0, 1])
def test_sigterm_in_a_step_is_an_interrupt_as_well(terminated):
    """... and outside a step it is what it was."""

    heard, raises = threading.Event(), interrupts._terminated

    def handler(number, frame):
        heard.set()
        raises(number, frame)

    class Terminated(nn.Linear):
        now = False

        def forward(self, x):
            if self.now:
                self.now = False
                signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
                assert heard.wait(30)  # else the step may be over by then
            return super().forward(x)

    model = chain(Terminated(8, 8), Terminated(8, 8), microbatches=2)
    x = torch.randn(8, 8)
    train(model, x)

    model.module[smp.pp_rank()].now = smp.pp_rank() == terminated
    interrupts._terminated = handler
    try:
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            train(model, x)
    finally:
        interrupts._terminated = raises
    train(model, x)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


@on_ranks(2)
def test_a_limit_without_end_is_none(tmp_path):
    """``inf`` means never: neither a report at once nor the end of the job."""
    told = tmp_path / f"told {os.environ['OMPI_COMM_WORLD_RANK']}"
    never = {"watchdog_report_s": float("inf"), "watchdog_end_s": float("inf")}
    model = chain(nn.Linear(8, 8), nn.Linear(8, 8), microbatches=2, **never)
    errors = os.dup(sys.stderr.fileno())
    try:
        with told.open("wb") as file:
            os.dup2(file.fileno(), sys.stderr.fileno())
        for _ in range(100):  # longer than the watchdog's first looks
            train(model, torch.randn(8, 8))
    finally:
        os.dup2(errors, sys.stderr.fileno())
        os.close(errors)
    assert told.read_text() == ""


@on_ranks(2)
def test_two_signals_right_after_each_other_are_one_wish():
    """mpirun and a terminal both send Ctrl-C: the step ends in order, the process stays."""
    first, both = threading.Event(), threading.Event()
    handled = []
    main = threading.main_thread().ident

    class Waits(nn.Linear):
        now = False

        def forward(self, x):
            if self.now:
                self.now = False
                signal.pthread_kill(main, signal.SIGINT)
                assert first.wait(30)
                while sys._current_frames()[main].f_code is handler.__code__:
                    os.sched_yield()  # one that comes in the handler is handled inside it
                signal.pthread_kill(main, signal.SIGINT)
                assert both.wait(30)
            return super().forward(x)

    def handler(number, frame):
        handled.append(number)
        (both if first.is_set() else first).set()
        raise KeyboardInterrupt(f"number {len(handled)}")

    model = chain(Waits(8, 8), Waits(8, 8), microbatches=2)
    x = torch.randn(8, 8)
    train(model, x)
    before = signal.signal(signal.SIGINT, handler)
    try:
        model.module[smp.pp_rank()].now = smp.pp_rank() == 1
        with pytest.raises(KeyboardInterrupt, match="number 1"):
            train(model, x)
    finally:
        signal.signal(signal.SIGINT, before)

    assert len(handled) == (2 if smp.pp_rank() == 1 else 0)
    train(model, x)


TWICE = """
from tests.models.jobs import *

class Part(nn.Linear):
    def forward(self, x):
        if smp.pp_rank() == 1 and not smp.is_tracing():
            print("waits", os.getpid(), flush=True)
            threading.Event().wait()
        return super().forward(x)

def handler(number, frame):
    print("interrupted", flush=True)
    raise KeyboardInterrupt

model = chain(nn.Linear(8, 8), Part(8, 8))
signal.signal(signal.SIGINT, handler)
smp.step(lambda model, x: model(x))(model, torch.randn(4, 8))
"""


def test_a_second_interrupt_ends_at_once(script):
    """The first waits for the module that runs to come to its end; the second does not."""
    with job(2, script(TWICE)) as process:
        lines = iter(process.stdout.readline, "")
        pid = next(int(line.split()[1]) for line in lines if line.startswith("waits"))
        os.kill(pid, signal.SIGINT)
        assert "interrupted" in next(lines)
        # Those that come right after the first are still the same wish.
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        _, errors = process.communicate(timeout=60)

    assert process.returncode != 0
    assert "smp: interrupted twice; ends at once" in errors
