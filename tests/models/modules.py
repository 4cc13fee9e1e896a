"""Modules written as their forward alone, and a step in a backward."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)


def no_members() -> dict[str, Any]:
    return {}


def module_of(
    members: Callable[..., dict[str, Any]] = no_members,
) -> Callable[[Callable], type]:
    """Makes a class of modules out of its ``forward``, under the function's name.

    Args:
        members: makes a module's attributes, in order, of the class's arguments.
    """

    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        for name, member in members(*args, **kwargs).items():
            setattr(self, name, member)

    parameters = inspect.signature(members).parameters.values()
    __init__.__signature__ = inspect.Signature([SELF, *parameters])  # type: ignore[attr-defined]

    def make(forward: Callable) -> type[nn.Module]:
        names = ("__module__", "__qualname__", "__doc__")
        attributes = {name: getattr(forward, name) for name in names}
        attributes |= {"__init__": __init__, "forward": forward}
        return type(forward.__name__, (nn.Module,), attributes)

    return make


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[Tensor], Tensor | None]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        changed = ctx.call(gradient)
        return gradient if changed is None else changed, None


def in_backward(x: Tensor, call: Callable[[Tensor], Tensor | None]) -> Tensor:
    """``x``, by a function of autograd whose backward runs ``call``.

    Args:
        call: gets the gradient, and gives the one that goes on; None: the same.
    """
    return _InBackward.apply(x, call)
