"""State kept by PyTorch for each thread, carried by requests: see design.md, section 3.

Grad mode travels in the envelope; the rest is rare and travels as a value.
"""

import contextvars
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils import _device

from smp import state_mod
from smp.modules import hooks, live_models, parametrizations, travelling_changes
from smp.pytorch import call_warnings, context_variables
from smp.runtime import collective_chain


def _autocast_devices() -> list[str]:
    device = torch.accelerator.current_accelerator()
    return ["cpu"] if device is None else ["cpu", device.type]


_any_autocast = torch._C._is_any_autocast_enabled
_function_modes = torch._C._len_torch_function_stack
_inference = torch.is_inference_mode_enabled
_copy_context = contextvars.copy_context


def capture() -> tuple | None:
    """The thread's state where it differs from a fresh worker's; else None.

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


def capture_for_call(path: str) -> tuple[tuple, Callable[[Any], Any] | None, bool] | None:
    """The state carried by a remote call, and the function for its result.  The state is that
    of :func:`capture`, the context variables, the caller's changes of modules of other ranks,
    and the chain of collectives.

    Args:
        path: of the called module.

    Returns:
        the state for :func:`serve_with_state`; a function from that one's result to the
        module's own; whether the call may be in a chain of calls.
    """
    call_warnings.warn_of_modes(path, cached=parametrizations.are_left_behind(path))
    state, made = capture(), travelling_changes.travelling()
    collected = context_variables.collect(path) if _copy_context() else None
    link = collective_chain.is_carried()
    if collected is None and state is None and not made and not link:
        return None
    values = () if collected is None else collected.values
    chains = state is None or not state[0]  # inference: no counts of changes
    if collected is None and not link:
        return (state, values, made, link), None, chains

    def settle(value: Any) -> Any:
        if collected is not None:
            collected.settle()
        if link:
            value, token = value
            collective_chain.take(token)
        return value

    return (state, values, made, link), settle, chains


def capture_for_backward() -> tuple | None:
    """The state carried by a remote backward, for :func:`serve_with_state`.

    Autograd runs a graph in the modes of the thread that began the backward.
    """
    state, made = capture(), travelling_changes.travelling()
    return None if state is None and not made else (state, (), made, False)


def serve_with_state(
    carried: tuple, function: Callable, args: tuple, kwargs: dict | None
) -> Any:
    """Call the function as its caller would on another rank.

    Returns:
        the function's result; as a part of a chain of collectives, with the token of its
            collectives.
    """
    state, collected, made, link = carried
    if link:
        with collective_chain.opened():
            carried = state, collected, made, False
            return serve_with_state(carried, function, args, kwargs), collective_chain.joined()
    if made:
        job = state_mod.state
        if job.is_initialized and job.cfg.pipeline != "simple":
            travelling_changes.check_frozen(made, function)
        with travelling_changes.made(made):
            return serve_with_state((state, collected, (), False), function, args, kwargs)
    tokens = []
    if collected:
        models = [model.module for model in live_models.living()]
        tokens = context_variables.set_collected(collected, models)
        if isinstance(function, nn.Module):  # it may have hooks now, of the caller's
            function, args = hooks.serve_hooked, (function, args, kwargs, False, False)
            kwargs = None
    try:
        if state is None:
            return function(*args, **(kwargs or {}))
        return with_state(state, function, args, kwargs)
    finally:
        context_variables.reset(tokens)


def with_state(state: tuple, function: Callable, args: tuple, kwargs: dict | None) -> Any:
    """Call the function in the captured state."""
    inference, autocast, default = state
    with ExitStack() as stack:
        if inference:
            grad = torch.is_grad_enabled()
            stack.enter_context(torch.inference_mode())  # turns grad mode off
            stack.enter_context(torch.set_grad_enabled(grad))
        for device, dtype, cache in autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cache))
        if default is not None:
            stack.enter_context(torch.device(default))
        return function(*args, **(kwargs or {}))
