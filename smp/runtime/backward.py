"""``model.backward``: its calls in a step, and the first gradients of each."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from smp import _core
from smp.precision import loss_scale
from smp.runtime import collective_chain
from smp.runtime_state import CurrentStep, Runtime


def run(
    rt: Runtime,
    tensors: Tensor | tuple[Tensor, ...],
    given: Any,
    average: bool,
    is_scaled: bool,
) -> None:
    """Run the backward of this microbatch; in the traced run, count it alone.

    Args:
        given: gradients of the tensors; None for scalars.
        average: a microbatch counts by its share of the samples.
        is_scaled: the first gradients have the loss scale.
    """
    step = rt.step
    if step.is_traced:
        step.traced_backwards += 1
        return
    if not step.is_under_way:
        loss_scale.begin_backward()
    step.saw_backward = True
    step.backward_calls += 1
    tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    scale = loss_scale.of_backward() if is_scaled else 1.0
    seeds = _seeds(step, tensors, given, average, scale)
    if rt.pp_size == 1:
        step.enter_backward()
        with nullcontext() if rt.tp_size == 1 else collective_chain.in_this_thread():
            torch.autograd.backward(tensors, seeds)
        step.leave_backward()
        return
    _core.begin_backward()
    try:
        torch.autograd.backward(tensors, seeds)
    finally:
        _core.end_backward()


def _seeds(
    step: CurrentStep, tensors: tuple[Tensor, ...], given: Any, average: bool, scale: float
) -> list:
    """The first gradients of a backward; None is a scalar's 1.

    With averaging, microbatch i starts with its share n_i/N of the samples: the gradients
    are those of the whole batch's mean.

    Args:
        scale: of the loss.
    """
    if given is None or isinstance(given, Tensor):
        given = [given] * len(tensors)
    here = _core.current()
    share = scale
    if average and len(step.weights) > 1:
        share *= step.weights[step.microbatch if here is None else here] / sum(step.weights)
    seeds = []
    for tensor, seed in zip(tensors, given, strict=True):
        if seed is None:
            if tensor.numel() != 1:
                raise RuntimeError(
                    f"smp: model.backward got a tensor of shape {tuple(tensor.shape)}; "
                    "give a scalar loss, or grad_tensors"
                )
            seed = None if share == 1.0 else torch.full_like(tensor, share)
        elif share != 1.0:
            seed = seed * share
        seeds.append(seed)
    return seeds
