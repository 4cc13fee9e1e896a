"""Whether the core's kernels run on a GPU, which is tried before they are trusted.

``csrc/tp_kernels/gpu.cu`` has been compiled and run by the tests on the CPU, not yet on
a GPU.  So at the first use of a dtype on a device all kernels compute something small in it,
and torch's operators the same in float32.  If they differ by more than the dtype's rounding, or
the driver refuses, a warning says so and torch's operators serve tensors of that dtype there.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from smp import _core

# Of values around 1, relative beyond; of halves, a few roundings.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 2**-7, torch.bfloat16: 2**-4}

_known: dict[tuple[torch.device, torch.dtype], bool] = {}
_lock = threading.Lock()


class _Forced(threading.local):  # autograd's threads do not have it
    to: bool | None = None


_forced = _Forced()


def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the core's kernels serve tensors of the dtype on the device."""
    if _forced.to is not None:
        return _forced.to
    known = _known.get((device, dtype))
    if known is not None:
        return known
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False  # nothing can be compared now: later
    with _lock:
        if (device, dtype) not in _known:
            _known[device, dtype] = _can_be_trusted(device, dtype)
        return _known[device, dtype]


@contextmanager
def _force(to: bool) -> Iterator[None]:
    _forced.to = to
    try:
        yield
    finally:
        _forced.to = None


def _can_be_trusted(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type == "meta":
        return False
    try:
        refused = _core.tp_gpu_open(torch.zeros(1, device=device))
    except (BufferError, RuntimeError) as error:  # a device whose tensors nobody can borrow
        refused = str(error)
    if refused is not None:
        return False  # built without them, or no CUDA device: nothing to warn of
    try:
        wrong = _first_difference(device, dtype)
    except RuntimeError as error:
        wrong = str(error)
    if wrong is not None:
        warnings.warn(
            f"smp: the kernels of tensor parallelism do not serve {dtype} on {device}, torch's "
            f"operators do: {wrong}",
            stacklevel=2,
        )
    return wrong is None


def _first_difference(device: torch.device, dtype: torch.dtype) -> str | None:
    """Which kernel gives something else than torch's operators; None: none."""
    for name, run in _trials(device, dtype):
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


def _trials(
    device: torch.device, dtype: torch.dtype
) -> list[tuple[str, Callable[[torch.dtype], list[Tensor]]]]:
    """Each kernel: from the dtype in which it computes to outputs and gradients.

    Args:
        dtype: that of the kernel; what it is given has the same values in the other.
    """
    from smp.tensor_parallel import kernels

    drop = kernels.Dropout(0.25, 0x5EED << 40 | 7, first=13)
    source = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source).to(dtype).to(device)

    x, residual, grad = (drawn(37, 130) for _ in range(3))
    bias, weight, shift = (drawn(130) for _ in range(3))
    scores, mask = drawn(2, 3, 7, 70), drawn(2, 1, 1, 70)
    targets = torch.randint(-20, 150, (37,), generator=source)
    targets = targets.clamp(min=0).to(device)

    def with_gradients(
        function: Callable[..., Any], *inputs: Tensor
    ) -> Callable[[torch.dtype], list[Tensor]]:
        def run(computes_in: torch.dtype) -> list[Tensor]:
            leaves = [t.detach().to(computes_in, copy=True).requires_grad_() for t in inputs]
            with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
                out = function(*leaves)
                seed = grad.flatten()[: out.numel()].view_as(out).to(out.dtype)
                return [out.detach(), *torch.autograd.grad(out, leaves, seed)]

        return run

    def entropy(logits: Tensor) -> Tensor:
        return kernels.split_cross_entropy(
            logits, targets, 20, 150, lambda own: own, label_smoothing=0.1
        )

    def softmax(scores: Tensor) -> Tensor:
        return kernels.masked_softmax_dropout(
            scores, mask.to(scores.dtype), scale=0.5, causal=True, window=40, drop=drop
        )

    def added(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return kernels.bias_dropout_residual(x, bias, residual, drop)

    def norm(
        x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor
    ) -> Tensor:
        return kernels.bias_dropout_residual_layer_norm(
            x, bias, residual, weight, shift, drop=drop
        )[0]

    def embedding(table: Tensor) -> Tensor:
        return kernels.split_embedding(table, targets, 20)

    return [
        ("bias, dropout and residual", with_gradients(added, x, bias, residual)),
        ("layer norm", with_gradients(norm, x, bias, residual, weight, shift)),
        ("masked softmax", with_gradients(softmax, scores)),
        ("cross-entropy", with_gradients(entropy, x)),
        ("embedding", with_gradients(embedding, x)),
    ]
