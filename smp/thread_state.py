"""What PyTorch keeps by thread and a request must carry: see design.md, section 3.

Grad mode travels in the envelope; the rest is rare and travels as a value.
"""

import contextvars
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils import _device


def _autocast_devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


# Where a context variable is found on every rank: its id -> (variable, module, name).
_homes: dict[int, tuple[contextvars.ContextVar, str, str] | None] = {}
_outside = contextvars.copy_context()


def begin_step() -> None:
    """Context variables that have their value from outside the step stay on their rank."""
    global _outside
    _outside = contextvars.copy_context()


def _home(variable: contextvars.ContextVar) -> tuple[str, str] | None:
    """The module and the name under which every rank finds the variable, if there are."""
    known = _homes.get(id(variable))
    if id(variable) not in _homes:
        for module_name, module in list(sys.modules.items()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is variable:
                    known = (variable, module_name, name)
        _homes[id(variable)] = known
    return None if known is None else known[1:]


def _collections() -> tuple:
    """Lists, dicts and sets that the step has put into context variables.

    Hooks inside a module write into them (transformers collects hidden states so), so
    they travel like arguments and what was written comes back.
    """
    found = []
    for variable, value in contextvars.copy_context().items():
        if isinstance(value, list | dict | set) and _outside.get(variable) is not value:
            home = _home(variable)
            if home is not None:
                found.append((*home, value))
    return tuple(found)


_any_autocast = torch._C._is_any_autocast_enabled
_function_modes = torch._C._len_torch_function_stack
_inference = torch.is_inference_mode_enabled


def capture() -> tuple | None:
    """The thread's state where it differs from a fresh worker's; None where it does not.

    Returns:
        ``(inference mode, ((device, dtype, cache), ...), default device or None,
        ((module, name, value), ...) of context variables)``
    """
    collections = _collections()
    if not (collections or _any_autocast() or _function_modes() or _inference()):
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
    if not autocast and default is None and not _inference() and not collections:
        return None
    return _inference(), autocast, default, collections


def with_state(state: tuple, function: Callable, args: tuple, kwargs: dict | None) -> Any:
    """Call the function in the captured state."""
    inference, autocast, default, collections = state
    with ExitStack() as stack:
        for module, name, value in collections:
            variable = getattr(sys.modules[module], name)
            stack.callback(variable.reset, variable.set(value))
        if inference:
            stack.enter_context(torch.inference_mode())
        for device, dtype, cache in autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cache))
        if default is not None:
            stack.enter_context(torch.device(default))
        return function(*args, **(kwargs or {}))
