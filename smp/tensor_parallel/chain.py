"""The chain through all collectives of a call of the model, which backward follows.

A rank's loss may leave out what other ranks' losses use; then its backward would not come to
that part's collectives, and the others would wait.  So each collective takes a token (a
number without meaning) from the one before it and gives one to the next, and what the model
returns hangs on the last: backward comes to every one, in the reverse order of the calls, with
zeros where nothing was used.  A parameter that no rank's loss used keeps no gradient, though.

In a pipeline the chain goes through the ranks' requests: each carries its caller's token and
brings one back.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from smp.execution.compiled_code import not_traced


class _InThisThread(threading.local):
    is_open = False
    token: Tensor | None = None


_chain = _InThisThread()


@contextmanager
def opened(token: Tensor | None = None) -> Iterator[None]:
    """A call of the model: its collectives are a chain, and end with it.

    Args:
        token: where the chain goes on that the caller of this request has begun; None: it
            begins here.
    """
    before = _chain.is_open, _chain.token
    _chain.is_open, _chain.token = True, token
    try:
        yield
    finally:
        _chain.is_open, _chain.token = before


def is_open() -> bool:
    """Whether this thread is in a call of the model."""
    return _chain.is_open


def is_carried() -> bool:
    """Whether a request of this thread is a part of a chain."""
    if not _chain.is_open or not torch.is_grad_enabled():
        return False
    # What is computed again in a backward has a graph of its own there.
    return torch._C._current_graph_task_id() == -1


def last() -> Tensor | None:
    """The token of the collective that was called last; None before the first."""
    return _chain.token


def go_on(token: Tensor | None) -> None:
    """Of a request: what comes next follows its last collective."""
    _chain.token = token


@not_traced("a collective of smp's tensor parallelism")
def linked(function: type[Function], x: Tensor, *args: Any) -> Any:
    """``function.apply(x, token, *args)``, which returns its outputs and a token.

    Returns:
        the output, or a list of them if there are several.
    """
    if not (x.requires_grad and is_carried()):
        *outputs, _ = function.apply(x, None, *args)
    else:
        token = torch.zeros((), device="cpu") if _chain.token is None else _chain.token
        *outputs, _chain.token = function.apply(x, token, *args)
    return outputs[0] if len(outputs) == 1 else outputs


def next_token(token: Tensor | None) -> Tensor | None:
    """What such a function returns as its token."""
    return None if token is None else token.clone()


@not_traced("smp's order of backwards")
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
