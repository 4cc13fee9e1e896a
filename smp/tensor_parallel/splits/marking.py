"""The modules to split over the TP_GROUP, by the user's marks.

A mark goes to the modules created in a context, or to all modules below a given one; the last
mark wins.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from torch import nn

from smp.marks import TENSOR_PARALLELISM
from smp.modules import creation, live_models

_OUTSIDE: dict[str, Any] = {}  # by identity: outside of all contexts

# The configuration of the innermost context; None: switched off.
_innermost: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "smp.tensor_parallelism", default=_OUTSIDE
)


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **config: Any) -> Iterator[None]:
    """Modules created inside are split over the TP_GROUP; the innermost context wins.

    They are split when they come to ``smp.DistributedModel``, and keep their weights: those
    of tp_rank 0.

    Args:
        enabled: False: modules created inside are not split.
        config: for the distributed modules in place of the user's.

    Source: SageMaker Python SDK documentation, ``smp.tensor_parallelism``.
    """
    token = _innermost.set(config if enabled else None)
    try:
        with creation.noticed(_mark_created):
            yield
    finally:
        _innermost.reset(token)


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **config: Any) -> None:
    """Have a module and all modules in it split over the TP_GROUP.

    Args:
        module: any; to be called before ``smp.DistributedModel``.
        enabled: False: they are not split.
        config: for the distributed modules in place of the user's.

    Raises:
        TypeError: not a module.
        RuntimeError: it is wrapped already.

    Source: SageMaker Python SDK documentation, ``smp.set_tensor_parallelism``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"smp.set_tensor_parallelism takes a torch.nn.Module, not a {type(module).__name__}"
        )
    _refuse_wrapped(module)
    for one in module.modules():
        one.__dict__[TENSOR_PARALLELISM] = dict(config) if enabled else None


def _refuse_wrapped(module: nn.Module) -> None:
    """Raises RuntimeError for a module already in ``smp.DistributedModel``, split or whole."""
    inside = set(module.modules())
    for model in live_models.living():
        if inside <= {model, *model.module.modules()}:
            raise RuntimeError(
                f"smp.set_tensor_parallelism: this {type(module).__name__} is in a "
                "DistributedModel, whose modules were split when it was made: mark it before"
            )


def configuration(module: nn.Module) -> dict[str, Any] | None:
    """The configuration of a module's mark; None: it is not marked."""
    return module.__dict__.get(TENSOR_PARALLELISM)


def is_marked(model: nn.Module) -> bool:
    """Whether any module of a model is marked."""
    return any(configuration(module) is not None for module in model.modules())


def _mark_created(module: nn.Module) -> None:
    config = _innermost.get()
    if config is not _OUTSIDE:
        module.__dict__[TENSOR_PARALLELISM] = config
