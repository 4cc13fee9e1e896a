"""Spec: what a user of the backend smddp sees: how jobs start, and how they end."""

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from smp.job import bootstrap
from tests.namespaces import without_mpi
from tests.ranks import TESTS, mpirun, python, torchrun

EXAMPLE = TESTS.parent / "examples" / "train_ddp.py"


def test_the_example_of_plain_ddp_runs():
    done = torchrun(2, EXAMPLE, "--steps", "300", "--width", "128")

    assert done.returncode == 0, done.stderr
    said = re.search(r"2 ranks on smddp: ([\d.]+) % of the sums are right", done.stdout)
    assert said and float(said[1]) > 50  # of 19 that there are


def test_torchrun_has_no_mpi_and_says_so(script):
    path = script("""
import torch
import smdistributed.dataparallel.torch.torch_smddp
torch.distributed.init_process_group("smddp")
""")
    done = torchrun(2, path, env={"SMP_COMM_TRANSPORTS": "shm,mpi"})

    assert done.returncode != 0
    assert (
        "comm_transports names 'mpi', but the ranks were not started by an MPI launcher"
        in done.stderr
    )


def lines_of(size: int, folder: Path, script: str) -> list[str]:
    """What the ranks of a job that ends well print, sorted."""
    path = folder / "script.py"
    path.write_text(script)
    done = mpirun(size, path)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_groups_beside_another_default_connect_over_mpi(script):
    """... each set of ranks on its own, also while some of them are making the next."""
    path = script("""
import torch
import torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
import smp
dist.init_process_group("gloo")
rank = dist.get_rank()
members = ([0, 1], [1, 2], [2, 3], [0, 3], [0, 1, 2, 3])
groups = [dist.new_group(ranks, backend="smddp") for ranks in members]
sums = []
for ranks, group in zip(members, groups):
    if rank in ranks:
        x = torch.tensor(rank)
        dist.all_reduce(x, group=group)
        sums.append(x.item())
over = {way for use in smp.comm_report().groups for way in use.to_hosts}
print(rank, *sums, *over)
dist.barrier()
""")
    done = mpirun(4, path, env={"SMP_COMM_TRANSPORTS": "mpi"})

    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "0 1 3 6 mpi",
        "1 1 3 6 mpi",
        "2 3 5 6 mpi",
        "3 5 3 6 mpi",
    ]


def test_under_mpirun_the_import_sets_what_is_missing(tmp_path):
    """... and leaves what is there; ``smp.init`` sets nothing."""
    said = lines_of(
        2,
        tmp_path,
        """
import os, smp
before = dict(os.environ)
smp.init({"pipeline_parallel_degree": 2})
changed = sorted(set(os.environ.items()) ^ set(before.items()))
os.environ["LOCAL_RANK"] = "7"
import smdistributed.dataparallel.torch.torch_smddp
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
print(changed, *(os.environ[name] for name in names), os.environ["MASTER_PORT"].isdecimal())
""",
    )
    assert said == ["[] 0 7 2 127.0.0.1 True", "[] 1 7 2 127.0.0.1 True"]


def test_the_traceback_of_an_exception_that_nobody_catches_is_shown_once(script):
    """... although torch's hook collects what hooks say, and the job ends before it ends."""
    path = script("""
import torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
dist.init_process_group("smddp")
dist.barrier()
if dist.get_rank() == 1:
    raise ArithmeticError("told to")
dist.barrier()
""")
    done = mpirun(2, path)

    assert done.returncode != 0
    assert done.stderr.count("ArithmeticError: told to") == 1
    assert "train.py" in done.stderr and "smp: rank 1 of 2: not caught" in done.stderr


LIVES = """
import torch, torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
for life in range(30):
    dist.init_process_group("smddp")
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.eq(2).all()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("start", [mpirun, torchrun])
@pytest.mark.sample(1)
def test_ranks_meet_again(start, script):
    """torchrun's store outlives them; under mpirun rank 0 may be the last that ends its own."""
    done = start(2, script(LIVES))

    assert done.returncode == 0, done.stderr


def test_each_life_of_each_set_of_ranks_has_keys_of_its_own():
    """... in a store that outlives them all."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    for life, members in enumerate(([0, 1], [0, 1, 2], [0, 1], [0, 1, 2], [0, 1])):

        def meet(rank, life=life, members=members):
            boot = bootstrap.OverStore(store, rank, len(members), "ranks", members)
            return boot.allgather_bytes(f"{life} {rank}".encode())

        with ThreadPoolExecutor(len(members)) as ranks:
            for heard in ranks.map(meet, range(len(members))):
                assert heard == [f"{life} {rank}".encode() for rank in range(len(members))]


def test_without_a_launcher_the_import_sets_nothing():
    script = """
