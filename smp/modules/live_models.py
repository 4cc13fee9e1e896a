"""The models of this rank, in order of creation: alike on all ranks.

They are the script's, which may let go of them at any moment; so they are not held here.
"""

import weakref
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from smp.model import DistributedModel

_models: "list[weakref.ref[DistributedModel]]" = []


def add(model: "DistributedModel") -> None:
    """The newest one."""
    _models.append(weakref.ref(model))


def forget() -> None:
    """All of them: the job has ended."""
    _models.clear()


def made() -> int:
    """How many there have been in this job."""
    return len(_models)


def living() -> "list[DistributedModel]":
    """Those that still exist."""
    return [model for model in (ref() for ref in _models) if model is not None]


def home_of(module: nn.Module) -> tuple[str, int] | None:
    """Path and pp_rank of a module of a model that has been partitioned."""
    for model in living():
        if model._smp_decision is not None:
            for path, candidate in model._smp_module.named_modules():
                if candidate is module:
                    return path, model._smp_decision.rank_of[path]
    return None
