"""Gradients of parameters that see the samples of the whole TP_GROUP.

The loss of a job is the mean over its ranks of each rank's own.  Such a parameter's gradient
is the sum over a TP_GROUP already, so it is divided by tp_size, and then averaged over the
RDP_GROUP alone.  It is divided before it is added to ``.grad``, which may hold the average of
earlier steps.

A table's gradient may be dense and much larger than what is looked up in it: such a module
divides the gradient of that (``divides_gradient``, ``gradient_factor``).
"""

from collections import Counter

from torch import Tensor, nn

from smp.tensor_parallel import group
from smp.tensor_parallel.slices import is_scaled_batch

_SCALES = "_smp_scales"


def scale(module: nn.Module) -> None:
    """Divide the gradients of such parameters, from the next backward on."""
    factor = 1.0 / group.size()

    def divided(gradient: Tensor) -> Tensor:
        return gradient * factor

    holders = Counter(id(p) for m in module.modules() for p in m._parameters.values())
    for one in module.modules():
        weight = getattr(one, "weight", None)
        if getattr(one, "divides_gradient", False) and holders[id(weight)] == 1:
            one.gradient_factor = factor  # type: ignore[assignment]
            setattr(weight, _SCALES, True)
    for parameter in module.parameters():
        if parameter.is_meta:
            continue  # hooks are lost when it gets its values
        if is_scaled_batch(parameter) and not hasattr(parameter, _SCALES):
            frozen = not parameter.requires_grad
            parameter.requires_grad_(
                True
            )  # a hook is for a parameter that trains, now or later
            parameter.register_hook(divided)
            parameter.requires_grad_(not frozen)
            setattr(parameter, _SCALES, True)
