"""The chain through all collectives of a call of the model, which backward follows.

A rank's loss may leave out what other ranks' losses use; then its backward would not come to
that part's collectives, and the others would wait.  So each collective takes a token (a
number without meaning) from the one before it and gives one to the next, and what the model
returns hangs on the last: backward comes to every one, in the reverse order of the calls, with
zeros where nothing was used.  A parameter that no rank's loss used keeps no gradient, though.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, Variable

from smp.execution import runtime


class _InThisThread(threading.local):
    is_open = False
    token: Tensor | None = None


_chain = _InThisThread()


@contextmanager
def opened() -> Iterator[None]:
    """A call of the model: its collectives are a chain, and end with it."""
    before = _chain.is_open, _chain.token
    _chain.is_open, _chain.token = True, None
    try:
        yield
    finally:
        _chain.is_open, _chain.token = before


def linked(function: type[Function], x: Tensor, *args: Any) -> Any:
    """``function.apply(x, token, *args)``, which returns its outputs and a token.

    Returns:
        the output, or a list of them if there are several.
    """
    # What is computed again in a backward has a graph of its own there.
    takes_part = _chain.is_open and torch._C._current_graph_task_id() == -1
    if not (takes_part and x.requires_grad and torch.is_grad_enabled()):
        *outputs, _ = function.apply(x, None, *args)
    else:
        token = torch.zeros((), device="cpu") if _chain.token is None else _chain.token
        *outputs, _chain.token = function.apply(x, token, *args)
    return outputs[0] if len(outputs) == 1 else outputs


def keep_shape(ctx: Any, *outputs: Tensor) -> None:
    """In a function's forward, for `defined`."""
    ctx.set_materialize_grads(False)
    ctx.outputs = [(out.shape, out.dtype, out.device) for out in outputs]


def defined(ctx: Any, gradient: Tensor | None, output: int = 0) -> Tensor:
    """The gradient of what a function returned; zeros where the loss leaves it out."""
    if gradient is not None:
        return gradient
    _note_left_out()
    shape, dtype, device = ctx.outputs[output]
    return torch.zeros(shape, dtype=dtype, device=device)


# By backward that came to what this rank's loss leaves out: the parameters without gradient.
_without: dict[int, list[Tensor]] = {}


def begin_step() -> None:
    """Forget backwards that failed."""
    _without.clear()


def _note_left_out() -> None:
    backward = torch._C._current_graph_task_id()
    if backward not in _without and runtime.current is not None:
        models = runtime.current.live_models()
        _without[backward] = [p for m in models for p in m.parameters() if p.grad is None]
        Variable._execution_engine.queue_callback(partial(_drop_zeros, backward))


def drop_zeros() -> None:
    """Gradients that are there only because backward comes everywhere are None again.

    The end of a backward does so; this is for what comes before.
    """
    for backward in list(_without):
        _drop_zeros(backward)


def _drop_zeros(backward: int) -> None:
    for parameter in _without.pop(backward, ()):
        gradient = parameter.grad
        if gradient is not None and not gradient.is_sparse and not bool(gradient.any()):
            parameter.grad = None


def next_token(token: Tensor | None) -> Tensor | None:
    """What such a function returns as its token."""
    return None if token is None else token.clone()


def hang(output: Tensor) -> Tensor:
    """A tensor that the model returns, behind the chain's last collective."""
    if _chain.token is None or not output.requires_grad:
        return output
    return _Hang.apply(output, _chain.token)


class _Hang(Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Tensor) -> Tensor:
        return output.clone()  # of a view, scripts could not do loss /= n

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, torch.zeros((), device="cpu")
