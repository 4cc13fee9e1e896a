"""The tie between the result of a model's call and all collectives of the call.

A rank's loss may leave out values that other ranks' losses use.  Then its backward would not
come to their collectives, and the others would wait.  So each collective's function returns a
token (a number without meaning) beside its output, and the model's result hangs on all tokens:
backward comes to every one, with zeros for values not used.  A parameter unused by every rank's
loss keeps no gradient, though.

Autograd's engine runs the newest of the ready nodes; a node's consumers are newer than the
node.  So a thread comes in its backward to the collectives of a call in the reverse order of
the program, as on all other ranks.  In ``model.backward`` one thread runs the nodes of all
devices.

A collective is no input of the next, so a backward within a ``forward`` comes to its own
collectives alone.  It may free these: freed ones need no backward then and are left out.

In a pipeline a request brings back one token, of all its collectives.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from smp.pytorch.compiled_code import not_traced


class _InThisThread(threading.local):
    tokens: list[Tensor] | None = None  # None: in no call of the model
    runs_again = False  # in a checkpoint's second forward


_chain = _InThisThread()


@contextmanager
def opened(runs_again: bool = False) -> Iterator[None]:
    """A call of the model, or a request of one: its collectives are a chain.

    Args:
        runs_again: in a checkpoint's second forward, whose requests bring back tokens as those
            of the first one; the gradients go to the first one's.
    """
    before = _chain.tokens, _chain.runs_again
    _chain.tokens, _chain.runs_again = [], runs_again
    try:
        yield
    finally:
        _chain.tokens, _chain.runs_again = before


def is_open() -> bool:
    """Whether this thread is in a call of the model."""
    return _chain.tokens is not None


def is_carried() -> bool:
    """Whether a request of this thread is a part of a chain."""
    if _chain.tokens is None or not torch.is_grad_enabled():
        return False
    # A forward computed again in a reentrant backward has a graph of its own there.
    return _chain.runs_again or torch._C._current_graph_task_id() == -1


def take(token: Tensor | None) -> None:
    """A token joins the chain, of a request's collectives; None: it made none."""
    if token is not None and token.requires_grad and is_carried():
        assert _chain.tokens is not None
        _chain.tokens.append(token)


def tokens() -> list[Tensor]:
    """Those of the chain whose graphs are there."""
    return [token for token in _chain.tokens or () if not _is_freed(token)]


def joined() -> Tensor | None:
    """One token for all live graphs of the chain; None: there are none."""
    present = tokens()
    return _Join.apply(*present) if len(present) > 1 else next(iter(present), None)


def _is_freed(token: Tensor) -> bool:
    """Whether a backward has been to the token's function and freed its saved tensors."""
    try:
        token.grad_fn._raw_saved_tensors  # type: ignore[union-attr]  # noqa: B018
    except RuntimeError:
        return True
    return False


@not_traced("a collective of smp's tensor parallelism")
def linked(function: type[Function], x: Tensor, *args: Any) -> Any:
    """``function.apply(x, *args)``, with outputs and a token for results.

    Returns:
        the output, or a list of them if there are several.
    """
    *outputs, token = function.apply(x, *args)
    take(token)
    return outputs[0] if len(outputs) == 1 else outputs


def new_token() -> Tensor:
    """The last result of such a function."""
    return torch.zeros((), device="cpu")


@not_traced("smp's order of backwards")
def hang(output: Tensor, behind: list[Tensor]) -> Tensor:
    """A tensor of the model's result, tied behind the collectives of these tokens.

    No node lies between: on an accelerator autograd would run a node of tokens alone in
    another thread than the collectives, which may then begin in another order.
    """
    if not behind or not output.requires_grad:
        return output
    return _Hang.apply(output, *behind)


def in_this_thread() -> AbstractContextManager[Any]:
    """In the block a backward's nodes run in this thread, on an accelerator, too."""
    return torch.autograd.set_multithreading_enabled(False)


class _Join(Function):
    @staticmethod
    def forward(ctx: Any, *tokens: Tensor) -> Tensor:
        ctx.count = len(tokens)
        return new_token()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (gradient,) * ctx.count


class _Hang(Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *tokens: Tensor) -> Tensor:
        ctx.count = len(tokens)
        return output.clone()  # of a view, scripts could not do loss /= n

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return gradient, *(new_token(),) * ctx.count
