"""The modules of a partition as a tree, for showing."""

import dataclasses

from smp.partitioning.partition import Partition


@dataclasses.dataclass(slots=True)
class Part:
    """A module in the tree of a report, or several alike in a row.

    Attributes:
        path: of the module; of the first one, if there are several.
        label: last part of the path, ``"0-11"`` for twelve alike.
        kind: class name.
        rank: pp_rank it runs on.
        ranks: of all modules in it.
        parameters: elements of the parameters in it; a shared one counts once, where it is
            defined first.
        cost: of all modules in it; the whole model's is 1.
        kept_bytes: autograd's memory of a microbatch for all modules in it; 0 where not
            measured.
        order: position of the first execution in it; -1: not known.
        count: number of modules alike.
        parts: its children, in definition order.
    """

    path: str
    label: str
    kind: str
    rank: int
    ranks: set[int]
    parameters: int
    cost: float
    kept_bytes: int
    order: int
    count: int
    parts: "list[Part]"

    def shape(self) -> tuple:
        """Equal for modules that differ in name, parameters and cost alone."""
        return (self.kind, self.rank, tuple((p.label, p.shape()) for p in self.parts))


def tree(partition: Partition) -> Part:
    """The partition's modules as a tree; modules alike are not collapsed yet."""
    by_path: dict[str, Part] = {}
    kept_bytes = partition.kept_bytes or [0] * len(partition.paths)
    for i, path in enumerate(partition.paths):
        part = by_path[path] = Part(
            path,
            path.rpartition(".")[2] or "(root)",
            partition.classes[i],
            partition.ranks[i],
            {partition.ranks[i]},
            partition.parameters[i],
            partition.own_costs[i],
            kept_bytes[i],
            partition.order[i],
            1,
            [],
        )
        if path:
            by_path[path.rpartition(".")[0]].parts.append(part)
    for path in reversed(partition.paths):  # children come after their parents
        if path:
            part, parent = by_path[path], by_path[path.rpartition(".")[0]]
            parent.ranks |= part.ranks
            parent.parameters += part.parameters
            parent.cost += part.cost
            parent.kept_bytes += part.kept_bytes
            orders = [o for o in (parent.order, part.order) if o >= 0]
            parent.order = min(orders, default=-1)
    return by_path[""]


def collapse(part: Part) -> None:
    """Join children alike with consecutive numbers for names, at every depth."""
    parts: list[Part] = []
    for child in part.parts:
        collapse(child)
        last = parts[-1] if parts else None
        if last is not None and _follows(last, child):
            last.label = f"{last.label.partition('-')[0]}-{child.label}"
            last.count += 1
            last.parameters += child.parameters
            last.cost += child.cost
            last.kept_bytes += child.kept_bytes
        else:
            parts.append(child)
    part.parts = parts


def _follows(last: Part, part: Part) -> bool:
    first, _, end = last.label.rpartition("-")
    if not (part.label.isdecimal() and end.isdecimal() and (not first or first.isdecimal())):
        return False
    return int(part.label) == int(end) + 1 and part.shape() == last.shape()


def rank_parameters(partition: Partition) -> list[int]:
    """By rank, the elements of its parameters."""
    out = [0] * partition.degree
    for rank, parameters in zip(partition.ranks, partition.parameters, strict=True):
        out[rank] += parameters
    return out


def rank_kept_bytes(partition: Partition) -> list[int]:
    """By rank, autograd's memory of a microbatch; zeros where not measured."""
    out = [0] * partition.degree
    for rank, nbytes in zip(partition.ranks, partition.kept_bytes, strict=False):
        out[rank] += nbytes
    return out


def readable(count: int) -> str:
    """``124.4 M`` for 124439808."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)


def in_bytes(count: int) -> str:
    """``1.5 MiB`` for 1572864."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def ranks_in_words(partition: Partition) -> str:
    """``8 ranks``."""
    return "1 rank" if partition.degree == 1 else f"{partition.degree} ranks"
