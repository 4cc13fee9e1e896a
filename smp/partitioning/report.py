"""Showing a partition: as text, as numbers, as a picture.

A report is made of a :class:`smp.partitioning.partition.Partition` alone, so it can be
printed on any rank, and without the model.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from smp.partitioning.partition import Partition
from smp.partitioning.picture import picture
from smp.partitioning.tree import (
    Part,
    collapse,
    in_bytes,
    rank_kept_bytes,
    rank_parameters,
    ranks_in_words,
    readable,
    tree,
)


class PartitionReport:
    """A partition to look at: ``print(report)``, ``report.svg("partition.svg")``.

    Attributes:
        partition: the one shown.
        costs: by rank, the cost of its modules; they add up to 1.
        split: the outcomes of tensor parallelism's splits: path, class name, and the reason for
            a whole module ("" if split).
        gathered: by path of a split weight, the number of its gathers on this rank for uses
            without its module's call.
        chains: calls of other ranks' modules made by this rank in one request, as learned in
            the steps so far: their paths in the order of the calls.
    """

    def __init__(
        self,
        partition: Partition,
        split: Sequence[tuple[str, str, str]] = (),
        gathered: Mapping[str, int] | None = None,
        chains: Sequence[Sequence[str]] = (),
    ):
        self.partition = partition
        self.split = list(split)
        self.gathered = dict(gathered or {})
        self.chains = [list(chain) for chain in chains]
        self.costs: list[float] = list(partition.costs)

    def rank_of(self, name: str) -> int:
        """The pp_rank of the module with a path.

        Args:
            name: the path, as in ``named_modules()``; ``""`` for the whole model.

        Raises:
            KeyError: there is no such module.
        """
        try:
            return self.partition.rank_of[name]
        except KeyError:
            raise KeyError(f"smp: the partition has no module {name!r}") from None

    def __str__(self) -> str:
        """The tree down to parts of one rank, and each rank's share."""
        return self.text()

    def text(self, everything: bool = False) -> str:
        """The tree as text, a line for each module or run of modules alike.

        Args:
            everything: go into parts of one rank, too.
        """
        root = tree(self.partition)
        collapse(root)
        rows: list[tuple[str, ...]] = [
            ("module", "class", "parameters", *self._kept("kept"), "cost", "rank")
        ]
        for prefix, part in _lines(root, everything):
            kind = part.kind if part.count == 1 else f"{part.count} x {part.kind}"
            rows.append(
                (
                    prefix + part.label,
                    kind,
                    readable(part.parameters),
                    *self._kept(in_bytes(part.kept_bytes)),
                    f"{part.cost:.4f}",
                    _ranks(part),
                )
            )
        partition = self.partition
        lines = [
            f"Partition over {ranks_in_words(partition)}, "
            f"memory_weight {partition.memory_weight:g}",
            *self._kept("kept: what autograd keeps of one microbatch, as traced"),
            "",
            *_columns(rows, right=set(range(2, len(rows[0]) - 1))),
            "",
            *_columns(self._rank_rows(), right={1, 2, len(self._kept("")) + 2}),
            *self._split_lines(),
            *self._chain_lines(),
        ]
        return "\n".join(lines)

    def _rank_rows(self) -> list[tuple[str, ...]]:
        parameters = rank_parameters(self.partition)
        most = max(self.costs) or 1.0
        kept = rank_kept_bytes(self.partition)
        rows: list[tuple[str, ...]] = [("rank", "parameters", *self._kept("kept"), "cost", "")]
        for rank, cost in enumerate(self.costs):
            bar = "█" * round(cost / most * 40)
            numbers = (readable(parameters[rank]), *self._kept(in_bytes(kept[rank])))
            rows.append((str(rank), *numbers, f"{cost:.4f}", bar))
        return rows

    def _kept(self, text: str) -> tuple[str, ...]:
        """A cell, if autograd's memory was measured."""
        return (text,) if self.partition.kept_bytes else ()

    def _split_lines(self) -> list[str]:
        """The number of split modules of each class, and the reasons for whole ones."""
        if not self.split:
            return []
        counts = Counter(kind for _, kind, reason in self.split if not reason)
        done = ", ".join(f"{count} x {kind}" for kind, count in counts.items()) or "nothing"
        whole = [
            f"left whole: {path} ({kind}): {reason}"
            for path, kind, reason in self.split
            if reason
        ]
        whose = ["parameters and costs are tp_rank 0's"] if counts else []
        gathered = [
            f"gathered {count} times, for uses without its module's call: {path}"
            for path, count in self.gathered.items()
        ]
        return ["", f"Split over the TP_GROUP: {done}", *whose, *whole, *gathered]

    def _chain_lines(self) -> list[str]:
        """A line for each chain: its calls, and their ranks."""
        lines = [""] if self.chains else []
        for calls in self.chains:
            ranks = list(dict.fromkeys(self.partition.rank_of.get(path, -1) for path in calls))
            through = " to ".join(str(rank) for rank in ranks if rank >= 0)
            lines.append(
                f"One request for {len(calls)} calls: {calls[0]} to {calls[-1]}, rank {through}"
            )
        return lines

    def svg(self, path: str | os.PathLike) -> None:
        """Write the tree as a picture: width is cost, colour is rank, top is the root.

        Args:
            path: of the file, replaced if it exists.

        Raises:
            OSError: the file cannot be written.
        """
        with open(path, "w", encoding="utf-8") as file:
            file.write(self._repr_svg_())

    def _repr_svg_(self) -> str:
        """The picture, for notebooks."""
        return picture(self.partition, tree(self.partition))


def _ranks(part: Part) -> str:
    """``3``, or ``0 (of 0-3)`` for a module with others on other ranks in it."""
    if len(part.ranks) == 1:
        return str(part.rank)
    runs: list[list[int]] = []
    for rank in sorted(part.ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    spelled = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{part.rank} (of {spelled})"


def _lines(root: Part, everything: bool) -> Iterator[tuple[str, Part]]:
    """Depth first, each part with the branches drawn before its name."""
    stack = [("", "", root)]
    while stack:
        prefix, below, part = stack.pop()
        yield prefix, part
        if not everything and len(part.ranks) == 1 and part is not root:
            continue
        for child in reversed(part.parts):
            last = child is part.parts[-1]
            stack.append(
                (below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "), child)
            )


def _columns(rows: Sequence[tuple[str, ...]], right: set[int]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
