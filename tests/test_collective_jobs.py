"""Spec: what a user of the backend smddp sees: how jobs start, and how they end."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import TESTS, mpirun, rank_environment

EXAMPLE = TESTS.parent / "examples" / "train_ddp.py"


def torchrun(size: int, *argv: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), *argv],
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=90,
    )


@pytest.mark.parametrize("launch", [mpirun, torchrun])
def test_the_example_of_plain_ddp_runs_under_either_launcher(launch):
    done = launch(2, EXAMPLE, "--steps", "100", "--width", "64")

    assert done.returncode == 0, done.stderr
    assert "2 ranks on smddp: " in done.stdout


def lines_of(size: int, folder: Path, script: str) -> list[str]:
    """What the ranks of a job that ends well print, sorted."""
    path = folder / "script.py"
    path.write_text(script)
    done = mpirun(size, path)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_under_mpirun_the_import_sets_what_is_missing(tmp_path):
    """... and leaves what is there."""
    said = lines_of(
        2,
        tmp_path,
        """
import os
os.environ["LOCAL_RANK"] = "7"
import smdistributed.dataparallel.torch.torch_smddp
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
print(*(os.environ[name] for name in names), os.environ["MASTER_PORT"].isdecimal())
""",
    )
    assert said == ["0 7 2 127.0.0.1 True", "1 7 2 127.0.0.1 True"]


def test_one_rank_under_mpirun_is_a_job_too(tmp_path):
    said = lines_of(
        1,
        tmp_path,
        """
import torch, torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
dist.init_process_group("smddp")
x = torch.ones(2)
dist.all_reduce(x)
print(dist.get_world_size(), x.tolist())
""",
    )
    assert said == ["1 [1.0, 1.0]"]


def test_smp_init_sets_nothing(tmp_path):
    said = lines_of(
        2,
        tmp_path,
        """
import os, smp
before = dict(os.environ)
smp.init({"pipeline_parallel_degree": 2})
print(sorted(set(os.environ.items()) ^ set(before.items())))
""",
    )
    assert said == ["[]", "[]"]


SCRIPT = """
import os, signal, time
import torch, torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
dist.init_process_group("smddp")
rank = dist.get_rank()
dist.barrier()
"""


def test_survivors_name_a_killed_rank_at_once(tmp_path):
    """mpirun ends them after a quarter of a second."""
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT
        + """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(torch.ones(4))
except dist.DistBackendError as error:
    print(error, flush=True)
try:
    dist.recv(torch.ones(4), 1)
except dist.DistBackendError as error:
    print(error, flush=True)
"""
    )

    done = mpirun(3, script)

    assert done.returncode != 0
    for said in (
        "smp: group '0': all-reduce 2 (sum) of 4 float32: rank 1 is lost [SMP_ERR_PEER_LOST]",
        "rank 1 is lost [SMP_ERR_PEER_LOST]",
    ):
        assert done.stdout.count(said) >= 2, done.stdout + done.stderr


def test_ctrl_c_ends_a_wait(tmp_path):
    said = lines_of(
        2,
        tmp_path,
        SCRIPT
        + """
import threading
group = dist.new_group()
if rank == 0:
    for wait in (
        lambda: dist.recv(torch.ones(1), 1),
        lambda: dist.all_reduce(torch.ones(4), group=group),
    ):
        interrupt = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT))
        try:
            interrupt.start()
            wait()
        except KeyboardInterrupt:
            print("interrupted")
        interrupt.join()
dist.barrier()
dist.destroy_process_group()
print("end")
""",
    )
    assert said == ["end", "end", "interrupted", "interrupted"]


def test_ctrl_c_ends_the_making_of_a_group(tmp_path):
    """... in which the others do not join; the default group goes on."""
    said = lines_of(
        2,
        tmp_path,
        SCRIPT
        + """
import threading
from smp.collectives.ranks import Ranks
making = threading.Event()
meet = Ranks.group
def group(*args):
    making.set()
    return meet(*args)
Ranks.group = group
def interrupt():
    making.wait()
    os.kill(os.getpid(), signal.SIGINT)
if rank == 0:
    threading.Thread(target=interrupt).start()
    try:
        dist.new_group([0, 1])
    except KeyboardInterrupt:
        print("interrupted")
