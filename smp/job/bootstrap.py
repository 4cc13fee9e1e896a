"""How the ranks of a job find each other, before anything else connects them.

A bootstrap knows this rank and can gather a few bytes from every rank.  The script's start
decides between the kinds of bootstrap:

- by ``mpirun`` or another MPI launcher: MPI, through mpi4py;
- by torchrun, or with ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR`` set (``MASTER_PORT`` is
  29500 then, unless it is set too), or in a process with a torch.distributed group: torch's
  store;
- by hand: one rank, no communication.
"""

import atexit
import itertools
import math
import os
import secrets
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from smp import _core

# Launchers give the number of ranks in these.
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
# Launchers without a number of ranks show themselves in these; srun's number of tasks goes with
# them.
MPI_MARKS = ("PMIX_RANK", "PMI_RANK")
# Ranks started by no MPI launcher find each other through these.
STORE_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
# torch's own where a launcher lets it choose.
DEFAULT_PORT = "29500"

# Ranks are on one host if they see each other's files there.
SHARED_FOLDER = Path("/dev/shm")
TOKEN_TAG = 1  # of messages on OverMPI's communicator

# The first byte of a rank's data, or of its error.
MADE, FAILED = b"+", b"-"

# Between two looks at a store, or at an MPI request.
SHORTEST_PAUSE_S = 1e-4
READ_S = 10.0  # for reading every rank's key
LONGEST_PAUSE_S = 0.01

# For the interpreter's and MPI's work at the end of a process after another rank's death.
END_AFTER_DEATH_S = 5.0
CORE_HEARS_S = 2.0  # of a death reported by another library

SIZE_BYTES = 8  # of a number of bytes, gathered first


class Bootstrap(ABC):
    """This rank's place, and the gathering of bytes.  Methods are collective over all ranks."""

    rank: int
    size: int
    local_rank: int  # among the ranks of this host
    local_size: int
    host: int  # number of this host, in order of the hosts' lowest ranks
    hosts: int
    network: str  # the same on ranks of one network namespace
    has_one_network: bool  # loopback reaches all ranks
    names: Sequence[int]  # by rank, for errors

    @abstractmethod
    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank; they may differ in length."""

    def gather_made(self, make: Callable[[], bytes]) -> list[bytes]:
        """The bytes made by each rank, by rank; no rank waits for one that cannot make its own.

        Raises:
            RuntimeError: ``make`` raised on another rank; the text names the rank.  The rank at
                fault raises the error of ``make``.
        """
        failure = None
        try:
            mine = MADE + make()
        except Exception as error:
            failure = error
            mine = FAILED + f"{type(error).__name__}: {error}".encode()
        everyone = self.allgather_bytes(mine)
        if failure is not None:
            raise failure
        for rank, theirs in zip(self.names, everyone, strict=True):
            if theirs[:1] == FAILED:
                raise RuntimeError(f"smp: rank {rank} cannot start: {theirs[1:].decode()}")
        return [theirs[1:] for theirs in everyone]

    def barrier(self) -> None:
        self.allgather_bytes(b"")

    def _find_hosts(self) -> None:
        """Number the hosts: each is a set of ranks with a view of each other's socket files."""
        with socket_file() as path:
            paths = self.allgather_bytes(path.encode())
            first = next(
                rank
                for rank, other in enumerate(paths)
                if rank == self.rank or os.access(other, os.W_OK)
            )
            self.network = f"{first}/{network_namespace()}"  # numbers are those of one kernel
            # A rank removes its file after all have looked.
            networks = [card.decode() for card in self.allgather_bytes(self.network.encode())]
        first_of_host = [int(card.split("/")[0]) for card in networks]
        names = list(dict.fromkeys(first_of_host))
        self.local_rank = first_of_host[: self.rank].count(first)
        self.local_size = first_of_host.count(first)
        self.host = names.index(first)
        self.hosts = len(names)
        self.has_one_network = len(set(networks)) == 1


class Alone(Bootstrap):
    """One rank, started by hand."""

    def __init__(self) -> None:
        self.rank, self.size, self.names = 0, 1, [0]
        self._find_hosts()

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


