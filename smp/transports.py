"""Which transports the core may use besides shared memory, which it always has.

The MPI transport is an extension of its own (``csrc/comm/mpi.c``), built where there was
an ``mpicc``; it works in jobs that an MPI launcher started.
"""

from importlib.util import find_spec

from smp import _core
from smp.bootstrap import Bootstrap, OverMPI


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
