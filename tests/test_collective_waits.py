"""Spec: whoever waits for ranks that do not come is told for whom, and in which group."""

import os
import re
import signal
from itertools import pairwise

import pytest

from tests.ranks import job, mpirun

BEGIN = """
import os, random, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp

dist.init_process_group("smddp")
rank, size = dist.get_rank(), dist.get_world_size()

def error_of(call):
    try:
        call()
    except dist.DistBackendError as error:
        return str(error)
    return "no error"
"""


def said_by(folder, size: int, script: str, **env: str) -> list[str]:
    """What the ranks of a job that ends well print, by rank."""
    path = folder / "script.py"
    path.write_text(BEGIN + script)
    done = mpirun(size, path, env=env)
    assert done.returncode == 0, done.stderr
    assert "so far" not in done.stderr
    return sorted(done.stdout.splitlines())


# ---------------------------------------------------------------------------- deadlocks

CALL = "all-reduce 1 (sum) of 3 float32"


@pytest.mark.parametrize(
    ("over", "wait", "beside"),
    [
        ("shm", "dist.all_reduce(x, group=group)", "pass"),
        ("shm", "dist.all_reduce(x, group=group, async_op=True).wait()", "pass"),
        ("tcp", "dist.all_reduce(x, group=group)", "pass"),  # as between two hosts
        ("shm", "dist.all_reduce(x, group=group)", "multiprocessing.Queue().put(1)"),
    ],
    ids=["sync", "async", "hosts", "queue"],
)
def test_two_groups_entered_in_opposite_order_are_an_error_that_names_both(
    tmp_path, over, wait, beside
):
    """... on both sides, long before the time-out of half an hour.

    A thread of Python's own beside it, as a data loader has, is no help.
    """
    lines = said_by(
        tmp_path,
        2,
        f"""
import multiprocessing
dist.all_reduce(torch.ones(1), async_op=True).wait()  # there is a thread that listens
{beside}
a, b = dist.new_group(), dist.new_group()
group, x = (a if rank == 0 else b), torch.ones(3)
print(rank, error_of(lambda: {wait}))
""",
        SMP_COMM_TRANSPORTS=over,
    )

    for rank, line in enumerate(lines):
        other = 1 - rank
        assert line.startswith(f"{rank} smp: group '{rank + 1}': {CALL}: deadlock: ")
        assert f"waits for rank {other}, which waits in group '{other + 1}' ({CALL}) " in line
        assert f"for rank {rank} [SMP_ERR_DEADLOCK]" in line


def test_a_deadlock_is_found_beside_the_groups_that_a_job_of_smp_has(tmp_path):
    lines = said_by(
        tmp_path,
        2,
        """
import smp
smp.init({"ddp": True})  # with a group of gloo's, for objects
a, b = dist.new_group(), dist.new_group()
print(rank, error_of(lambda: dist.all_reduce(torch.ones(3), group=b if rank else a)))
""",
    )

    for rank, line in enumerate(lines):
        assert re.match(rf"{rank} smp: group '\d+': {re.escape(CALL)}: deadlock: ", line)
        assert f"waits for rank {1 - rank}" in line


def test_four_groups_entered_in_a_ring_are_an_error_on_all_four(tmp_path):
    lines = said_by(
        tmp_path,
        4,
        """
groups = [dist.new_group([r, (r + 1) % size]) for r in range(size)]
print(rank, error_of(lambda: dist.barrier(groups[rank])))
""",
    )

    called = ["1 (ranks 0, 1)", "2 (ranks 1, 2)", "3 (ranks 2, 3)", "4 (ranks 0, 3)"]
    for rank, line in enumerate(lines):
        assert f"{rank} smp: group '{called[rank]}': barrier 1: deadlock: " in line
        for other in range(4):
            assert f"rank {other}" in line
            assert f"group '{called[other]}'" in line


