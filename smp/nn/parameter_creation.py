"""Parameters of users' own distributed modules: their samples, and their cuts."""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import nn

from smp.slicing.slices import Slices, is_scaled_batch, mark, slices_of
from smp.tensor_parallel import group


@contextlib.contextmanager
def parameter_creation_scope(
    module: nn.Module,
    scaled_batch: bool = True,
    dtype: torch.dtype | None = None,
    use_normal: bool = False,
    initializer_range: float = 0.02,
) -> Iterator[None]:
    """Parameters created inside see the samples of the whole TP_GROUP.

    Args:
        module: a ``smp.nn.DistributedModule`` in construction.
        scaled_batch: False: they see this rank's own samples.
        dtype: of the parameters created inside; None: the default.
        use_normal: weights are drawn from a normal distribution with standard deviation
            ``initializer_range``, and biases are zero.

    Source: SageMaker Python SDK documentation, ``smp.nn``.
    """
    before = {id(p) for p in module.parameters()}
    default = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
    for parameter in module.parameters():
        if id(parameter) in before:
            continue
        mark(parameter, slices_of(parameter), scaled_batch)
        if use_normal:
            with torch.no_grad():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, initializer_range)
                else:
                    parameter.zero_()


@contextlib.contextmanager
def initialize_with_input_partition(module: nn.Module) -> Iterator[None]:
    """Weights ``[out, in]`` created inside are cut along their inputs.

    They are scaled as if they had been drawn for the whole number of inputs.  Collective over
    the TP_GROUP.

    Args:
        module: a ``smp.nn.DistributedModule`` in construction; the ranks' parts of a weight lie
            one behind the other, by tp_rank.
    """
    before = {id(p) for p in module.parameters()}
    yield
    for parameter in module.parameters():
        if id(parameter) not in before and parameter.dim() > 1:
            slices = _slices_from_local(parameter, 1)
            mark(parameter, slices, is_scaled_batch(parameter))
            with torch.no_grad():
                parameter.mul_(math.sqrt(parameter.size(1) / slices.size))


@contextlib.contextmanager
def initialize_with_output_partition(module: nn.Module) -> Iterator[None]:
    """Weights ``[out, in]`` and biases created inside are cut along their outputs.

    Collective over the TP_GROUP.

    Args:
        module: a ``smp.nn.DistributedModule`` in construction; the ranks' parts of a parameter
            lie one behind the other, by tp_rank.
    """
    before = {id(p) for p in module.parameters()}
    yield
    for parameter in module.parameters():
        if id(parameter) not in before:
            mark(parameter, _slices_from_local(parameter, 0), is_scaled_batch(parameter))


def _slices_from_local(parameter: nn.Parameter, axis: int) -> Slices:
    """The ranks' parts lie one behind the other."""
    sizes = [parameter.size(axis)]
    if group.size() > 1:
        sizes = [n for (n,) in group.gather_numbers(sizes)]
    ends = [sum(sizes[: rank + 1]) for rank in range(len(sizes))]
    ranges = tuple(((end - size, end),) for size, end in zip(sizes, ends, strict=True))
    return Slices(axis, ends[-1], ranges)
