"""The base of all modules that are split over the TP_GROUP."""

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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = group.call_of(self.__dict__.get(PATH, type(self).__name__))
        try:
            return super().__call__(*args, **kwargs)
        finally:
            group.call_of(before)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._smp_refuses_copies()
        return super().__reduce_ex__(protocol)

    def _smp_refuses_copies(self) -> None:
        """See ``smp.modules.stand_ins``."""
        if group.size() > 1 and any(slices_of(p) is not None for p in self.parameters()):
            refuse_copies(self)
