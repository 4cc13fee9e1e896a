"""How the ranks of a job find each other, before anything else connects them.

A bootstrap knows who this rank is and can gather a few bytes from every rank.  Which
one is used follows from how the script was started:

- by ``mpirun`` or another MPI launcher: MPI, through mpi4py;
- by torchrun, or with ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` set,
  or in a process that already has a torch.distributed group: torch's store;
- by hand: one rank, no communication.
"""

import itertools
import os
import socket
import time
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

# How launchers say how many ranks there are.
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
# How a launcher shows itself without saying that; srun's number of tasks goes with it.
MPI_MARKS = ("PMIX_RANK", "PMI_RANK")

# Between two looks at a store.
SHORTEST_PAUSE_S = 1e-4
LONGEST_PAUSE_S = 0.01


class Bootstrap(ABC):
    """Who this rank is; and gathering bytes.  Methods are collective over all ranks."""

    rank: int
    size: int
    local_rank: int  # among the ranks of this host
    local_size: int
    host: int  # number of this host, in order of the hosts' lowest ranks
    hosts: int

    @abstractmethod
    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank; they may differ in length."""

    def barrier(self) -> None:
        self.allgather_bytes(b"")

    def _settle(self, host_of_rank: list[Any]) -> None:
        """Number the hosts, given anything by rank that is equal on the same host."""
        names = list(dict.fromkeys(host_of_rank))
        mine = host_of_rank[self.rank]
        self.local_rank = host_of_rank[: self.rank].count(mine)
        self.local_size = host_of_rank.count(mine)
        self.host = names.index(mine)
        self.hosts = len(names)


class Alone(Bootstrap):
    """One rank that was started by hand."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self._settle([0])

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


class OverMPI(Bootstrap):
    """Ranks of an MPI job.  MPI stays initialised until the process ends."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD.Dup()  # messages of the script's own MPI stay apart
        self.rank, self.size = self.comm.rank, self.comm.size
        if self.size != (told := mpi_size() or self.size):
            raise RuntimeError(
                f"the launcher started {told} ranks, but mpi4py sees {self.size}: it was "
                f"built for another MPI than the launcher's ({MPI.Get_library_version()})"
            )
        shared = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        leader = shared.bcast(self.rank)
        shared.Free()
        self._settle(self.comm.allgather(leader))

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        return self.comm.allgather(data)


class OverStore(Bootstrap):
    """Ranks that share a torch store: torchrun's, or that of a group that is there.

    Args:
        name: of the keys, used once; None: these are all ranks of the job.
    """

    _generations = itertools.count()  # each bootstrap has keys of its own

    def __init__(
        self, store: dist.Store, rank: int, size: int, name: str | None = None
    ) -> None:
        self.rank, self.size = rank, size
        prefix = name or f"smp-{next(self._generations)}"
        self.store = dist.PrefixStore(prefix, store)
        self._calls = itertools.count()
        self._settle(self.allgather_bytes(host_identity()))

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        call = next(self._calls)
        keys = [f"{call}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], data)  # type: ignore[arg-type]
        self._wait(keys)
        return [self.store.get(key) for key in keys]

    def _wait(self, keys: list[str]) -> None:
        """Until every rank's key is there; unlike the store's own wait, Ctrl-C ends it.

        Raises:
            torch.distributed.DistStoreError: the store's time is over; names who is missing.
        """
        limit_s = self.store.timeout.total_seconds()  # type: ignore[attr-defined]
        deadline = time.monotonic() + limit_s
        for key in keys:  # one at a time: all ranks ask one server, again and again
            pause_s = SHORTEST_PAUSE_S
            while not self.store.check([key]):
                if time.monotonic() > deadline:
                    missing = [r for r, k in enumerate(keys) if not self.store.check([k])]
                    raise dist.DistStoreError(
                        f"smp: ranks {missing} of {self.size} have not come within "
                        f"{limit_s:g} s"
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def connect() -> Bootstrap:
    """The bootstrap that fits how this process was started.  Collective.

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
    has_torchrun = all(k in os.environ for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    if mpi_size() != 1:
        if has_mpi4py():
            return over_mpi()
        if not has_torchrun:
            raise RuntimeError(
                "started by an MPI launcher, but mpi4py is not installed: pip install mpi4py"
            )
    if has_torchrun:
        return OverStore(*next(dist.rendezvous("env://")))
    return Alone()


@cache
def over_mpi() -> OverMPI:
    return OverMPI()


def mpi_size() -> int:
    """Number of ranks that an MPI launcher started: 1 without one, 0 if it did not say."""
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


def host_identity() -> bytes:
    """Equal in processes of one host, which can share memory.

    Network namespaces of one machine share its boot id, so /dev/shm counts too.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    shm = Path("/dev/shm")
    parts = [
        socket.gethostname(),
        boot_id.read_text().strip() if boot_id.exists() else "",
        str(shm.stat().st_dev) if shm.exists() else "",
    ]
    return "|".join(parts).encode()