def test_equal_time_outs_name_where_the_other_is_on_both_sides(tmp_path):
    """A thread might come to its help, so nothing is proved before the time is over."""
    lines = said_by(
        tmp_path,
        2,
        """
a, b = (dist.new_group() for _ in "ab")
over = threading.Event()
threading.Thread(target=over.wait).start()
a.set_timeout(timedelta(seconds=2))
b.set_timeout(timedelta(seconds=2))
group, x = (a if rank == 0 else b), torch.ones(3)
print(rank, error_of(lambda: dist.all_reduce(x, group=group)), flush=True)
store = dist.distributed_c10d._get_default_store()
store.set(f"said {rank}", "")
store.wait(["said 0", "said 1"])  # nobody enters another group, or leaves, before
over.set()
""",
    )

    for rank, line in enumerate(lines):
        other = 1 - rank
        assert f"{rank} smp: group '{rank + 1}': {CALL}: timed out after " in line
        assert re.search(
            f"; rank {other} (waits in group '{other + 1}' for |"
            f"gave up in group '{other + 1}': )" + re.escape(CALL),
            line,
        ), line


@pytest.mark.parametrize("daemon", [False, True])
def test_a_rank_whose_other_thread_may_still_come_is_in_no_deadlock(tmp_path, daemon):
    """It looks the same from outside, and goes on when the thread has come.

    A daemon may, too, which has begun an operation before.
    """
    lines = said_by(
        tmp_path,
        2,
        f"""
a, b = dist.new_group(), dist.new_group()
if rank == 0:
    if {daemon}:
        dist.barrier(a)
    dist.barrier(a)
    dist.barrier(b)
else:
    def later():
        if {daemon}:
            dist.barrier(a)
        came.set()
        threading.Event().wait(1.5)
        dist.barrier(a)
    came = threading.Event()
    thread = threading.Thread(target=later, daemon={daemon})
    thread.start()
    came.wait()
    dist.barrier(b)
    thread.join()
print(rank, "done")
""",
    )

    assert lines == ["0 done", "1 done"]


def test_what_follows_a_future_may_still_come(tmp_path):
    """Rank 1 waits in b, and will enter a when the operation in c is over."""
    lines = said_by(
        tmp_path,
        3,
        """
a, b, c = dist.new_group([0, 1]), dist.new_group([0, 1]), dist.new_group([1, 2])
x = torch.ones(1)
if rank == 0:
    dist.barrier(a)
    dist.barrier(b)
if rank == 1:
    future = dist.all_reduce(x, group=c, async_op=True).get_future()
    future.then(lambda _: dist.barrier(a))
    dist.barrier(b)
if rank == 2:
    threading.Event().wait(1.5)
    dist.all_reduce(x, group=c)
print(rank, "done")
""",
    )

    assert lines == ["0 done", "1 done", "2 done"]


RANDOM = """
groups = [dist.new_group(m) for m in ([0, 1, 2, 3], [0, 1, 2], [1, 2, 3], [0, 3])]
members = ([0, 1, 2, 3], [0, 1, 2], [1, 2, 3], [0, 3])

def go_on(program, mine, own):
    '''The same calls on all ranks, in one order for each thread; waits are its own.'''
    pending = []
    for number, (which, sleeper) in enumerate(program):
        if rank not in members[which] or which not in mine:
            continue
        if sleeper == rank:
            threading.Event().wait(own.choice((0.01, 0.7)))
        x = torch.full((own_size(number),), float(rank))
        want = float(sum(members[which]))
        if own.random() < 0.5:
            pending.append((dist.all_reduce(x, group=groups[which], async_op=True), x, want))
            if own.random() < 0.3:
                pending[-1][0].get_future().then(lambda _: None)
        else:
            dist.all_reduce(x, group=groups[which])
            assert x.eq(want).all()
        while pending and own.random() < 0.4:
            check(*pending.pop(own.randrange(len(pending))))
    for work in pending:
        check(*work)

def own_size(number):
    return 1 if number % 3 else 50_000

def check(work, x, want):
    work.wait()
    assert x.eq(want).all()

for seed in range(4 * int(os.environ.get("SEEDS", 1))):
    same = random.Random(seed)
    program = [(same.randrange(4), same.randrange(24)) for _ in range(40)]
    own = random.Random(100 * seed + rank)
    if seed % 2:
        thread = threading.Thread(target=go_on, args=(program, (2, 3), random.Random(rank)))
        thread.start()
        go_on(program, (0, 1), own)
        thread.join()
    else:
        go_on(program, (0, 1, 2, 3), own)
print(rank, "done")
"""


