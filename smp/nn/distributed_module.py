"""The base of all modules that are split over the TP_GROUP."""

from torch import nn


class DistributedModule(nn.Module):
    """A module whose parameters the ranks of the TP_GROUP have slices of.

    Its ``forward`` gets this rank's samples and gives back theirs, whatever travels between.
    Subclass it for one of your own, out of the primitives of ``smp.nn.utils``.
    """
