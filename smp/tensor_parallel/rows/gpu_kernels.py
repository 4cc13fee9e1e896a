"""The use of the core's kernels on a GPU, after a trial.

``csrc/tp_kernels/gpu.cu`` is run by the tests on the CPU, and its present form has not yet run
on a GPU.  So at the first use of a dtype on a device all kernels compute something small in it,
and torch's operators the same in float32.  If they differ by more than the dtype's rounding, or
the driver refuses, a warning is given.  Torch's operators then serve tensors of that dtype
there.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from smp import _core

# Absolute for values around 1, relative beyond; for halves, a few roundings.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 2**-7, torch.bfloat16: 2**-4}

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
    if not ahead:
        return False
    known = _known.get((device, dtype))
    if known is not None:
        return known
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False  # nothing can be compared now: later
    with _lock:
        if (device, dtype) not in _known:
            _known[device, dtype] = _can_be_trusted(device, dtype, trials)
        return _known[device, dtype]


@contextmanager
def _force(to: bool) -> Iterator[None]:
    _forced.to = to
    try:
        yield
    finally:
        _forced.to = None


def _can_be_trusted(device: torch.device, dtype: torch.dtype, trials: Trials) -> bool:
    if device.type == "meta":
        return False
    try:
        refused = _core.tp_gpu_open(torch.zeros(1, device=device))
    except (BufferError, RuntimeError) as error:  # its tensors cannot be lent
        refused = str(error)
    if refused is not None:
        return False  # built without them, or no CUDA device: nothing to warn of
    try:
        wrong = _first_difference(device, dtype, trials)
    except RuntimeError as error:
        wrong = str(error)
    if wrong is not None:
        warnings.warn(
            f"smp: the kernels of tensor parallelism do not serve {dtype} on {device}, torch's "
            f"operators do: {wrong}",
            stacklevel=2,
        )
    return wrong is None


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
