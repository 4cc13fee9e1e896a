"""Which transports the core may use besides shared memory and TCP, which it always has.

The MPI transport is an extension of its own (``csrc/comm/mpi/mpi.c``), built where there was
an ``mpicc``; it works in jobs that an MPI launcher started.
"""

import hashlib
import os
import warnings
from importlib.util import find_spec
from pathlib import Path

from smp import _core
from smp.job.bootstrap import Bootstrap, OverMPI, OverStore
from smp.job.config import ConfigError


def offer(boot: Bootstrap, wanted: tuple[str, ...] | None) -> None:
    """Make known to the core what this job can use, before it is opened.

    Args:
        boot: how the ranks found each other.
        wanted: ``comm_transports``: names in order of preference; None: whatever works.

    Raises:
        RuntimeError: ``wanted`` names MPI, and this job or this build has none.
    """
    demanded = wanted is not None and "mpi" in wanted
    if wanted is not None and not demanded:
        return
    if not isinstance(boot, OverMPI):
        if demanded:
            raise RuntimeError(
                "comm_transports names 'mpi', but the ranks were not started by an MPI "
                "launcher (mpirun)"
            )
        return
    if find_spec("smp._mpi") is None:
        if demanded:
            raise RuntimeError(
                "comm_transports names 'mpi', but smp was built without it: install again "
                "with mpicc on PATH (SMP_WITH_MPI=1 says what is missing)"
            )
        return
    from smp import _mpi  # type: ignore[attr-defined]

    _core.register_transport(_mpi.transport)


def check_interface(interface: str | None) -> None:
    """Make sure that ``comm_interface`` names something of this host.

    Args:
        interface: the name of a network interface, an address of it, or its subnet
            (``"10.0.0.0/24"``); None: the core chooses.

    Raises:
        ConfigError: it names nothing here; the text lists what it could name.
    """
    if interface is not None and not _core.addresses(interface):
        raise ConfigError(
            f"comm_interface={interface!r}: must be the name, an address or the subnet of a "
            f"network interface of this host, which has {', '.join(_core.addresses(None))}"
        )


def job_secret(boot: Bootstrap, token: bytes) -> str:
    """What the ranks of this job know each other by, and nobody else knows.

    Args:
        boot: how the ranks found each other, and got the token.
        token: random, the same on all of these ranks, of no other job.

    Returns:
        the token, hashed together with the file that ``SMP_SECRET_FILE`` names, if any.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    path = os.environ.get("SMP_SECRET_FILE")
    if not path:
        if isinstance(boot, OverStore) and boot.hosts > 1:
            warnings.warn(
                "smp: the job's secret came through torch's store, where whoever reaches "
                "MASTER_PORT can read it; on a network that others use, let SMP_SECRET_FILE "
                "name a file with a secret, the same on all hosts",
                stacklevel=2,
            )
        return token.decode()
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"SMP_SECRET_FILE={path!r} cannot be read: {error.strerror}"
        ) from None
    if not secret:
        raise ConfigError(f"SMP_SECRET_FILE={path!r} is empty")
    return hashlib.sha256(token + b"\0" + secret).hexdigest()[:32]
