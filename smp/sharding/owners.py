"""Owners: the ranks of an RDP_GROUP hold the same parameters, and one of them updates each.

The owner has the parameter's optimizer state, master weight and averaged gradient; the others
have its value alone.  A large parameter may have several owners, each of contiguous elements.
An owner stays for as long as the optimizer has the parameter.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from smp import ranks
from smp.marks import SHARD
from smp.slicing.slices import elements_alike
from smp.state_mod import state

SLACK = 0.05  # of the mean load: an owner of whole parameters may have it beyond the mean
UNIT = 64  # elements; kernels compute whole ones alike, wherever they are


class Part(NamedTuple):
    """Elements of a parameter, or of a bucket of gradients, with one owner."""

    owner: int  # rdp_rank
    start: int
    end: int


Parts = tuple[Part, ...]


def share_out(sizes: Sequence[int], cuts: Sequence[bool], loads: list[int]) -> list[Parts]:
    """Parts of items, the largest first, each on the rank with the least so far.

    Args:
        sizes: elements of each item.
        cuts: whether it may have several owners.
        loads: of each rank, in elements; the items' are added.
    """
    mean = (sum(loads) + sum(sizes)) / len(loads)
    most = mean * (1 + SLACK)
    out: list[Parts] = [()] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        parts: list[Part] = []
        start = 0
        while start < sizes[item] or not parts:
            free = set(range(len(loads))) - {part.owner for part in parts}
            owner = min(free, key=lambda rank: (loads[rank], rank))
            taken = left = sizes[item] - start
            if cuts[item] and loads[owner] + left > most and len(parts) < len(loads) - 1:
                taken = min(left, int(mean - loads[owner]) // UNIT * UNIT)
                taken = left if taken < UNIT else taken
            parts.append(Part(owner, start, start + taken))
            loads[owner] += taken
            start += taken
        out[item] = tuple(parts)
    return out


class Owners:
    """The owners of one optimizer's parameters.

    Args:
        members: gives the optimizer's parameters of now.
        may_cut: whether a parameter may have several owners.
    """

    def __init__(
        self, members: Callable[[], Iterable[Tensor]], may_cut: Callable[[Tensor], bool]
    ) -> None:
        self._members = members
        self._may_cut = may_cut
        self._loads = [0] * ranks.rdp_size()
        self._parts: dict[int, tuple[Tensor, Parts]] = {}  # by id; parameters stay alive
        self._present: set[int] = set()
        _newest_first.insert(0, weakref.ref(self))

    def assign(self, parameters: Iterable[Tensor], sparse: Collection[int] = ()) -> set[int]:
        """Give owners to parameters without one, if the optimizer has them.

        Args:
            parameters: in training, in an order alike on all replicas.
            sparse: ids of those with sparse gradients, which are not cut.

        Returns:
            the ids of those that the optimizer has.
        """
        self._present = {id(model_parameter(member)) for member in self._members()}
        mine = [p for p in parameters if id(p) in self._present]
        new = [p for p in mine if id(p) not in self._parts]
        cuts = {id(p) for p in new if id(p) not in sparse and self._may_cut(p)}
        if shards_parameters():  # gathered by one operation each
            for parameter in new:
                if id(parameter) in cuts and parameter.numel() >= least_sharded():
                    self._parts[id(parameter)] = parameter, even_parts(parameter.numel())
            new = [p for p in new if id(p) not in self._parts]
        sizes = [elements_alike(p) for p in new]
        shares = share_out(sizes, [id(p) in cuts for p in new], self._loads)
        for parameter, size, parts in zip(new, sizes, shares, strict=True):
            self._parts[id(parameter)] = parameter, _stretched(parts, size, parameter.numel())
        return {id(p) for p in mine}

    def parts_of(self, parameter: Tensor) -> Parts | None:
        """The parameter's parts by owner; None: each rank updates it."""
        found = self._parts.get(id(model_parameter(parameter)))
        return found[1] if found is not None and id(found[0]) in self._present else None

    def every(self) -> list[tuple[Any, Parts]]:
        """The parameters and their parts, in an order alike on all replicas."""
        return [(p, parts) for p, parts in self._parts.values() if id(p) in self._present]

    @property
    def imbalance(self) -> float:
        """The largest load over the mean."""
        return max(self._loads) * len(self._loads) / max(1, sum(self._loads))


