"""The base of all modules split over the TP_GROUP."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from smp.marks import PATH, set_class
from smp.modules.stand_ins import stand_in
from smp.pytorch.compiled_code import not_traced
from smp.slicing.slices import refuse_copies, slices_of
from smp.tensor_parallel import group, script_uses

_not_traced = not_traced("a module that smp splits over the TP_GROUP")
_not_traced_itself = not_traced("a module that smp splits over the TP_GROUP", False)


class DistributedModule(nn.Module):
    """A module with slices of its parameters on the ranks of the TP_GROUP.

    Its ``forward`` gets this rank's samples and returns their outputs, with any tensors between
    ranks inside.  Subclass it for one of your own, out of the primitives of ``smp.nn.utils``.

    Attributes:
        IS_CONTAINER: whether a pipeline may be cut between the modules in it, because it calls
            no collective itself while one of them runs.
    """

    IS_CONTAINER = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "forward" in cls.__dict__:
            cls.forward = _naming(cls.forward)  # type: ignore[method-assign]

    @_not_traced_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _NamedCallsOf(self):
            return super().__call__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._smp_refuses_copies()
        return super().__reduce_ex__(protocol)

    def _smp_refuses_copies(self) -> None:
        """See ``smp.modules.stand_ins``."""
        if group.size() > 1 and any(slices_of(p) is not None for p in self.parameters()):
            refuse_copies(self)


def take_class(module: nn.Module, distributed: type[DistributedModule]) -> None:
    """Have a module be a distributed one, by the class it inherits from.

    Its own class's code around the call of that class's ``forward`` stays.
    """
    cls = type(module)
    is_own = cls not in distributed.__bases__
    set_class(module, stand_in(cls, _no_members, distributed) if is_own else distributed)


def _no_members(cls: type[nn.Module]) -> dict[str, Any]:
    return {}


class _NamedCallsOf:
    """The module makes the collectives of the block."""

    @_not_traced
    def __init__(self, module: DistributedModule) -> None:
        self._path = module.__dict__.get(PATH, type(module).__name__)

    @_not_traced
    def __enter__(self) -> None:
        self._before = group.call_of(self._path)

    @_not_traced
    def __exit__(self, *_: object) -> None:
        group.call_of(self._before)


def _naming(forward: Callable) -> Callable:
    """For a forward called by itself: a module with hooks is served so to other ranks."""

    @_not_traced_itself
    @functools.wraps(forward)
    def named(self: DistributedModule, *args: Any, **kwargs: Any) -> Any:
        with _NamedCallsOf(self):
            args = script_uses.whole_among(args)
            return script_uses.called_with_slices(self, forward, args, kwargs)

    return named
