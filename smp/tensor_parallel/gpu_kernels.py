"""Whether the core's kernels run on a GPU, which is tried before they are trusted.

``csrc/tp_kernels/gpu.cu`` has been compiled and run by the tests on the CPU, not yet on
a GPU.  So at their first use on a device all kernels compute something small, and so do
torch's operators.  If they differ, or the driver refuses, a warning says so and torch's
operators serve on that device.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from smp import _core

_TOLERANCE = 1e-4  # in float32, of values around 1

Trials = Callable[[torch.device], list[tuple[str, Callable[[], list[Tensor]]]]]

_known: dict[torch.device, bool] = {}
_lock = threading.Lock()


class _Forced(threading.local):  # autograd's threads do not have it
    to: bool | None = None


_forced = _Forced()


def usable(device: torch.device, trials: Trials) -> bool:
    """Whether the core's kernels serve tensors on the device.

    Args:
        trials: what each kernel is tried with there, by its name: functions that choose
            between the core and torch's operators by this one.
    """
    if _forced.to is not None:
        return _forced.to
    known = _known.get(device)
    if known is not None:
        return known
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False  # nothing can be compared now: later
    with _lock:
        if device not in _known:
            _known[device] = _can_be_trusted(device, trials)
        return _known[device]


@contextmanager
def _force(to: bool) -> Iterator[None]:
    _forced.to = to
    try:
        yield
    finally:
        _forced.to = None


def _can_be_trusted(device: torch.device, trials: Trials) -> bool:
    if device.type == "meta":
        return False
    try:
        refused = _core.tp_gpu_open(torch.zeros(1, device=device))
    except (BufferError, RuntimeError) as error:  # a device whose tensors nobody can borrow
        refused = str(error)
    if refused is not None:
        return False  # built without them, or no CUDA device: nothing to warn of
    try:
        wrong = _first_difference(trials(device))
    except RuntimeError as error:
        wrong = str(error)
    if wrong is not None:
        warnings.warn(
            f"smp: the kernels of tensor parallelism do not serve on {device}, torch's "
            f"operators do: {wrong}",
            stacklevel=2,
        )
    return wrong is None


def _first_difference(trials: list[tuple[str, Callable[[], list[Tensor]]]]) -> str | None:
    """Which kernel gives something else than torch's operators; None: none."""
    for name, run in trials:
        with _force(True):
            got = run()
        with _force(False):
            want = run()
        for one, other in zip(got, want, strict=True):
            off = (one - other).abs().max().item() if one.numel() else 0.0
            if not off <= _TOLERANCE:  # nor NaN
                return f"{name} differs by {off:.3g}"
    return None
