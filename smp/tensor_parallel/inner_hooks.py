"""Hooks of a script on modules inside of a region, with this rank's channels there."""

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

_INSIDE = "_smp_inside_region"  # in a region's __dict__: the planned path, and modules by path
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


def watch(region: nn.Module, outer: str, inside: Mapping[str, nn.Module]) -> None:
    """Have the calls of a region look for hooks.

    Args:
        outer: path of the planned module; at its ends channels are whole.
        inside: modules in it, by path.
    """
    region.__dict__[_INSIDE] = outer, inside


def refuse(region: nn.Module) -> None:
    """Refuse hooks in a call of a region.

    Raises:
        RuntimeError: a module inside has a hook; the text names the module.
    """
    outer, inside = region.__dict__.get(_INSIDE, ("", {}))
    for path, module in inside.items():
        if kind := kind_of(module):
            raise RuntimeError(
                f"smp: '{path}' has a {kind}, which would see this rank's channels of all "
                f"tp_ranks' samples: '{outer}' is split over the TP_GROUP.  Register it before "
                f"smp.DistributedModel, which then leaves '{outer}' whole, or on '{outer}' "
                "itself, where channels are whole"
            )
