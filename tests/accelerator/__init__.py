"""A pretended accelerator, for machines without a GPU: ``pretend.cpp`` beside this file.

    accelerator.load()                      # once a process; cannot be undone
    torch.ones(2, device="pretend")

``build`` compiles it into ``build/accelerator``, once for each source and PyTorch; it
needs a C++ compiler, nothing else.  A process that has loaded it has an accelerator as
far as PyTorch is concerned, so the ranks that do are a team of their own
(``tests/devices.py``).
"""

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

NAME = "pretend"
DRIVER = "SMP_CUDA_LIBRARY"  # read by csrc/device/driver.c
SOURCE = Path(__file__).with_name("pretend.cpp")
BUILT = Path(__file__).resolve().parents[2] / "build" / "accelerator"


def compiler() -> str | None:
    """The C++ compiler, or None."""
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


def library() -> Path:
    """Where the compiled source is, or will be."""
    said = SOURCE.read_bytes() + torch.__version__.encode()
    return BUILT / f"pretend-{hashlib.sha256(said).hexdigest()[:16]}.so"


def build() -> Path:
    """Compile the source, unless it has been done.

    Raises:
        RuntimeError: there is no compiler, or it failed; with what it said.
    """
    made = library()
    if made.exists():
        return made
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("the pretended accelerator needs a C++ compiler (c++ on PATH)")
    torch_at = Path(torch.__file__).parent
    include, lib = torch_at / "include", torch_at / "lib"
    command = [cxx, "-std=c++20", "-O1", "-pthread"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-I{include}", f"-I{include}/torch/csrc/api/include"]
    behind = [str(SOURCE), f"-L{lib}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}"]
    _compile(made, command, behind)
    return made


def _compile(made: Path, command: list[str], behind: list[str]) -> None:
    """A shared library: ``command`` is the compiler, ``behind`` what follows the output."""
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        fresh = Path(folder) / made.name
        command = [*command, "-fPIC", "-shared", "-o", str(fresh), *behind]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        fresh.replace(made)  # at once: another process may be building it too


def load() -> torch.device:
    """Make the device known to this process; the device."""
    if not hasattr(torch, NAME):
        torch.ops.load_library(build())
        # The CPU's operators say so of outputs that the fallback has just made for them.
        warnings.filterwarnings("ignore", "An output with one or more elements was resized")
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _device_module())
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return torch.device(NAME, 0)


def stand_in() -> Path:
    """The stand-in of the GPU's driver, compiled, with the kernels that it can launch.

    Raises:
        RuntimeError: the compiler failed; with what it said.
    """
    folder = SOURCE.parents[1] / "core"
    csrc = folder.parents[1] / "csrc"
    sources = [*sorted(folder.glob("stand_in*")), *sorted((csrc / "tp_kernels").iterdir())]
    said = b"".join(path.read_bytes() for path in sources)
    name = f"stand_in-{hashlib.sha256(said).hexdigest()[:16]}"
    made = BUILT / f"{name}.so"
    if not made.exists():
        kernels = BUILT / f"{name}.kernels.so"
        where = [f"-I{csrc}", f"-I{folder}"]
        _compile(
            kernels,
            [compiler() or "c++", "-std=c++20", "-O1", *where],
            [str(folder / "stand_in_gpu.cpp")],
        )
        cc = os.environ.get("CC", "cc")
        behind = [str(folder / "stand_in.c"), str(kernels), "-lm"]
        _compile(made, [cc, "-std=c11", "-O1", "-pthread"], behind)
    return made


def use_driver() -> None:
    """``smp``'s device pool takes the pretended device for a GPU, whose driver is the
    stand-in, while the environment says so: to the end of the test."""
    load()
    os.environ[DRIVER] = str(stand_in())
    torch.ops.pretend.use_driver(os.environ[DRIVER])


@contextlib.contextmanager
def memory_of_driver() -> Iterator[None]:
    """In the block each new tensor lies in a shared allocation of the stand-in."""
    torch.ops.pretend.use_driver_memory(True)
    try:
        yield
    finally:
        torch.ops.pretend.use_driver_memory(False)


@contextlib.contextmanager
def spoilt_copies(spoilt: bool) -> Iterator[None]:
    """In the block, if ``spoilt``, a copy between devices by the stand-in changes a byte."""
    library = ctypes.CDLL(os.environ[DRIVER])
    address = (ctypes.c_void_p * 9).in_dll(library, "stand_in")[8]
    misbehave = ctypes.CFUNCTYPE(None, ctypes.c_int)(address)  # stand_in.h
    misbehave(int(spoilt))
    try:
        yield
    finally:
        misbehave(0)


def late_copies() -> int:
    """Copies so far that were made after the call that asked for them had returned."""
    return torch.ops.pretend.late_copies()


@contextlib.contextmanager
def _on_device(device: torch.device | int) -> Iterator[None]:
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(device)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def _set_sync_debug_mode(mode: int | str) -> None:
    """As ``torch.cuda.set_sync_debug_mode``, also for waits for events and devices."""
    names = ("default", "warn", "error")
    torch.ops.pretend.set_sync_debug_mode(names.index(mode) if mode in names else int(mode))


def _device_module() -> ModuleType:
    """What ``torch.cuda`` is for CUDA: the part of it that PyTorch and smp use."""
    module = ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._initialized = True  # a checkpoint asks this before it keeps random states
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 2
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.device = _on_device
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.set_sync_debug_mode = _set_sync_debug_mode
    module.get_sync_debug_mode = torch.ops.pretend.get_sync_debug_mode
    module.manual_seed = module.manual_seed_all = torch.ops.pretend.manual_seed
    module.get_rng_state = lambda device=None: torch.ops.pretend.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.ops.pretend.set_rng_state(state)
    return module