@pytest.mark.parametrize("over", ["shm", "tcp"])
@pytest.mark.sample(1)
def test_no_program_that_comes_to_its_end_is_told_that_it_will_not(tmp_path, over):
    """Ranks that dawdle, works that are waited for later or never, threads."""
    said = said_by(tmp_path, 4, RANDOM, SMP_COMM_TRANSPORTS=over)
    assert said == [f"{r} done" for r in range(4)]


# ------------------------------------------------------------------------- slow ranks


def test_the_time_out_of_a_work_names_group_call_and_missing_ranks(tmp_path):
    lines = said_by(
        tmp_path,
        3,
        """
dist.barrier()
x = torch.ones(3)
short = timedelta(seconds=1)
if rank == 0:
    works = [dist.all_reduce(x, async_op=True) for _ in range(2)]
    while dist.group.WORLD._get_sequence_number_for_group() < 2:
        os.sched_yield()  # the first has not begun
    for work in works:
        print(rank, error_of(lambda: work.wait(short)), flush=True)
    dist.distributed_c10d._get_default_store().set("said", "")
else:
    dist.distributed_c10d._get_default_store().wait(["said"])
    works = [dist.all_reduce(x, async_op=True) for _ in range(2)]
for work in works:
    work.wait()
""",
    )

    call = "all-reduce %d (sum) of 3 float32"
    missing = "waits for ranks 1, 2; not over after 1 s"
    assert lines == [
        f"0 smp: group '0': {call % 2} {missing}",
        f"0 smp: group '0': {call % 3} stands behind {call % 2}, which {missing}",
    ]


def test_a_group_that_connects_ranks_of_its_own_reports_them_as_the_job_numbers_them(tmp_path):
    """Beside a default group of another backend."""
    script = tmp_path / "script.py"
    script.write_text(
        BEGIN.replace('"smddp")', '"gloo")')
        + """
group = dist.new_group([1, 2], backend="smddp")
if rank == 1:
    late = dist.irecv(torch.ones(3), 2, group)
    print(error_of(lambda: late.wait(timedelta(seconds=1))), flush=True)
dist.barrier()
"""
    )

    done = mpirun(3, script, env={"SMP_WATCHDOG_REPORT_S": "0.2"})

    assert done.returncode == 0, done.stderr
    told = re.search(r"smp: rank (.): group '.*': receive \(tag 0\) from rank 2", done.stderr)
    assert told is not None and told[1] == "1", done.stderr


@pytest.mark.stress
@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("dist.all_reduce(x)", r"all-reduce 2 \(sum\) of 3 float32 waits for rank 1"),
        ("dist.send(x, 0) if rank else dist.recv(x)", r"receive \(tag 0\) from any rank"),
    ],
    ids=["all-reduce", "receive"],
)
def test_a_rank_that_is_stopped_is_reported_again_and_again(tmp_path, call, said):
    script = tmp_path / "script.py"
    script.write_text(
        BEGIN
        + f"""
import signal
dist.barrier()
x = torch.ones(3)
if rank == 1:
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
{call}
print("done")
"""
    )
    with job(2, script, env={"SMP_WATCHDOG_REPORT_S": "0.3"}) as process:
        pid = int(process.stdout.readline())
        waits = []
        while len(waits) < 3:
            line = process.stderr.readline()
            assert line, "the job has ended"
            found = re.fullmatch(
                rf"smp: rank 0: group '0': {said}; for ([0-9.]+) s so far\n",
                line,
            )
            if found:
                waits.append(float(found[1]))
        os.kill(pid, signal.SIGCONT)
        printed, _ = process.communicate(timeout=60)

    assert printed.splitlines() == ["done", "done"]
    # Each is told with one decimal.
    assert all(after >= 2 * before - 0.15 for before, after in pairwise(waits))
