"""Gradients of parameters with the samples of the whole TP_GROUP.

The loss of a job is the mean over its ranks of each rank's own.  Such a parameter's gradient
is the sum over a TP_GROUP already, so it is divided by tp_size, and then averaged over the
RDP_GROUP alone.  It is divided before it is added to ``.grad``, which may hold the average of
earlier steps.

Ranks with the same samples have the same gradient, each of them whole, and the average over the
DP_GROUP is it again.  A module with some positions of those samples (`mark_partial`) has a part
of the sum, multiplied by tp_size.

A table's gradient may be dense and much larger than the rows looked up: such a module divides
the gradient of these (``divides_gradient``, ``gradient_factor``).
"""

from collections import Counter

from torch import nn

from smp.marks import PARTIAL_GRADIENT
from smp.slicing import parameter_marks
from smp.slicing.slices import is_scaled_batch, slices_of
from smp.tensor_parallel import group


def mark_partial(module: nn.Module) -> None:
    """Note that each tp_rank has a part of the gradients of a module's whole parameters."""
    for parameter in module.parameters():
        if slices_of(parameter) is None:
            setattr(parameter, PARTIAL_GRADIENT, True)


def scale(module: nn.Module) -> None:
    """Give the gradients of such parameters their factors, from the next backward on."""
    if group.same_samples():
        for parameter in module.parameters():
            if hasattr(parameter, PARTIAL_GRADIENT):
                _multiply(parameter, float(group.size()))
        return
    factor = 1.0 / group.size()
    holders = Counter(id(p) for m in module.modules() for p in m._parameters.values())
    for one in module.modules():
        # Not the attribute: a parametrized one is computed, by another power iteration perhaps.
        weight = one._parameters.get("weight")
        divides = hasattr(type(one), "divides_gradient") and one.divides_gradient
        if divides and weight is not None and holders[id(weight)] == 1:
            one.gradient_factor = factor  # type: ignore[assignment]
            parameter_marks.note_factor_of_module(one.weight)  # type: ignore[arg-type]
    for parameter in module.parameters():
        if is_scaled_batch(parameter):
            _multiply(parameter, factor)


def _multiply(parameter: nn.Parameter, factor: float) -> None:
    """Multiply a parameter's gradients, once for any number of calls."""
    if not parameter.is_meta and not parameter_marks.is_scaled(parameter):
        # Hooks of meta parameters are lost when these get their values.
        parameter_marks.multiply_gradients(parameter, factor)
