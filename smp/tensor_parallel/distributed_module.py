"""The base of all modules that are split over the TP_GROUP."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from smp.tensor_parallel import group
from smp.tensor_parallel.slices import PATH, refuse_copies, slices_of


class DistributedModule(nn.Module):
    """A module whose parameters the ranks of the TP_GROUP have slices of.

    Its ``forward`` gets this rank's samples and gives back theirs, whatever travels between.
    Subclass it for one of your own, out of the primitives of ``smp.nn.utils``.

    Attributes:
        IS_CONTAINER: whether a pipeline may be cut between the modules in it, because it calls
            no collective itself while one of them runs.
    """

    IS_CONTAINER = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "forward" in cls.__dict__:
            cls.forward = _naming(cls.forward)  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _named_calls_of(self):
            return super().__call__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._smp_refuses_copies()
        return super().__reduce_ex__(protocol)

    def _smp_refuses_copies(self) -> None:
        """See ``smp.modules.stand_ins``."""
        if group.size() > 1 and any(slices_of(p) is not None for p in self.parameters()):
            refuse_copies(self)


@contextmanager
def _named_calls_of(module: DistributedModule) -> Iterator[None]:
    """The module makes the collectives of the block."""
    before = group.call_of(module.__dict__.get(PATH, type(module).__name__))
    try:
        yield
    finally:
        group.call_of(before)


def _naming(forward: Callable) -> Callable:
    """For a forward that is called by itself: what has hooks is served so to other ranks."""

    @functools.wraps(forward)
    def named(self: DistributedModule, *args: Any, **kwargs: Any) -> Any:
        with _named_calls_of(self):
            return forward(self, *args, **kwargs)

    return named