def _stretched(parts: Parts, size: int, elements: int) -> Parts:
    """Parts of a slice on this tp_rank, where those of all tp_ranks were counted alike."""
    if size == elements:
        return parts
    ends = [part.end * elements // size // UNIT * UNIT for part in parts[:-1]] + [elements]
    starts = [0, *ends]
    return tuple(Part(p.owner, a, b) for p, a, b in zip(parts, starts, ends, strict=False))


_newest_first: list[weakref.ref[Owners]] = []


def forget() -> None:
    """The job has ended."""
    _newest_first.clear()


def is_on() -> bool:
    """Whether optimizer state is shared out in this job."""
    if not state.is_initialized or ranks.rdp_size() == 1:
        return False
    return state.cfg.shard_optimizer_state or shards_parameters()


def asked_for() -> str:
    """The parameter of `smp.init` that shares out optimizer state, with its value."""
    if not shards_parameters():
        return "shard_optimizer_state=True"
    return f"sharded_data_parallel_degree={state.cfg.sharded_data_parallel_degree}"


def shards_parameters() -> bool:
    """Whether the parameters themselves are shared out, too."""
    return state.is_initialized and state.cfg.sharded_data_parallel_degree > 1


def least_sharded() -> int:
    """The elements of the smallest parameter that is sharded."""
    return state.cfg.sdp_param_persistence_threshold


def even_parts(elements: int) -> Parts:
    """As many elements for each rank of the RDP_GROUP, in the order of ranks."""
    each = max(UNIT, -(-elements // ranks.rdp_size() // UNIT) * UNIT)
    starts = range(0, max(1, elements), each)
    return tuple(Part(i, at, min(at + each, elements)) for i, at in enumerate(starts))


def assign(parameters: Iterable[Tensor], sparse: Collection[int] = ()) -> None:
    """Give owners to a model's parameters in training, for the newest optimizer of each.

    Args:
        parameters: in an order alike on all replicas.
        sparse: ids of those with sparse gradients.
    """
    if not is_on():
        return
    left = [p for p in parameters if p.requires_grad]
    for owners in _living():
        taken = owners.assign(left, sparse)
        left = [p for p in left if id(p) not in taken]


def _living() -> list[Owners]:
    _newest_first[:] = [ref for ref in _newest_first if ref() is not None]
    return [owners for owners in (ref() for ref in _newest_first) if owners is not None]


def parts_of(parameter: Tensor) -> Parts | None:
    """A parameter's parts by owner; None: each rank updates it."""
    found = (owners.parts_of(parameter) for owners in _living())
    return next((parts for parts in found if parts is not None), None)


def elements_by_rank(parts: Parts) -> list[int]:
    """The number of elements of each rank of the RDP_GROUP."""
    counts = [0] * ranks.rdp_size()
    for owner, start, end in parts:
        counts[owner] = end - start
    return counts


def part_here(parts: Parts) -> Part | None:
    """The part of this rank; None: it has none."""
    mine = ranks.rdp_rank()
    return next((part for part in parts if part.owner == mine), None)


def keeps_state(parameter: Tensor) -> bool:
    """Whether this rank has optimizer state of a parameter of a model."""
    if not is_on():
        return True
    parts = parts_of(parameter)
    if parts is None:
        return parameter.requires_grad  # a frozen one is updated by nobody yet
    return part_here(parts) is not None


def own_gradient(parameter: Tensor) -> Tensor | None:
    """The elements of a gradient that count on this rank, each on one replica alone."""
    averages = getattr(getattr(model_parameter(parameter), SHARD, None), "gradient", None)
    if averages is not None:
        return averages
    gradient = parameter.grad
    if gradient is None or not is_on():
        return gradient
    parts = parts_of(parameter)
    if parts is None:
        return gradient if ranks.rdp_rank() == 0 else None
    mine = part_here(parts)
    if mine is None:
        return None
    whole = mine.end - mine.start == gradient.numel()
    return gradient if whole else gradient.reshape(-1)[mine.start : mine.end]


def group_with_each_element() -> str:
    """The kind of group in which `own_gradient` has each element of the model once."""
    return "world" if is_on() else "mp"


def model_parameter(parameter: Any) -> Any:
    """The model's parameter behind one of an optimizer."""
    while (behind := getattr(parameter, "stands_for", None)) is not None:
        parameter = behind
    return parameter
