"""What PyTorch keeps by thread and a request must carry: see design.md, section 3.

Grad mode travels in the envelope; the rest is rare and travels as a value.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils import _device


def _autocast_devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


_any_autocast = torch._C._is_any_autocast_enabled
_function_modes = torch._C._len_torch_function_stack
_inference = torch.is_inference_mode_enabled


def capture() -> tuple | None:
    """The thread's state where it differs from a fresh worker's; None where it does not.

    Returns:
        ``(inference mode, ((device, dtype, cache), ...), default device or None)``
    """
    if not (_any_autocast() or _function_modes() or _inference()):
        return None
    autocast = tuple(
        (device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
        for device in _autocast_devices()
        if torch.is_autocast_enabled(device)
    )
    default = None
    for i in range(_function_modes()):
        mode = torch._C._get_function_stack_at(i)
        if isinstance(mode, _device.DeviceContext):
            default = mode.device
    if not autocast and default is None and not _inference():
        return None
    return _inference(), autocast, default


def with_state(state: tuple, function: Callable, args: tuple, kwargs: dict | None) -> Any:
    """Call the function in the captured state."""
    inference, autocast, default = state
    with ExitStack() as stack:
        if inference:
            stack.enter_context(torch.inference_mode())
        for device, dtype, cache in autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cache))
        if default is not None:
            stack.enter_context(torch.device(default))
        return function(*args, **(kwargs or {}))
