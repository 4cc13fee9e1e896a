"""Attributes set by a module in its forward, and those with a change while the model runs.
Changes are in lists, fields of objects, or tensors.  Tracing shows which.

On other ranks a parent that reads its child's attribute (an auxiliary loss, a cache) would read
the value from the model's construction: this is an error.

On its own rank each microbatch has its own (``smp/modules/microbatch_attributes.py``).
"""

import functools
from typing import Any, NamedTuple

from torch import nn

from smp import _core
from smp.marks import SET_ELSEWHERE, set_class
from smp.modules import live_models, remote_modules, stand_ins, travelling_changes
from smp.pytorch import call_warnings
from smp.pytorch.contents import can_change
from smp.state_mod import state


class ForwardState(NamedTuple):
    """The known changes of a model's modules when run.  By path of the module."""

    attributes: dict[str, tuple[str, ...]]  # names of plain attributes set by it
    buffers: dict[str, tuple[str, ...]]  # names of buffers changed by it


class _SetElsewhere(stand_ins.WatchedAttribute):
    """Such an attribute in a remote module's stand-in class.

    Code that has set it here in the same step may read it.
    """

    def before_read(self, module: nn.Module) -> None:
        if not travelling_changes.noted(module, self.name):
            self._tell(module)

    def _tell(self, module: nn.Module) -> None:
        """
        Raises:
            RuntimeError: in a step.
        """
        home = live_models.home_of(module)
        if home is None:
            return
        path, owner = home
        name = f"{path}.{self.name}".lstrip(".")
        what = f"'{name}' changes when its module runs, on pp_rank {owner}"
        if _core.current() is None:
            call_warnings.warn_of_attribute(path, self.name, f"{what}; its value here is older")
        else:
            here = state.job(what).runtime.pp_rank
            raise RuntimeError(
                f"smp: {what}, and was read here on pp_rank {here}: return it "
                "from the forward, or place both modules together with smp.set_partition"
            )


@functools.cache
def remote_with(names: tuple[str, ...]) -> stand_ins.Members:
    """As ``remote_modules.remote``, for a module with these attributes set by its forward."""

    def members(cls: type[nn.Module]) -> dict[str, Any]:
        watched = {name: _SetElsewhere() for name in names}
        return {**remote_modules.remote(cls), SET_ELSEWHERE: names, **watched}

    return members


def warn_of_shared(
    root: nn.Module, names: dict[str, tuple[str, ...]], rank_of: dict[str, int]
) -> None:
    """Warn of changing objects shared by modules on several ranks: each rank has its own."""
    named = dict(root.named_modules())
    first: dict[int, tuple[str, str]] = {}  # by id: path and name of the first holder
    for path, of_module in names.items():
        for name in of_module:
            value = named[path].__dict__.get(name)
            if can_change(value):
                at, its = first.setdefault(id(value), (path, name))
                if rank_of[at] != rank_of[path]:
                    mine, theirs = f"{path}.{name}".lstrip("."), f"{at}.{its}".lstrip(".")
                    call_warnings.warn_of_attribute(
                        path,
                        name,
                        f"'{mine}' and '{theirs}' are one {type(value).__name__}, which "
                        f"changes when the model runs; pp_rank {rank_of[path]} and "
                        f"{rank_of[at]} each have their own: return what goes into it, or "
                        "place the modules together with smp.set_partition",
                    )


def watch(root: nn.Module, names: dict[str, tuple[str, ...]]) -> None:
    """Watch these attributes of the modules remote here, by path."""
    for path, module in root.named_modules():
        if path in names and remote_modules.is_remote(module):
            cls = remote_modules.original_class(module)
            of_other_models = getattr(type(module), SET_ELSEWHERE, ())
            its = {*names[path], *of_other_models}
            set_class(module, stand_ins.stand_in(cls, remote_with(tuple(sorted(its)))))
