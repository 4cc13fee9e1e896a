"""The use of the core's kernels on a GPU, after a trial.

``csrc/tp_kernels/gpu.cu`` is run by the tests on the CPU, and its present form has not yet run
on a GPU.  So at the first use of a dtype on a device all kernels compute something small in it,
and torch's operators the same in float32.  If they differ by more than the dtype's rounding, or
the driver refuses, a warning is given.  Torch's operators then serve tensors of that dtype
there.
"""

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from smp import _core

# 0: torch's operators serve on GPUs.
SWITCH = "SMP_TP_GPU_KERNELS"

# Absolute for values around 1, relative beyond; for halves, a few roundings.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 2**-7, torch.bfloat16: 2**-4}

# Answers of the core that nobody need be warned of.
_NOT_THERE = ("smp was built without nvcc", "it is no CUDA device")

Trials = Callable[
    [torch.device, torch.dtype], list[tuple[str, Callable[[torch.dtype], list[Tensor]]]]
]

_known: dict[tuple[torch.device, torch.dtype], bool] = {}
_lock = threading.Lock()


class _Forced(threading.local):  # autograd's threads do not have it
    to: bool | None = None


_forced = _Forced()


def usable(
    device: torch.device, dtype: torch.dtype, trials: Trials, ahead: bool = True
) -> bool:
    """Whether the core's kernels serve tensors of the dtype on the device.

    Args:
        ahead: False: torch's operators were the faster ones, and serve but in a trial.
        trials: each kernel's trial there, by its name.  A trial is a function from the dtype of
            computing to outputs and gradients.  The functions in it choose between the core and
            torch's operators by `usable`.
    """
    if _forced.to is not None:
        return _forced.to
    if not ahead or os.environ.get(SWITCH) == "0":
        return False
    known = _known.get((device, dtype))
    if known is not None:
        return known
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False  # nothing can be compared now: later
    with _lock:
        if (device, dtype) not in _known:
            with ThreadPoolExecutor(1) as clean:  # of the caller's modes, hooks and autocast
                tried = clean.submit(_can_be_trusted, device, dtype, trials).result()
            if tried is None:
                return False
            _known[device, dtype] = tried
        return _known[device, dtype]


@contextmanager
def _force(to: bool) -> Iterator[None]:
    _forced.to = to
    try:
        yield
    finally:
        _forced.to = None


def _can_be_trusted(device: torch.device, dtype: torch.dtype, trials: Trials) -> bool | None:
    """None: there was no memory for a trial.

    Raises:
        RuntimeError: the GPU has failed, and computes nothing more for this process.
    """
    if device.type == "meta":
        return False
    on = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    try:
        with on:
            wrong = _core.tp_gpu_open(torch.zeros(1, device=device))
            if wrong in _NOT_THERE:
                return False
            wrong = wrong or _first_difference(device, dtype, trials)
    except torch.OutOfMemoryError:
        return None
    except BufferError:  # its tensors cannot be lent
        return False
    except RuntimeError as error:
        wrong = str(error)
        if device.type == "cuda":
            _check_that_it_goes_on(device, error)
    if wrong is not None:
        warnings.warn(
            f"smp: the kernels of tensor parallelism do not serve {dtype} on {device}, torch's "
            f"operators do: {wrong}",
            stacklevel=2,
        )
    return wrong is None


def _check_that_it_goes_on(device: torch.device, error: RuntimeError) -> None:
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        raise RuntimeError(
            f"smp: {device} has failed while the kernels of tensor parallelism were tried, or "
            f"before: {error}.  {SWITCH}=0 leaves out these kernels"
        ) from error


def _first_difference(device: torch.device, dtype: torch.dtype, trials: Trials) -> str | None:
    """The first kernel that differs from torch's operators; None: none."""
    for name, run in trials(device, dtype):
        with _force(True):
            got = run(dtype)
        with _force(False):
            want = run(torch.float32)
        for one, other in zip(got, want, strict=True):
            gap = (one.float() - other).abs() / other.abs().clamp(min=1)
            off = gap.max().item() if one.numel() else 0.0
            if not off <= _TOLERANCES[dtype]:  # nor NaN
                return f"{name} differs by {off:.3g}"
    return None
