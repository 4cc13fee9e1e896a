"""The environment wanted by ``torch.distributed``, for processes started by mpirun.

torchrun sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; mpirun sets none of
these.  Other launchers with RANK, WORLD_SIZE and MASTER_ADDR may leave the port to us.
"""

import os
import socket

from smp.job import addresses, bootstrap
from smp.job.config import comm_environment
from smp.job.job_end import Watch

WANTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Reserve the store's ports until the store takes them.
_reserved: list[socket.socket] = []

# The value of MASTER_PORT, if it is ours, and the next one.
_ports: list[str] = []


def complete_environment() -> None:
    """Set the missing variables, for ranks started by a launcher.  Collective if an MPI
    launcher started them.

    Raises:
        RuntimeError: an MPI launcher without mpi4py.
        ConfigError: ``SMP_COMM_INTERFACE`` names nothing of this host.
    """
    if all(name in os.environ for name in WANTED):
        return
    if not bootstrap.has_mpi_launcher():
        if all(name in os.environ for name in bootstrap.STORE_NAMES):
            os.environ.setdefault("MASTER_PORT", bootstrap.DEFAULT_PORT)
        return
    is_alone = bootstrap.mpi_size() == 1
    if not is_alone and not bootstrap.has_mpi4py():
        raise RuntimeError(
            "smddp: started by an MPI launcher, but mpi4py is not installed: pip install "
            f"mpi4py, or set {', '.join(WANTED)}"
        )
    boot = bootstrap.Alone() if is_alone else bootstrap.over_mpi()
    Watch(boot).start()  # else the others would wait for a failed rank
    address, *ports = boot.gather_made(lambda: _meeting_place(boot))[0].decode().split()
    if "MASTER_PORT" not in os.environ:
        _ports[:] = ports
    values = (boot.rank, boot.local_rank, boot.size, address, ports[0])
    for name, value in zip(WANTED, values, strict=True):
        os.environ.setdefault(name, str(value))


def take_next_port() -> None:
    """Let the next ``init_process_group`` have a store at another port, if the port is ours.

    Else an early rank would find the last store, which rank 0 is about to end.
    """
    if _ports and os.environ.get("MASTER_PORT") == _ports[0]:
        _ports.reverse()
        os.environ["MASTER_PORT"] = _ports[0]


def _meeting_place(boot: bootstrap.Bootstrap) -> bytes:
    """Address and two ports for rank 0's store."""
    if boot.rank != 0:
        return b""
    for _ in range(2):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", 0))
        _reserved.append(listener)
    ports = [str(listener.getsockname()[1]) for listener in _reserved]
    address = addresses.address(boot, comm_environment().get("comm_interface"))
    return " ".join([address, *ports]).encode()
