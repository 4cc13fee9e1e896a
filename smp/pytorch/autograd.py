"""The autograd nodes of a remote call; their work is in ``csrc/python``.

``Send``, ``Recv`` and ``Change`` stand on the caller, ``Enter`` on the owner: see the drawings
in ``csrc/python/modules/call.c`` and ``csrc/python/modules/serve.c``.
"""

import torch
from torch.autograd import Function

from smp import _core


class Send(Function):
    """The arguments' end of a remote call: tensors in, a token out; its backward waits."""

    forward = staticmethod(_core.send_forward)
    backward = staticmethod(_core.send_backward)


class Recv(Function):
    """Its outputs' end: the token in, outputs out; its backward posts and returns."""

    forward = staticmethod(_core.recv_forward)
    backward = staticmethod(_core.recv_backward)


class Change(Function):
    """``Change.apply(argument, values)``: a callee's change in place of the caller's tensor.
    The tensor's former value has no part in the result.

    A view needs zeros for the overwritten part of its base: without a gradient autograd leaves
    out the rest of the base too.  For all others, zeros would only be added to the gradient of
    ``Send``, and hand their strides on to the sum.
    """

    @staticmethod
    def forward(ctx, argument, values):
        ctx.mark_dirty(argument)
        ctx.set_materialize_grads(False)
        ctx.is_view = argument._is_view()
        return argument.copy_(values)

    @staticmethod
    def backward(ctx, gradient):
        zeros = None
        if ctx.is_view and gradient is not None:
            zeros = torch.zeros_like(gradient)
        return zeros, gradient


class Enter(Function):
    """Begin of a request on its owner: gives the module tensors for changes in place."""

    forward = staticmethod(_core.enter_forward)
    backward = staticmethod(_core.enter_backward)


def apply_of(node: type[Function]):
    """``node.apply`` without the checks for functorch transforms, of 1 us."""
    return super(Function, node).apply  # type: ignore[misc]
