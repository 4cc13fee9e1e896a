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


def refuse(region: nn.Module) -> None:
    """Refuse changes in a call of a region.

    Raises:
        RuntimeError: a module inside has a hook or a ``forward`` of its own now, or another one
            is in its place; the text names the module.
    """
    outer, inside = region.__dict__.get(INSIDE_REGION, ("", {}))
    for path, place in inside.items():
        found = kind_of(place.module)
        change = f"has a {found}" if found else ""
        if "forward" in place.module.__dict__:
            change = "has another forward than its class"
        if place.is_taken():
            change = "is another module than before smp.DistributedModel"
        if change:
            raise RuntimeError(
                f"smp: '{path}' {change}, and would act on this rank's channels of all "
                f"tp_ranks' samples: '{outer}' is split over the TP_GROUP.  Change it before "
                f"smp.DistributedModel, which then leaves '{outer}' whole where it has to, or "
                f"put a hook on '{outer}' itself, where channels are whole"
            )
