"""Attributes that a module sets in its forward, on ranks that do not run it.

A parent that reads what its child left there (an auxiliary loss, a cache) would read what
was there when the model was made.  Tracing sees which attributes a forward sets.
"""

import functools
from typing import Any

from torch import nn

from smp import _core
from smp.execution import left_behind, runtime
from smp.modules import changes, live_models, remote_modules, stand_ins


class _SetElsewhere:
    """Such an attribute in the class that stands in for a remote module's.

    Whoever has set it here in the same step may read it.
    """

    def __set_name__(self, owner: type[nn.Module], name: str) -> None:
        self.owner, self.name = owner, name

    def __get__(self, module: nn.Module | None, cls: type[nn.Module]) -> Any:
        if module is None:
            return getattr(stand_ins.users_class(cls), self.name)
        if not changes.noted(module, self.name):
            self._tell(module)
        if self.name in module.__dict__:
            return module.__dict__[self.name]
        return getattr(super(self.owner, module), self.name)

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__[self.name] = value

    def __delete__(self, module: nn.Module) -> None:
        if self.name not in module.__dict__:
            raise AttributeError(self.name)
        del module.__dict__[self.name]

    def _tell(self, module: nn.Module) -> None:
        """
        Raises:
            RuntimeError: in a step.
        """
        home = live_models.home_of(module)
        if home is None:
            return
        path, owner = home
        what = f"'{path}.{self.name}' is set in the forward of its module, on pp_rank {owner}"
        if _core.current() is None:
            left_behind.warn_of_attribute(path, self.name, f"{what}; its value here is older")
        else:
            here = runtime.get(what).pp_rank
            raise RuntimeError(
                f"smp: {what}, and was read here on pp_rank {here}: return it "
                "from the forward, or place both modules together with smp.set_partition"
            )


@functools.cache
def remote_with(names: tuple[str, ...]) -> stand_ins.Members:
    """As ``remote_modules.remote``, for a module whose forward sets these attributes."""

    def members(cls: type[nn.Module]) -> dict[str, Any]:
        return {**remote_modules.remote(cls), **{name: _SetElsewhere() for name in names}}

    return members


def watch(root: nn.Module, names: dict[str, tuple[str, ...]]) -> None:
    """Watch these attributes of the modules that are remote here, by path."""
    for path, module in root.named_modules():
        if path in names and type(module).__dict__.get("__call__") is _core.module_call:
            cls = remote_modules.original_class(module)
            module.__class__ = stand_ins.stand_in(cls, remote_with(names[path]))
