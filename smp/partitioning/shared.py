"""Modules and parameters of several models.

A module is on one rank, and so is a parameter: its rank in one model is its rank in the others.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn

from smp.modules.live_models import LiveModel, parts_of
from smp.modules.pins import pin_of
from smp.modules.remote_modules import runs_where_called


class Home(NamedTuple):
    """The place of a part of a model."""

    kind: str  # "module", "parameter" or "buffer"
    name: str  # its path there, and the model
    rank: int  # a pp_rank
    pinned: bool  # by the user; else decided

    def described(self) -> str:
        """For messages."""
        where = f"{'pinned to' if self.pinned else 'on'} partition {self.rank}"
        return f"{self.kind} {self.name} in another DistributedModel, {where}"


# By id of a module, a parameter or a changing buffer.
Homes = dict[int, Home]


def homes_in(
    root: nn.Module,
    rank_of: Mapping[str, int],
    changing: Mapping[str, Iterable[str]] | None = None,
    pinned: bool = False,
) -> Homes:
    """The places of a model's parts.

    Args:
        rank_of: pp_rank by path; modules without one, or run on their caller's rank, have no
            home.
        changing: by path, names of the module's buffers changed by its forward.
        pinned: the ranks are the user's.
    """
    homes: Homes = {}

    def add(thing: object, kind: str, path: str, rank: int) -> None:
        name = f"{path!r} of a {type(root).__name__}"
        homes.setdefault(id(thing), Home(kind, name, rank, pinned))

    for path, module in root.named_modules():
        rank = rank_of.get(path)
        if rank is None or runs_where_called(module):
            continue
        add(module, "module", path, rank)
        changed = (changing or {}).get(path, ())
        held = [("parameter", item) for item in module._parameters.items()]
        held += [("buffer", (name, module._buffers.get(name))) for name in changed]
        for kind, (name, tensor) in held:
            if tensor is not None:
                add(tensor, kind, f"{path}.{name}".lstrip("."), rank)
    return homes


def homes_of(models: Iterable[LiveModel]) -> Homes:
    """The places of partitioned models' parts; the first one's word counts."""
    homes: Homes = {}
    for one in models:
        if one.partitioned:
            its = parts_of(one)
            homes = homes_in(one.module, its.partition.rank_of, its.changing) | homes
    return homes


def pinned_homes(models: Iterable[LiveModel]) -> Homes:
    """The pinned parts of models not yet partitioned, with all in them."""
    homes: Homes = {}
    for one in models:
        ranks: dict[str, int] = {}
        for path, module in one.module.named_modules():
            rank = pin_of(module)
            if rank is None and path:
                rank = ranks.get(path.rpartition(".")[0])
            if rank is not None:
                ranks[path] = rank
        homes = homes_in(one.module, ranks, pinned=True) | homes
    return homes
