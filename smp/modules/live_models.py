"""The models of this rank, in order of creation: alike on all ranks.

They are the script's, free to drop them at any moment; so they are not held here.
"""

import weakref
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from smp.model import DistributedModel

_models: "list[weakref.ref[DistributedModel]]" = []


def add(model: "DistributedModel") -> None:
    """Add the newest one."""
    _models.append(weakref.ref(model))


def forget() -> None:
    """Forget all models: the job has ended."""
    _models.clear()


def made() -> int:
    """The number of models so far in this job."""
    return len(_models)


def living() -> "list[DistributedModel]":
    """The models still in existence."""
    return [model for model in (ref() for ref in _models) if model is not None]


def home_of(module: nn.Module) -> tuple[str, int] | None:
    """Path and pp_rank of a module in a partitioned model."""
    for model in living():
        if model._smp_decision is not None:
            for path, candidate in model._smp_module.named_modules():
                if candidate is module:
                    return path, model._smp_decision.rank_of[path]
    return None
