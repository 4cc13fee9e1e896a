"""Splitting a user's model where it stands: classes, ``forward`` and names stay.

What of a module is cut, a *plan* of its family says (``smp/nn/huggingface``, one file a
family): a function that cuts a module's linears and makes it a region.
"""

import importlib
import importlib.util
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from smp.tensor_parallel import marking

FAMILIES = "smp.nn.huggingface"

Plan = Callable[[nn.Module, str], None]  # cuts the module at a path


class Outcome(NamedTuple):
    """What became of a marked module."""

    path: str
    class_name: str
    reason: str  # why it was left whole; "": it was split


def split(model: nn.Module) -> list[Outcome]:
    """Split the marked modules that have a plan.  Collective over the TP_GROUP.

    Returns:
        what became of each marked module that could be split by itself.
    """
    users = _users_of_parameters(model)
    out: list[Outcome] = []
    _split_below(model, "", users, out)
    return out


def _split_below(module: nn.Module, path: str, users: Counter[int], out: list[Outcome]) -> None:
    plan = plan_of(type(module)) if marking.configuration(module) is not None else None
    if plan is not None:
        reason = _shares_outside(module, users)
        if not reason:
            plan(module, path)
        out.append(Outcome(path, type(module).__name__, reason))
        return
    for name, child in module.named_children():
        _split_below(child, f"{path}.{name}" if path else name, users, out)


def plan_of(cls: type[nn.Module]) -> Plan | None:
    """The plan for a class, or for the class that it inherits from."""
    for base in cls.__mro__:
        if base.__module__.startswith("transformers.models."):
            family = base.__module__.split(".")[2]
            name = f"{FAMILIES}.{family}"
            if importlib.util.find_spec(name) is not None:
                plans: dict[str, Plan] = importlib.import_module(name).IN_PLACE
                if base.__name__ in plans:
                    return plans[base.__name__]
    return None


def _users_of_parameters(model: nn.Module) -> Counter[int]:
    """How many modules own each parameter, by its id."""
    modules = set(model.modules())
    return Counter(id(p) for m in modules for p in m._parameters.values() if p is not None)


def _shares_outside(module: nn.Module, users: Counter[int]) -> str:
    """Why a module cannot be split alone: the parameter that others own, too; or ""."""
    inside = _users_of_parameters(module)
    for name, parameter in module.named_parameters():
        if users[id(parameter)] > inside[id(parameter)]:
            return f"its parameter '{name}' is shared with a module outside of it"
    return ""
