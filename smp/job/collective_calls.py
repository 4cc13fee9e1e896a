"""Calls made together with other ranks outside a step, compared between the ranks.

Every such call (a barrier, a gather, a checkpoint) sends its own name along.  A rank that meets
another call than its own raises, and names both.
"""

import os
import sys
from typing import NamedTuple

import smp

OURS = os.path.dirname(os.path.abspath(smp.__file__)) + os.sep


class CallMismatch(RuntimeError):
    """The ranks of a group make different calls, or the same ones in different orders."""


class Call(NamedTuple):
    """One call of all ranks of a group."""

    what: str  # in the script's words: "smp.barrier"
    group: str  # "WORLD"
    number: int  # among this rank's calls of that group, from 1
    where: str  # file and line of the script

    def __str__(self) -> str:
        return f"{self.what} (call {self.number} of {self.group}, {self.where})"

    def matches(self, other: "Call") -> bool:
        """Whether both are part of one: different lines may make the same call."""
        return (self.what, self.group) == (other.what, other.group)


class Calls:
    """The calls of this rank, counted."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._broken = ""

    def begin(self, what: str, group: str) -> Call:
        """Count one.

        Raises:
            CallMismatch: an earlier call has met another: no rank is known to answer this one.
        """
        if self._broken:
            raise CallMismatch(f"{what}: an earlier call failed: {self._broken}")
        self._counts[group] = number = self._counts.get(group, 0) + 1
        return Call(what, group, number, _line_of_script())

    def refuse(self, mine: Call, rank: int, other: Call, other_rank: int) -> CallMismatch:
        """The error for two calls on different ranks."""
        lines = sorted([(rank, mine), (other_rank, other)])
        told = "; ".join(f"rank {at}: {call}" for at, call in lines)
        self._broken = f"the ranks make different calls: {told}"
        return CallMismatch(
            f"smp: {self._broken}.  All ranks of a group make the same calls in the same order"
        )


def _line_of_script() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
