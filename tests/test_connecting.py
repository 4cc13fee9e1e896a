"""Spec: ranks that wait for one that never connects, and signals that come meanwhile.

No launcher here that would end the others: three processes, and their store.
"""

import os
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import smp
from smp import _core
from tests.ranks import FORK_SERVER, mpirun, rank_environment

DEADLINE_S = 60

# Rank 2 comes so far that the others know how to reach it, and stays there until its
# input ends.  Others send themselves a signal when they sleep in the core's connect().
SCRIPT = """
import os, re, signal, sys, threading
from pathlib import Path
import torch.distributed as dist
import smp
import smdistributed.dataparallel.torch.torch_smddp
from smp import _core
from smp.collectives import ranks
from smp.start import core_session

kind, sender = sys.argv[1], int(sys.argv[2])
sent = getattr(signal, sys.argv[3])
rank = int(os.environ["RANK"])
POLL = {"7", "73", "271"}  # x86-64, arm64: poll, ppoll
connects = threading.Event()
seen = {}


def open_sockets():
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            pass  # the listing's own
    return {link for link in links if link.startswith("socket:")}


def signal_when_it_sleeps():
    connects.wait()
    main = Path(f"/proc/self/task/{os.getpid()}/syscall")  # of the main thread
    while main.read_text().split()[0] not in POLL:
        os.sched_yield()
    os.kill(os.getpid(), sent)


def begin(connect, card):
    seen["file"] = re.search(rb"/dev/shm/smp-[0-9a-f]+[.]sock", card)
    if rank == 2:
        print("absent", flush=True)
        sys.stdin.read()
        return
    connects.set()
    connect()


class Comm:
    def __init__(self, *args):
        seen["sockets"] = open_sockets()
        self.comm = _core.Comm(*args)

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def connect(self, *args):
        begin(lambda: self.comm.connect(*args), self.card())


class Core:
    Comm = Comm

    def __getattr__(self, name):
        return getattr(_core, name)

    def open(self, *args):
        seen["sockets"] = open_sockets()
        self.card = _core.open(*args)
        return self.card

    def connect(self, *args):
        begin(lambda: _core.connect(*args), self.card)


ranks._core = core_session._core = Core()
if rank == sender or (sender < 0 and rank != 2):
    threading.Thread(target=signal_when_it_sleeps, daemon=True).start()
try:
    if kind == "smddp":
        dist.init_process_group("smddp")
    else:
        smp.init({"pipeline_parallel_degree": 3, "ddp_dist_backend": "gloo"})
except KeyboardInterrupt:
    assert connects.is_set()
    left = len(open_sockets() - seen["sockets"])
    file = seen["file"]
    print("interrupted", left, file is not None and Path(file[0].decode()).exists(), flush=True)
    raise
"""


@contextmanager
def started(script, transport: str, *argv: str) -> Iterator[list[subprocess.Popen]]:
    """The three ranks; rank 2 is where it stays.  None outlives the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    python = FORK_SERVER.command()
    processes = [
        subprocess.Popen(
            [*python, str(script(SCRIPT)), *argv],
            env=rank_environment(
                {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": "3",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "SMP_COMM_TRANSPORTS": transport,
                }
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        absent = processes[2].stdout
        assert absent is not None
        assert absent.readline() == "absent\n", processes[2].communicate(timeout=DEADLINE_S)
        yield processes
    finally:
        for process in reversed(processes):
            assert process.stdin is not None
            if not process.stdin.closed:
                process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(DEADLINE_S)
        for process in processes:
            process.kill()
            process.wait()


def is_stale(path: Path) -> bool:
    """Nobody listens at this socket's file."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) != 0


def stale() -> set[Path]:
    return {path for path in Path("/dev/shm").glob("smp-*") if is_stale(path)}


@pytest.mark.parametrize(
    "transport, kind",
    [("shm", "smddp"), ("tcp", "smddp"), ("ucx", "smp.init")],
)
def test_ctrl_c_ends_the_wait_for_a_rank_that_never_connects(script, transport, kind):
    before = stale()
    with started(script, transport, kind, "-1", "SIGINT") as ranks:
        said = [rank.communicate(timeout=DEADLINE_S) for rank in ranks[:2]]

    for rank, (out, err) in zip(ranks, said, strict=False):
        assert out == "interrupted 0 False\n", err
        assert "KeyboardInterrupt" in err
        assert rank.returncode in (130, -signal.SIGINT)
    assert stale() <= before


def test_sigterm_ends_a_rank_that_connects_and_the_others_name_it(script):
    """They do not wait for the third one, and remove the file that it has left."""
    before = stale()
    with started(script, "shm", "smddp", "1", "SIGTERM") as ranks:
        ended = ranks[1].wait(DEADLINE_S)
        _, err = ranks[0].communicate(timeout=DEADLINE_S)

    assert ended == -signal.SIGTERM
    assert "connecting rank 0 to rank 1" in err and "SMP_ERR_PEER_LOST" in err, err
    assert stale() <= before


@pytest.mark.parametrize("begin", ["smp.init({})", "dist.init_process_group('smddp')"])
def test_under_mpirun_a_rank_that_is_interrupted_there_ends_the_job(script, begin):
    """The other one never comes, and MPI would wait for it at the end."""
    path = script(f"""
import os, signal, sys, threading
import torch.distributed as dist
import smp
import smdistributed.dataparallel.torch.torch_smddp
from smp.job import (bootstrap)
waits = threading.Event()
def told(wait):
    def waiting(self, *args):
        waits.set()
        wait(self, *args)
    return waiting
def interrupt():
    waits.wait()
    os.kill(os.getpid(), signal.SIGINT)
for boot in (bootstrap.OverMPI, bootstrap.OverStore):
    if os.environ["RANK"] == "0":
        boot._wait = told(boot._wait)
    else:
        boot.allgather_bytes = lambda *args: signal.pause()
if os.environ["RANK"] == "0":
    threading.Thread(target=interrupt, daemon=True).start()
{begin}
""")
    done = mpirun(2, path, timeout_s=DEADLINE_S)

    assert done.returncode != 0
    assert "smp: rank 0 of 2: interrupted at " in done.stderr


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_process_without_descriptors_is_told_so():
    """However few are left: the reason, and the limit; nothing stays open, or in /dev/shm."""
    smp.reset()
    before, files = descriptors(), stale()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = []
    for more in range(40):
        highest = max(map(int, descriptors()))
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(highest)]  # no gaps below
        limit = max(held) + 1 + more
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            _core.open(0, 2, 1, 0, 0, -1, "shm,tcp", None, "job", 0.0, 0.0, ("a", "b"))
            break
        except RuntimeError as error:
            said.append((limit, str(error)))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            _core.close()
            for one in held:
                os.close(one)
    assert len(said) > 3
    for limit, text in said:
        assert f"Too many open files (this process may have {limit}: ulimit -n)" in text, text
    assert descriptors() == before and stale() <= files
