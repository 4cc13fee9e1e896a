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


# ------------------------------------------------------------ groups in another order

ENTER = """
group.set_timeout(timedelta(seconds=2))
print(rank, error_of(lambda: dist.all_reduce(torch.ones(3), group=group)), flush=True)
store = dist.distributed_c10d._get_default_store()
store.set(f"said {rank}", "")
store.wait([f"said {r}" for r in range(size)])  # nobody enters another group before
"""

CALL = "all-reduce 1 (sum) of 3 float32"


@pytest.mark.parametrize(
    ("size", "over"), [(2, "shm"), (4, "shm"), (2, "tcp")], ids=["two", "four", "hosts"]
)
def test_the_time_out_of_groups_entered_in_a_ring_names_both_groups_on_each_rank(
    tmp_path, size, over
):
    """Each rank waits in its own group with the next rank, which waits in another one."""
    lines = said_by(
        tmp_path,
        size,
        f"""
members = [sorted((r, (r + 1) % size)) for r in range(size)]
groups = [dist.new_group(m) for m in members]
group = groups[rank]
{ENTER}""",
        SMP_COMM_TRANSPORTS=over,
    )

    def name(rank):
        members = sorted((rank, (rank + 1) % size))
        return str(rank + 1) + (f" (ranks {members[0]}, {members[1]})" if size > 2 else "")

    for rank, line in enumerate(lines):
        other = (rank + 1) % size
        assert f"{rank} smp: group '{name(rank)}': {CALL}: timed out after " in line
        assert re.search(
            rf"without rank {other}; rank {other} (waits in group '{re.escape(name(other))}' "
            rf"for |gave up in group '{re.escape(name(other))}': )" + re.escape(CALL),
            line,
        ), line


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


def test_a_group_that_connects_ranks_of_its_own_reports_them_as_the_job_numbers_them(script):
    """Beside a default group of another backend."""
    path = script(
        BEGIN.replace('"smddp")', '"gloo")')
        + """
group = dist.new_group([1, 2], backend="smddp")
if rank == 1:
    late = dist.irecv(torch.ones(3), 2, group)
    print(error_of(lambda: late.wait(timedelta(seconds=1))), flush=True)
dist.barrier()
"""
    )

    done = mpirun(3, path, env={"SMP_WATCHDOG_REPORT_S": "0.2"})

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
def test_a_rank_that_is_stopped_is_reported_again_and_again(script, call, said):
    path = script(
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
    with job(2, path, env={"SMP_WATCHDOG_REPORT_S": "0.3"}) as process:
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
