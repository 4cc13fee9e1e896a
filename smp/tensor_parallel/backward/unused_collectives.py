"""Zeros for collectives without use in this rank's loss.  Backward comes to every one
(`smp.runtime.collective_chain`); the zeros go through, and leave no gradient where there was
none.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from smp import _core
from smp.modules import live_models


def keep_shape(ctx: Any, *outputs: Tensor) -> None:
    """In a function's forward, for `defined`."""
    ctx.set_materialize_grads(False)
    ctx.outputs = [(out.shape, out.dtype, out.device) for out in outputs]


def defined(ctx: Any, gradient: Tensor | None, output: int = 0) -> Tensor:
    """The gradient of a function's output; zeros where the loss leaves it out."""
    if gradient is not None:
        return gradient
    _note_left_out()
    shape, dtype, device = ctx.outputs[output]
    return torch.zeros(shape, dtype=dtype, device=device)


# By backward with outputs left out of this rank's loss: the parameters without gradient.  In a
# pipeline, where gradients come at a step's end, all those of a step.
_without: dict[int, list[Tensor]] = {}
_STEP = -1


def begin_step() -> None:
    """Forget failed backwards."""
    _without.clear()


class PipelinedStep:
    """The parameters of a step without a gradient before it, perhaps zeros then.

    Zeros for outputs left out of a loss make zeros of other gradients, on other ranks, too:
    messages of a backward carry this (``SMP_FLAG_UNUSED``, csrc/server/envelope.h).

    Args:
        parameters: of this rank.
    """

    is_under_way = False

    def __init__(self, parameters: Iterable[Tensor]):
        self._without = [p for p in parameters if p.grad is None]
        PipelinedStep.is_under_way = True

    def end(self) -> None:
        """The step's gradients are complete; zeros are dropped by `drop_zeros`."""
        PipelinedStep.is_under_way = False
        if _core.gradients_leaves_out():
            _without[_STEP] = self._without


def _note_left_out() -> None:
    if PipelinedStep.is_under_way:
        _core.gradients_leave_out()
        return
    backward = torch._C._current_graph_task_id()
    if backward not in _without:
        models = live_models.living()
        _without[backward] = [p for m in models for p in m.parameters() if p.grad is None]
        Variable._execution_engine.queue_callback(partial(_drop_zeros, backward))


def drop_zeros() -> None:
    """Gradients from backward's visit alone are None again.

    The end of a backward does so; this is for earlier cases.
    """
    for backward in list(_without):
        _drop_zeros(backward)


def _drop_zeros(backward: int) -> None:
    for parameter in _without.pop(backward, ()):
        gradient = parameter.grad
        if gradient is not None and not gradient.is_sparse and not bool(gradient.any()):
            parameter.grad = None