class OverMPI(Bootstrap):
    """Ranks of an MPI job.  MPI stays initialised until the process ends.

    Waits here are repeated looks, so Ctrl-C ends them.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        # Messages of the script's own MPI stay apart.
        self.comm, request = MPI.COMM_WORLD.Idup()
        self._abandoned: list[Any] = []
        self._wait(request)
        self._byte = MPI.BYTE
        self.rank, self.size = self.comm.rank, self.comm.size
        self.names = range(self.size)
        if self.size != (told := mpi_size() or self.size):
            raise RuntimeError(
                f"the launcher started {told} ranks, but mpi4py sees {self.size}: it was "
                f"built for another MPI than the launcher's ({MPI.Get_library_version()})"
            )
        token = secrets.token_hex(8).encode() if self.rank == 0 else b""
        self.job = self.allgather_bytes(token)[0].decode()
        self.is_for_any_thread = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._find_hosts()

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        sizes = bytearray(SIZE_BYTES * self.size)
        mine = len(data).to_bytes(SIZE_BYTES, "little")
        self._wait(self.comm.Iallgather(mine, sizes), mine, sizes)
        counts = [
            int.from_bytes(sizes[at : at + SIZE_BYTES], "little")
            for at in range(0, len(sizes), SIZE_BYTES)
        ]
        ends = list(itertools.accumulate(counts, initial=0))
        everyone = bytearray(ends[-1])
        parts = [everyone, counts, ends[:-1], self._byte]
        self._wait(self.comm.Iallgatherv([data, self._byte], parts), data, everyone)
        return [bytes(everyone[a:b]) for a, b in itertools.pairwise(ends)]

    def _wait(self, request: Any, *buffers: Any) -> None:
        """Wait for the request's end; the buffers are MPI's until then, in any case."""
        pause_s = SHORTEST_PAUSE_S
        try:
            while not request.Test():
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        except BaseException:
            self._abandoned.append((request, buffers))
            raise

    def tell(self, members: list[int], data: bytes, size: int) -> bytes:
        """The ``size`` bytes of the first of these ranks, on each; they alone call it."""
        if self.rank != members[0]:
            buffer = bytearray(size)
            self._wait(self.comm.Irecv([buffer, self._byte], members[0], TOKEN_TAG), buffer)
            return bytes(buffer)
        for other in members[1:]:
            self._wait(self.comm.Isend([data, self._byte], other, TOKEN_TAG), data)
        return data


def _name_of_life(name: str, store: dist.Store, size: int) -> str:
    """A new name for each meeting of these ranks over a store: torchrun's outlives groups."""
    life = (store.add(f"{name} have come", 1) - 1) // size
    return f"{name} {life}"


