"""Step functions that tests share."""

from typing import Any

from torch import Tensor

import smp


def mean_square(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def total(model: Any, x: Tensor) -> Tensor:
    loss = model(x).sum()
    model.backward(loss)
    return loss


def model_outputs(model: Any, x: Tensor) -> Tensor:
    """The outputs of a model that trains by the mean of their squares."""
    out = model(x)
    model.backward(out.square().mean())
    return out


def own_loss(model: Any, x: Tensor) -> Tensor:
    """That of a model whose output it is."""
    loss = model(x)
    model.backward(loss)
    return loss


def train_mean_square(model: smp.DistributedModel, x: Tensor, in_step: bool) -> None:
    """Forward and backward, in a step or outside of one."""
    if in_step:
        smp.step(mean_square)(model, x)
    else:
        model(x).square().mean().backward()
