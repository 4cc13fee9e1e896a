"""``model.backward``: its calls in a step, and the first gradients of each."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from smp import _core
from smp.runtime import chain
from smp.runtime_state import CurrentStep, Runtime


def run(rt: Runtime, tensors: Tensor | tuple[Tensor, ...], given: Any, average: bool) -> None:
    """Run the backward of this microbatch; in the traced run, count it alone.

    Args:
        given: gradients of the tensors; None for scalars.
        average: a microbatch counts by its share of the samples.
    """
    step = rt.step
    if step.is_traced:
        step.traced_backwards += 1
        return
    step.saw_backward = True
    step.backward_calls += 1
    tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    if rt.pp_size == 1:
        step.enter_backward()
        with nullcontext() if rt.tp_size == 1 else chain.in_this_thread():
            torch.autograd.backward(tensors, _seeds(step, tensors, given, average))
        step.leave_backward()
        return
    _core.begin_backward()
    try:
        torch.autograd.backward(tensors, _seeds(step, tensors, given, average))
    finally:
        _core.end_backward()


def _seeds(step: CurrentStep, tensors: tuple[Tensor, ...], given: Any, average: bool) -> list:
    """The first gradients of a backward; None is a scalar's 1.

    With averaging, microbatch i starts with its share n_i/N of the samples: the gradients
    are those of the whole batch's mean.
    """
    if given is None or isinstance(given, Tensor):
        given = [given] * len(tensors)
    here = _core.current()
    share = 1.0
    if average and len(step.weights) > 1:
        share = step.weights[step.microbatch if here is None else here] / sum(step.weights)
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
