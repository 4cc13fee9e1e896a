"""``torch.nn.utils.clip_grad_norm_`` of split parameters, as scripts and Trainers call it.

The norm that torch sees on one rank is another on each: whole parameters would be scaled
differently, and drift apart.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from smp.optimizers import clip_by_the_models_norm
from smp.tensor_parallel.slices import slices_of


def clip_by_the_models_norm_from_now() -> Callable[[], None]:
    """Have torch clip by the whole model's norm where a parameter is split.

    Returns:
        undoes it.
    """
    plain = nn.utils.clip_grad_norm_

    @functools.wraps(plain)
    def clip_grad_norm_(
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        some = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not any(slices_of(p) is not None for p in some):
            return plain(some, max_norm, norm_type, error_if_nonfinite, foreach)
        norm = clip_by_the_models_norm(some, max_norm, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"the total norm of order {norm_type} for the gradients of the model is "
                "non-finite, so it cannot be clipped"
            )
        return norm

    places: list[Any] = [nn.utils, nn.utils.clip_grad]
    for place in places:
        place.clip_grad_norm_ = clip_grad_norm_

    def undo() -> None:
        for place in places:
            if place.clip_grad_norm_ is clip_grad_norm_:
                place.clip_grad_norm_ = plain

    return undo
