"""``torch.nn.utils.clip_grad_norm_`` of split parameters, as scripts and Trainers call it.

The norm that torch sees on one rank is another on each: whole parameters would be scaled
differently, and drift apart.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from smp.execution import runtime
from smp.optimizers import clip_by_the_models_norm
from smp.tensor_parallel.slices import is_of_split_model


def clip_by_the_models_norm_from_now() -> Callable[[], None]:
    """Have torch clip by the whole model's norm where the model is split.

    All ranks of the MP_GROUP must call it then, a stage without parameters, too.  Torch's
    function stays the object that it is, which scripts may have imported by its name.

    Returns:
        undoes it.
    """
    users: Any = nn.utils.clip_grad_norm_
    plain = users.__wrapped__  # what it calls under no_grad
    (called,) = (cell for cell in users.__closure__ if cell.cell_contents is plain)

    def clip_grad_norm_(
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        some = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        # A stage may have no parameters; it decides as the others do.
        models = runtime.get("clip_grad_norm_").live_models()
        asked = some or [p for model in models for p in model.parameters()]
        if not any(map(is_of_split_model, asked)):
            return plain(some, max_norm, norm_type, error_if_nonfinite, foreach)
        norm = clip_by_the_models_norm(some, max_norm, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"the total norm of order {norm_type} for the gradients of the model is "
                "non-finite, so it cannot be clipped"
            )
        return norm

    called.cell_contents = clip_grad_norm_

    def undo() -> None:
        called.cell_contents = plain

    return undo
