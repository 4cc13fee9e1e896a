"""What a remote call's objects look like on the other side, and what comes back.

Tensors, and their gradients on the way back, cross by value: a copy with the same
strides that shares no memory with the original, is no view and is aligned as fresh
memory is.  Gradients pass through one node on each side: *Send* and *Recv* in the
caller's graph, *Arrive* in the callee's, which is a graph of its own.

    caller's graph                      callee's graph
    x ... -> Send -> token              Arrive -> copies of x ... -> module -> y ...
                       |
             Recv <----+
               |
          copies of y ...

Arguments are the caller's objects, as in Python: a tensor or container that occurs
twice arrives as one; what the callee changes in place is changed for the caller,
visible to autograd; an argument that comes back as a result, changed or not, is the
caller's own object, without a copy or a node.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.reference.objects import Copier, tensors_in


def copy_with_strides(tensor: Tensor) -> Tensor:
    """Fresh memory, the same values and strides (expanded dimensions stay expanded)."""
    if tensor.layout is not torch.strided:
        return tensor.clone()
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
    spans = (
        (size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )
    flat = tensor.as_strided((1 + sum(spans),), (1,)).clone()
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    # A view of `flat` could not be changed in place by the callee; this is no view.
    return fresh.set_(flat.untyped_storage(), 0, tensor.size(), tensor.stride())


class _Send(torch.autograd.Function):
    """Inputs: a leaf that requires grad, so that a call whose arguments need no
    gradient has a backward too, and the arguments that do.  Output: a token."""

    @staticmethod
    def forward(ctx, crossing, leaf, *tensors):
        ctx.crossing = crossing
        return leaf.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return None, None, *ctx.crossing.argument_gradients()


class _Recv(torch.autograd.Function):
    """Inputs: the token, and nothing of the callee's graph.  Outputs: the results."""

    @staticmethod
    def forward(ctx, crossing, token, *data):
        ctx.crossing = crossing
        ctx.set_materialize_grads(False)
        return tuple(copy_with_strides(tensor) for tensor in data)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.crossing.run_backward(gradients)
        return None, None, *(None for _ in gradients)


class _Arrive(torch.autograd.Function):
    """Makes what the callee gets a non-leaf, which it may change in place."""

    @staticmethod
    def forward(ctx, crossing, leaf, *data):
        ctx.crossing = crossing
        ctx.set_materialize_grads(False)
        return tuple(copy_with_strides(tensor) for tensor in data)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.crossing.gradients = tuple(
            None if gradient is None else copy_with_strides(gradient) for gradient in gradients
        )
        return None, None, *(None for _ in gradients)


class _Change(torch.autograd.Function):
    """An argument gets the values that the callee gave it.  What it was before has no
    part in them: ``copy_`` alone would send it a gradient of zeros, whose strides the
    sum with what *Send* brings would take on.  A view does need them: without, autograd
    leaves out the gradient of the rest of its base."""

    @staticmethod
    def forward(ctx, argument, data):
        ctx.mark_dirty(argument)
        ctx.set_materialize_grads(False)
        ctx.is_view = argument._is_view()
        return argument.copy_(data)

    @staticmethod
    def backward(ctx, gradient):
        known = ctx.is_view and gradient is not None
        return torch.zeros_like(gradient) if known else None, gradient