class OverStore(Bootstrap):
    """Ranks with one torch store: torchrun's, or that of a group of the script's.

    Args:
        name: of the keys; None: these are all ranks of the job.
        names: of the ranks, for errors, unless these are all ranks of the job.
    """

    _generations = itertools.count()  # each bootstrap has keys of its own

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        name: str | None = None,
        names: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.names = range(size) if names is None else names
        if name is None:
            prefix = f"smp-{next(self._generations)}"
        else:
            prefix = _name_of_life(f"{name} {sorted(self.names)}", store, size)
        self.store = dist.PrefixStore(prefix, store)
        self._calls = itertools.count()
        self._find_hosts()

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        call = next(self._calls)
        keys = [f"{call}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], data)  # type: ignore[arg-type]
        self._wait(keys)
        values = [self.store.get(key) for key in keys]
        # The store may be in rank 0's process, free to fail and end from here on.
        self.store.set(f"{call}/read/{self.rank}", b"")  # type: ignore[arg-type]
        if self.rank == 0:
            with suppress(dist.DistStoreError):  # of a rank killed meanwhile
                self._wait([f"{call}/read/{rank}" for rank in range(self.size)], READ_S)
        return values

    def _wait(self, keys: list[str], most_s: float = math.inf) -> None:
        """Wait for every rank's key; Ctrl-C ends this wait, unlike the store's own.

        Raises:
            torch.distributed.DistStoreError: the store's time is over; the text names the
                missing ranks.
        """
        limit_s = min(self.store.timeout.total_seconds(), most_s)  # type: ignore[attr-defined]
        deadline = time.monotonic() + limit_s
        for key in keys:  # one at a time: all ranks ask one server, again and again
            pause_s = SHORTEST_PAUSE_S
            while not self.store.check([key]):
                if time.monotonic() > deadline:
                    missing = [
                        name
                        for name, k in zip(self.names, keys, strict=True)
                        if not self.store.check([k])
                    ]
                    raise dist.DistStoreError(
                        f"smp: ranks {missing} of {self.size} have not come within "
                        f"{limit_s:g} s"
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def connect() -> Bootstrap:
    """The bootstrap for this process, by its start.  Collective.

    Raises:
        RuntimeError: an MPI launcher without mpi4py; MPI and torch.distributed disagree.
    """
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        if mpi_size() == size and has_mpi4py():
            boot = over_mpi()
            if boot.rank == rank:
                return boot
        return OverStore(dist.distributed_c10d._get_default_store(), rank, size)
    has_store = all(name in os.environ for name in STORE_NAMES)
    if mpi_size() != 1:
        if has_mpi4py():
            return over_mpi()
        if not has_store:
            raise RuntimeError(
                "started by an MPI launcher, but mpi4py is not installed: pip install mpi4py, "
                "or start the ranks by torchrun --nproc-per-node N, which needs no MPI"
            )
    if has_store:
        return OverStore(*next(dist.rendezvous(meeting_url())))
    return Alone()


def meeting_url() -> str:
    """The address of torch's store, from the environment; no variable is written."""
    if "MASTER_PORT" in os.environ:
        return "env://"
    rank, size, host = (os.environ[name] for name in STORE_NAMES)
    host = f"[{host}]" if ":" in host else host
    return f"tcp://{host}:{DEFAULT_PORT}?rank={rank}&world_size={size}"


@cache
def over_mpi() -> OverMPI:
    return OverMPI()


def running_mpi() -> OverMPI | None:
    """The job's MPI, if MPI runs and any thread may call it; MPI is not started for this."""
    mpi = over_mpi() if over_mpi.cache_info().currsize else None
    return mpi if mpi is not None and mpi.is_for_any_thread else None


_misses_a_rank = False


def miss_a_rank() -> None:
    """torch has reported another rank as gone, perhaps dead."""
    global _misses_a_rank
    _misses_a_rank = True


def look_for_the_dead() -> None:
    """At the end of the process: have the core hear of a death before its comms are closed.

    torch's connection to a killed rank may break a moment before the core's.  A rank that has
    left has not died: MPI's clean-up may wait for that rank.
    """
    until = time.monotonic() + CORE_HEARS_S
    while (
        _misses_a_rank
        and over_mpi.cache_info().currsize
        and not _core.someone_died()
        and time.monotonic() < until
    ):
        time.sleep(LONGEST_PAUSE_S)


def _end_without_the_dead() -> None:
    """After a rank's death this process ends in time, be it by SIGALRM.

    MPI's clean-up, the interpreter's last act, waits for all ranks.  Where the launcher lets
    the others live, Open MPI 5.0.11 may wait for the dead one for ever.
    """
    if over_mpi.cache_info().currsize and _core.someone_died():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, END_AFTER_DEATH_S)


# Early: handlers registered by the script run before, and take their time.
atexit.register(_end_without_the_dead)


def mpi_size() -> int:
    """Number of ranks started by an MPI launcher: 1 without one, 0 if none was given."""
    for name in MPI_SIZES:
        if name in os.environ:
            return int(os.environ[name])
    if any(name in os.environ for name in MPI_MARKS):
        return int(os.environ.get("SLURM_NTASKS", 0))
    return 1


def has_mpi_launcher() -> bool:
    return any(name in os.environ for name in (*MPI_SIZES, *MPI_MARKS))


def has_mpi4py() -> bool:
    from importlib.util import find_spec

    return find_spec("mpi4py") is not None


@contextmanager
def socket_file() -> Iterator[str]:
    """The path of a file seen by the ranks of this host, and no others, until the end.

    No rank sees the file of a process that could not make one.  A killed process leaves its
    file; the next job of this user removes it, since no process listens
    (``csrc/comm/transport/shm/meet.c``).
    """
    path = SHARED_FOLDER / f"smp-{secrets.token_hex(16)}.sock"
    early = path.with_suffix(".new")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            os.fchmod(listener.fileno(), 0o600)  # becomes the file's mode
            listener.bind(str(early))
            listener.listen()
            early.rename(path)
        except OSError:
            _remove(early)
        try:
            yield str(path)
        finally:
            _remove(path)


def _remove(path: Path) -> None:
    """A folder closed to writing has no file of this rank."""
    with suppress(OSError):
        path.unlink()


def network_namespace() -> int:
    """The namespace's number on this host; 0 where the kernel gives none."""
    try:
        return Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return 0
