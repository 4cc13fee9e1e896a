"""Contexts in which scripts create their model: dtype, and which parts are distributed.

``smp.modules.model_creation`` and its older spelling ``smp.tensor_parallelism``; and which
classes have a distributed form.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from smp import not_built


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **config: Any
) -> Iterator[None]:
    """The model is created inside.

    Args:
        tensor_parallelism: whether modules are distributed: not built.
        dtype: of the parameters, where the model does not say.
        config: for distributed modules; without them, of no effect.

    Raises:
        NotImplementedError: ``tensor_parallelism``.

    Source: SageMaker Python SDK documentation, ``smp.modules.model_creation``.
    """
    _refuse("smp.model_creation(tensor_parallelism=True)", tensor_parallelism)
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **config: Any) -> Iterator[None]:
    """Modules created inside are distributed, where ``enabled``: not built.

    Raises:
        NotImplementedError: ``enabled``.
    """
    _refuse("smp.tensor_parallelism(enabled=True)", enabled)
    yield


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **config: Any) -> None:
    """Have a module distributed, where ``enabled``: not built.

    Raises:
        NotImplementedError: ``enabled``.
    """
    _refuse("smp.set_tensor_parallelism(module, True)", enabled)


tp_register = not_built.function("smp.tp_register")
tp_register_with_module = not_built.function("smp.tp_register_with_module")


def _refuse(what: str, wanted: bool) -> None:
    if wanted:
        raise NotImplementedError(f"{what}: tensor parallelism is not built yet")