tensor = torch.ones(1)
dist.all_reduce(tensor)
print(tensor.item())
""",
    )
    assert said == ["2.0", "2.0", "interrupted"]


def test_ctrl_c_ends_the_wait_for_ranks_that_do_not_connect(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, signal, threading
from datetime import timedelta
import torch.distributed as dist
from smp.job import bootstrap
store = dist.HashStore()
waits = threading.Event()
wait = bootstrap.OverStore._wait
def told(self, keys):
    waits.set()
    wait(self, keys)
bootstrap.OverStore._wait = told
def interrupt():
    waits.wait()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    bootstrap.OverStore(store, 0, 2)
except KeyboardInterrupt:
    print("interrupted")
store.set_timeout(timedelta(seconds=0.1))
try:
    bootstrap.OverStore(store, 0, 3)
except dist.DistStoreError as error:
    print(error)
"""
    )
    done = subprocess.run(
        [sys.executable, script],
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == [
        "interrupted",
        "smp: ranks [1, 2] of 3 have not come within 0.1 s",
    ], done.stderr


def test_what_ctrl_c_leaves_lets_its_tensors_go_when_it_is_over(tmp_path):
    said = lines_of(
        2,
        tmp_path,
        SCRIPT
        + """
import gc, threading, weakref
store = dist.group.WORLD.get_group_store()
tensor = torch.ones(4)
if rank == 0:
    def interrupt():
        while dist.group.WORLD._get_sequence_number_for_group() < 2:
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
    kept = weakref.ref(tensor)
    try:
        dist.all_reduce(tensor)
    except KeyboardInterrupt:
        print("interrupted")
    del tensor
    gc.collect()
    print("kept", kept() is not None)
    store.set("left", b"")
    while kept() is not None:
        os.sched_yield()
    print("gone")
else:
    store.wait(["left"])
    dist.all_reduce(tensor)
dist.barrier()
""",
    )
    assert said == ["gone", "interrupted", "kept True"]


def test_a_signal_handler_may_leave_the_group_that_waits(tmp_path):
    """... which is gone when the wait ends."""
    said = lines_of(
        2,
        tmp_path,
        SCRIPT
        + """
import sys, threading
def leave(*_):
    dist.destroy_process_group()
    sys.exit()
def interrupt():
    while dist.group.WORLD._get_sequence_number_for_group() < 2:
        os.sched_yield()
    os.kill(os.getpid(), signal.SIGTERM)
try:
    if rank == 0:
        signal.signal(signal.SIGTERM, leave)
        threading.Thread(target=interrupt).start()
        dist.all_reduce(torch.ones(4))
    dist.recv(torch.ones(4), 0)
except SystemExit:
    print("left")
except dist.DistBackendError as error:
    print(error)
    dist.destroy_process_group()
""",
    )
    assert said == [
        "left",
        "smp: receive (tag 0) on rank 1: rank 0 has left [SMP_ERR_CLOSED]",
    ]


def test_a_script_may_end_without_destroying_its_groups(tmp_path):
    """... and with an operation under way in which nobody joins."""
    said = lines_of(
        2,
        tmp_path,
        SCRIPT
        + """
group = dist.new_group()
if rank == 0:
    dist.all_reduce(torch.ones(4), group=group, async_op=True).get_future()
print("end")
""",
    )
    assert said == ["end", "end"]


def test_a_forked_child_is_no_member(tmp_path):
    """... and its end leaves the job alone.  (MPI's own end hangs in a forked child.)"""
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT
        + """
dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()
child = os.fork()
if child == 0:
    try:
        dist.all_reduce(torch.ones(4))
    except dist.DistBackendError as error:
        print("SMP_ERR_CLOSED" in str(error), flush=True)
    raise SystemExit  # with what runs at exit
assert os.waitpid(child, 0)[1] == 0
tensor = torch.ones(4)
dist.all_reduce(tensor)
print(tensor.sum().item())
dist.destroy_process_group()
"""
    )
    done = torchrun(2, script)

    assert done.returncode == 0, done.stderr
    # torchrun's ranks write into each other's lines.
    assert (done.stdout.count("True"), done.stdout.count("8.0")) == (2, 2), done.stdout
