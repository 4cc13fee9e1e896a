"""The ranks' places: the arithmetic of pipeline, tensor and data parallelism.

A rank has three coordinates: rdp (its replica), pp (its partition) and tp (its slice).  The
placement strategy is their order; its right-most letter runs over neighbouring ranks.  A group
is the set of ranks equal in all but some coordinates:

    PP_GROUP  pp          TP_GROUP  tp          RDP_GROUP  rdp
    MP_GROUP  pp, tp      DP_GROUP  rdp, tp     WORLD      all of them

Source: SageMaker Python SDK docs, "Ranking Basics".
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

AXES_OF_GROUP = {
    "world": "DPT",
    "mp": "PT",
    "dp": "DT",
    "pp": "P",
    "tp": "T",
    "rdp": "D",
}
STRATEGIES = {"cluster": "DPT", "spread": "TPD"}


class Coordinates(NamedTuple):
    rdp: int
    pp: int
    tp: int


@dataclass(frozen=True)
class Placement:
    """``size`` ranks as rdp x pp x tp.

    Args:
        size: number of ranks; ``pp * tp`` divides it.
        pp: pipeline parallel degree.
        tp: tensor parallel degree.
        strategy: ``"cluster"``, ``"spread"`` or a permutation of D, P and T.
    """

    size: int
    pp: int = 1
    tp: int = 1
    strategy: str = "cluster"

    @property
    def rdp(self) -> int:
        return self.size // (self.pp * self.tp)

    @property
    def order(self) -> str:
        """The letters from the slowest to the fastest coordinate."""
        return STRATEGIES.get(self.strategy, self.strategy)

    def coordinates(self, rank: int) -> Coordinates:
        extent = {"D": self.rdp, "P": self.pp, "T": self.tp}
        at = {}
        for letter in reversed(self.order):
            rank, at[letter] = divmod(rank, extent[letter])
        return Coordinates(at["D"], at["P"], at["T"])

    def groups(self, kind: str) -> list[list[int]]:
        """All groups of a kind (``"pp"``, ...), each in rank order, by lowest rank."""
        fixed = [i for i, letter in enumerate("DPT") if letter not in AXES_OF_GROUP[kind]]
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            at = self.coordinates(rank)
            members.setdefault(tuple(at[i] for i in fixed), []).append(rank)
        return list(members.values())

    def group(self, kind: str, rank: int) -> list[int]:
        """The group of a kind with ``rank``, in rank order."""
        return next(group for group in self.groups(kind) if rank in group)

    def pipelines(self, rank: int) -> list[int]:
        """The MP_GROUP of ``rank``, one pipeline behind the other, by tp_rank."""
        at = self.coordinates
        return sorted(self.group("mp", rank), key=lambda other: (at(other).tp, at(other).pp))

    def replicas(self, rank: int) -> list[int]:
        """All ranks, one pipeline behind the other, by dp_rank.

        A pipeline's ranks have one dp_rank: the ranks of each DP_GROUP are in one order.
        """
        by_stage = [self.group("dp", first) for first in self.pipelines(rank)[: self.pp]]
        return [stage[dp] for dp in range(self.rdp * self.tp) for stage in by_stage]


class Groups(NamedTuple):
    """This rank's process groups.

    Attributes:
        by_kind: as ``AXES_OF_GROUP`` names them.
        objects: of all ranks, for objects.
        owns_default: the default group of ``torch.distributed`` is the job's own.
    """

    by_kind: dict[str, dist.ProcessGroup]
    objects: dist.ProcessGroup
    owns_default: bool
