"""A script's changes of modules inside of a region, with this rank's channels there."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from smp.marks import INSIDE_REGION

_KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_LIBRARIES = ("torch", "smp", "transformers", "peft")  # their hooks do not look at channels


def kind_of(module: nn.Module) -> str:
    """The kind of a script's hook on a module; "": none."""
    for table, kind in _KINDS.items():
        hooks: Mapping[int, Any] = module.__dict__[table]
        if hooks and any(map(_is_of_script, hooks.values())):
            return kind
    return ""


def _is_of_script(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    library = str(getattr(hook, "__module__", "")).partition(".")[0]
    return library not in _LIBRARIES


class Place(NamedTuple):
    """The place of a module at its split."""

    parent: nn.Module
    name: str
    module: nn.Module

    def is_taken(self) -> bool:
        """Whether another module, and none around this one, has the place now."""
        now = self.parent._modules.get(self.name)
        if now is self.module:
            return False
        return now is None or all(one is not self.module for one in now.modules())


def watch(region: nn.Module, outer: str, inside: Mapping[str, Place]) -> None:
    """Have the calls of a region look at the modules inside.

    Args:
        outer: path of the planned module; at its ends channels are whole.
        inside: places of the modules in it, by path.
    """
    region.__dict__[INSIDE_REGION] = outer, inside


def is_parametrized(module: nn.Module) -> bool:
    """Whether a parameter is a function's value now (``torch.nn.utils.parametrize``)."""
    return "parametrizations" in module._modules


def refuse(region: nn.Module) -> None:
    """Refuse changes in a call of a region.

    Raises:
        RuntimeError: a module inside has a hook, a ``forward`` or a parametrization now, or
            another one is in its place; the text names the module.
    """
    outer, inside = region.__dict__.get(INSIDE_REGION, ("", {}))
    changes = {outer: "has a parametrization"} if is_parametrized(region) else {}
    for path, place in inside.items():
        if change := _change(place):
            changes[path] = change
    for path, change in changes.items():
        raise RuntimeError(
            f"smp: '{path}' {change}, and would act on this rank's channels of all "
            f"tp_ranks' samples: '{outer}' is split over the TP_GROUP.  Change it before "
            f"smp.DistributedModel, which then leaves '{outer}' whole where it has to, or "
            f"put a hook on '{outer}' itself, where channels are whole"
        )


def _change(place: Place) -> str:
    """The change of a module since the split; "": none."""
    if place.is_taken():
        return "is another module than before smp.DistributedModel"
    if "forward" in place.module.__dict__:
        return "has another forward than its class"
    if is_parametrized(place.module):
        return "has a parametrization"
    found = kind_of(place.module)
    return f"has a {found}" if found else ""