def _leaf() -> Tensor:
    return torch.zeros((), requires_grad=True)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Crossing:
    """One remote call's way there (``arrive``) and back (``leave``).

    Args:
        run: runs a backward as the callee: ``run(outputs, gradients)``.
    """

    def __init__(self, run: Callable[[list[Tensor], list[Tensor]], None]) -> None:
        self._run = run
        self._token: Tensor | None = None
        self._leaving: list[Tensor] = []
        self._sent: list[Tensor] = []
        self.gradients: tuple[Tensor | None, ...] = ()

    def arrive(self, objects: Any, reference: Callable[[Tensor], Tensor | None]) -> Any:
        """The callee's ``objects``.

        Args:
            reference: what a tensor that is not sent is on the other side (parameters
                of a rank other than the caller's), None for all others.
        """
        tensors = [t for t in tensors_in(objects) if reference(t) is None]
        self._sent = [t for t in tensors if torch.is_grad_enabled() and t.requires_grad]
        arrived = {}
        if torch.is_grad_enabled():
            self._token = _Send.apply(self, _leaf(), *self._sent)
            data = [t.detach() for t in self._sent]
            copies = _Arrive.apply(self, _leaf(), *data) if data else []
            arrived = {id(t): copy for t, copy in zip(self._sent, copies, strict=True)}

        def convert(tensor: Tensor) -> Tensor:
            known = reference(tensor)
            if known is not None:
                return known
            if id(tensor) in arrived:
                return arrived[id(tensor)]
            # Without a graph it still says that it requires grad, where it does.
            return copy_with_strides(tensor).requires_grad_(tensor.requires_grad)

        self._inward = Copier(convert)
        result = self._inward.copy(objects)
        self._arrived = [
            (tensor, copy, _version(copy), copy.grad_fn)
            for tensor in tensors
            for copy in [self._inward.copy(tensor)]
        ]
        return result

    def leave(self, result: Any, reference: Callable[[Tensor], Tensor | None]) -> Any:
        """The caller's ``result``; changes of the arguments are written back."""
        changed, unchanged = [], []
        for tensor, copy, version, grad_fn in self._arrived:
            same = _version(copy) == version and copy.grad_fn is grad_fn
            (unchanged if same else changed).append((tensor, copy, grad_fn))
        own = {id(copy) for _, copy, _ in unchanged}
        containers = [(original, copy) for original, copy in self._inward.pairs]
        tensors = [
            t
            for t in tensors_in([copy for _, copy, _ in changed], result,
                                [copy for _, copy in containers])
            if id(t) not in own and reference(t) is None
        ]  # fmt: skip
        graph = self._token is not None
        self._leaving = [t for t in tensors if graph and t.requires_grad]
        left = {}
        if self._leaving:
            data = [t.detach() for t in self._leaving]
            copies = _Recv.apply(self, self._token, *data)
            left = {id(t): copy for t, copy in zip(self._leaving, copies, strict=True)}

        def convert(tensor: Tensor) -> Tensor:
            known = reference(tensor)
            if known is not None:
                return known
            return left[id(tensor)] if id(tensor) in left else copy_with_strides(tensor)

        outward = Copier(convert)
        for tensor, copy, _ in unchanged:
            outward.know(copy, tensor)
        for tensor, copy, grad_fn in changed:
            if graph and copy.grad_fn is not grad_fn:
                _Change.apply(tensor, convert(copy))
            else:  # a change under no_grad left the callee's graph as it was
                with torch.no_grad():
                    tensor.copy_(convert(copy))
            outward.know(copy, tensor)
        for original, copy in containers:
            if not isinstance(copy, (tuple, frozenset)):
                outward.know(copy, original)
        for original, copy in containers:
            if isinstance(copy, tuple) and all(
                outward.copy(item) is mine for item, mine in zip(copy, original, strict=True)
            ):
                outward.know(copy, original)
        for original, copy in containers:
            if isinstance(copy, set):
                _refill(original, {outward.copy(item) for item in copy})
            elif not isinstance(copy, (tuple, frozenset)):
                outward.fill(original, copy)
        return outward.copy(result)

    def run_backward(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Only what has a gradient travels."""
        both = zip(self._leaving, gradients, strict=True)
        defined = [(t, g) for t, g in both if g is not None]
        if defined:
            self._run([t for t, _ in defined], [copy_with_strides(g) for _, g in defined])

    def argument_gradients(self) -> tuple[Tensor | None, ...]:
        return self.gradients or tuple(None for _ in self._sent)


def _refill(target: set, items: set) -> None:
    if target != items:
        target.clear()
        target.update(items)
