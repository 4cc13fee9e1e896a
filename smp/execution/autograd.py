"""The autograd nodes of a remote call; their work is in ``csrc/python``.

``Send`` and ``Recv`` stand on the caller, ``Enter`` on the owner: see the drawings in
``csrc/python/call.c`` and ``csrc/python/serve.c``.
"""

from torch.autograd import Function

from smp import _core


class Send(Function):
    """Begin of a remote call: tensors in, a token out; its backward waits."""

    forward = staticmethod(_core.send_forward)
    backward = staticmethod(_core.send_backward)


class Recv(Function):
    """End of a remote call: the token in, outputs out; its backward posts and returns."""

    forward = staticmethod(_core.recv_forward)
    backward = staticmethod(_core.recv_backward)


class Enter(Function):
    """Begin of a request on its owner: gives the module tensors it may change in place."""

    forward = staticmethod(_core.enter_forward)
    backward = staticmethod(_core.enter_backward)


def apply_of(node: type[Function]):
    """``node.apply`` without the checks for functorch transforms, which cost 1 us."""
    return super(Function, node).apply  # type: ignore[misc]
