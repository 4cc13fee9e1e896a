"""Parameters of modules replaced by distributed ones: an optimizer may hold them."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from smp.marks import REPLACED
from smp.modules import live_models


def note(original: nn.Module, distributed: nn.Module, path: str) -> None:
    """Note, with the parameters of a module, its replacement by a distributed one.

    Args:
        path: of both.
    """
    there = set(map(id, distributed.parameters()))
    for name, parameter in original.named_parameters():
        if id(parameter) not in there:
            setattr(parameter, REPLACED, f"{path}.{name}" if path else name)


def refuse(groups: Iterable[dict[str, Any]]) -> None:
    """Refuse an optimizer with such parameters: no model has them.

    Args:
        groups: of its parameters.

    Raises:
        ValueError: the text names the first one.
    """
    gone = [p for members in groups for p in members["params"] if hasattr(p, REPLACED)]
    if not gone:
        return
    living = {id(p) for model in live_models.living() for p in model.module.parameters()}
    gone = [parameter for parameter in gone if id(parameter) not in living]
    if gone:
        raise ValueError(
            f"smp: the optimizer holds '{getattr(gone[0], REPLACED)}' and {len(gone) - 1} "
            "other parameters of modules whose place distributed modules have taken, and would "
            "train nothing: make it from model.parameters() after smp.DistributedModel"
        )
