"""``smp.model_creation``: the context around a script's creation of its model."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from smp.tensor_parallel.splits import marking


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **config: Any
) -> Iterator[None]:
    """The model is created inside.

    Args:
        tensor_parallelism: whether modules are split, as ``smp.tensor_parallelism`` does.
        dtype: of the parameters, where the model does not say.
        config: for distributed modules; without them, and for keys unknown to them, of no
            effect.  ``zero_init`` of existing scripts is such a key: the public documentation
            does not explain it.

    Source: SageMaker Python SDK documentation, ``smp.execution.model_creation``.
    """
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        with marking.tensor_parallelism(tensor_parallelism, **config):
            yield
    finally:
        torch.set_default_dtype(before)
