"""Spec: whoever waits for ranks that do not come is told for whom, and in which group."""

import os
import re
import signal
from itertools import pairwise

import pytest

from tests.ranks import job, mpirun

BEGIN = """
import os
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


RING = """
members = [sorted((r, (r + 1) % size)) for r in range(size)]
groups = [dist.new_group(m) for m in members]
group = groups[rank]
group.set_timeout(timedelta(seconds=2))
print(rank, error_of(lambda: dist.all_reduce(torch.ones(3), group=group)), flush=True)
store = dist.distributed_c10d._get_default_store()
store.set(f"said {rank}", "")
store.wait([f"said {r}" for r in range(size)])  # nobody enters another group before
"""

CALL = "all-reduce 1 (sum) of 3 float32"


def test_the_time_out_of_groups_entered_in_a_ring_names_both_groups_on_each_rank(script):
    """Each rank waits in its own group with the next rank, which waits in another one."""
    done = mpirun(4, script(BEGIN + RING))

    assert done.returncode == 0, done.stderr
    assert "so far" not in done.stderr

    def name(rank):
        first, last = sorted((rank, (rank + 1) % 4))
        return f"{rank + 1} (ranks {first}, {last})"

    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 4
    for rank, line in enumerate(lines):
        other = (rank + 1) % 4
        assert f"{rank} smp: group '{name(rank)}': {CALL}: timed out after " in line
        assert re.search(
            rf"without rank {other}; rank {other} (waits in group '{re.escape(name(other))}' "
            rf"for |gave up in group '{re.escape(name(other))}': )" + re.escape(CALL),
            line,
        ), line


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