import os, sys, torch  # which sets some of its own
for given in [{}, {"RANK": "0"}, {"SMP_COMM_TRANSPORTS": "tcp"}]:
    child = os.fork()
    if child == 0:
        os.environ.update(given)
        before = dict(os.environ)
        import smdistributed.dataparallel.torch.torch_smddp
        assert dict(os.environ) == before
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0, given
"""
    done = python("-c", script, env=without_mpi())
    assert done.returncode == 0, done.stderr


SECRET = """
import sys
import torch, torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
from smp.job import (bootstrap, transports)

told, stored, tokens = transports.job_secret, [], []
gather = bootstrap.OverStore.allgather_bytes

def gather_and_tell(boot, data):
    gathered = gather(boot, data)
    stored.extend(gathered)
    return gathered

def secret_of(boot, token):
    tokens.append(token)
    return told(boot, token)

bootstrap.OverStore.allgather_bytes, transports.job_secret = gather_and_tell, secret_of
dist.init_process_group("gloo")
for ranks in ([0, 1, 2], [1, 2]):
    group = dist.new_group(ranks, backend="smddp")
    if dist.get_rank() in ranks:
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        assert x.eq(len(ranks)).all()
everybody = [None] * 3
dist.all_gather_object(everybody, tokens)
assert len({*sum(everybody, [])}) == 2 == len(everybody[1])
sys.stdout.write(f"{len(tokens)} {any(token in stored for token in tokens)}\\n")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("launch", "in_store"), [(mpirun, False), (torchrun, True)])
def test_under_mpirun_the_secret_does_not_go_through_the_store(script, launch, in_store):
    """... also of a group of some of the ranks."""
    done = launch(3, script(SECRET))

    assert done.returncode == 0, done.stderr
    lines = [f"1 {in_store}", f"2 {in_store}", f"2 {in_store}"]
    assert sorted(done.stdout.splitlines()) == lines


def test_the_environment_settles_transports_and_pool_of_smddp_alone(script):
    path = script("""
import sys
import torch, torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
import smp
dist.init_process_group("smddp")
dist.barrier()
report = smp.comm_report()
[pool], [group] = report.group_pools, report.groups
sys.stdout.write(f"{group.to_hosts} {pool.bytes}\\n")  # in one piece
dist.barrier()
""")
    settings = {"SMP_COMM_TRANSPORTS": "tcp", "SMP_COMM_POOL_BYTES": str(3 << 20)}
    done = torchrun(2, path, env=settings)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"('tcp',) {3 << 20}"] * 2


SCRIPT = """
import os, signal, time
import torch, torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
dist.init_process_group("smddp")
rank = dist.get_rank()
dist.barrier()
"""


def test_ctrl_c_ends_a_wait_and_the_making_of_a_group(tmp_path):
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
group_of_all = dist.new_group()
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
    for wait in (
        lambda: dist.recv(torch.ones(1), 1),
        lambda: dist.all_reduce(torch.ones(4), group=group_of_all),
    ):
        thread = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT))
        try:
            thread.start()
            wait()
        except KeyboardInterrupt:
            print("interrupted")
        thread.join()
tensor = torch.ones(1)
dist.all_reduce(tensor)
dist.destroy_process_group()
print(tensor.item())
""",
    )
    assert said == ["2.0", "2.0", *["interrupted"] * 3]


def test_ctrl_c_ends_the_wait_for_ranks_that_do_not_connect(script):
    path = script("""
import os, signal, threading
from datetime import timedelta
import torch.distributed as dist
from smp.job import (bootstrap)
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
""")
    done = python(path)
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
        "smp: group '0': receive (tag 0) from rank 0: rank 0 has left [SMP_ERR_CLOSED]",
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


def test_a_forked_child_is_no_member(script):
    """... and its end leaves the job alone.  (MPI's own end hangs in a forked child.)"""
    path = script(
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
    done = torchrun(2, path)

    assert done.returncode == 0, done.stderr
    # torchrun's ranks write into each other's lines.
    assert (done.stdout.count("True"), done.stdout.count("8.0")) == (2, 2), done.stdout
