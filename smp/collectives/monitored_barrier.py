"""Monitored barriers: rank 0 hears of every missing rank."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from smp.collectives.work import Received

_ASKED, _ANSWERED, _PASSED, _FAILED, _MISSED = range(5)


class Line(Protocol):
    """To the other ranks of the group, for words about its monitored barriers."""

    def tell(self, rank: int, word: Tensor) -> None:
        """Without waiting."""

    def listen(self, rank: int, word: Tensor) -> Received:
        """For the next word of that rank; the word comes into the tensor."""


class Monitor:
    """The monitored barriers of a group, as one of its ranks sees them.

    Rank 0 asks, and numbers its barriers; a rank in a barrier answers, and then hears of its
    end.  A rank that comes to a barrier after its failure is in the next one: a call left out
    by some rank does not keep the ranks apart.
    """

    def __init__(self, group: str, rank: int, global_ranks: list[int]):
        self._group = group
        self._rank = rank
        self._global_ranks = global_ranks
        self._size = len(global_ranks)
        self._number = 0  # of the barrier; where ranks differ, rank 0 is right
        self._awaited: dict[int, tuple[Received, Tensor]] = {}  # words, by rank

    def barrier(self, line: Line, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Wait for all ranks.

        Raises:
            torch.distributed.DistBackendError: on rank 0, with the first missing rank, or all
                of these with ``wait_all_ranks``; on others, rank 0 did not answer, or did not
                go on.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        self._number += 1
        if self._rank != 0:
            try:
                self._answer(line, deadline)
            except dist.DistBackendError as error:
                raise self._error(
                    f"Rank {self._rank} successfully reached monitoredBarrier, but received "
                    f"errors while waiting for send/recv from rank 0: {error}",
                ) from error
            return
        for rank in range(1, self._size):
            line.tell(rank, _word(_ASKED, self._number))
        missing = [
            rank
            for rank in range(1, self._size)
            if not self._has_answered(line, rank, deadline)
        ]
        for rank in range(1, self._size):
            verdict = _MISSED if rank in missing else _FAILED if missing else _PASSED
            line.tell(rank, _word(verdict, self._number))
        milliseconds = int(timeout.total_seconds() * 1000)
        if missing and timeout <= timedelta() and not wait_all_ranks:
            raise self._error(f"Rank 0 timed out in monitoredBarrier after {milliseconds} ms")
        if missing:
            named = missing if wait_all_ranks else missing[:1]
            raise self._error(
                f"{'Ranks' if wait_all_ranks else 'Rank'} {', '.join(map(str, named))} failed "
                f"to pass monitoredBarrier in {milliseconds} ms",
                named,
            )

    def _error(self, what: str, ranks: Sequence[int] = ()) -> dist.DistBackendError:
        """In gloo's words, with the ranks' numbers in the group, then the global ones."""
        others = tuple(self._global_ranks[rank] for rank in ranks)
        if others != tuple(ranks):
            what += f" (global ranks {', '.join(map(str, others))})"
        return dist.DistBackendError(
            f"smp: group '{self._group}': monitored barrier {self._number}: {what}"
        )

    def _answer(self, line: Line, deadline: float) -> None:
        """The part of a rank other than 0."""
        answered = None
        while True:
            what, number = self._hear(line, 0, deadline)
            if what == _ASKED:
                self._number = number
                line.tell(0, _word(_ANSWERED, number))
                answered = number
            elif number == answered and what == _PASSED:
                return
            elif number == answered and what == _FAILED:
                raise dist.DistBackendError("it did not hear from all ranks")

    def _has_answered(self, line: Line, rank: int, deadline: float) -> bool:
        """Whether the rank is in this barrier; other answers are to earlier ones."""
        try:
            while self._hear(line, rank, deadline) != (_ANSWERED, self._number):
                pass
        except dist.DistBackendError:
            return False
        return True

    def _hear(self, line: Line, rank: int, deadline: float) -> tuple[int, int]:
        """The next word of that rank; has a look even after the deadline."""
        if rank not in self._awaited:
            word = torch.empty(2, dtype=torch.int64, device="cpu")
            self._awaited[rank] = line.listen(rank, word), word
        receipt, word = self._awaited[rank]
        receipt.wait(timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))
        del self._awaited[rank]  # else the next call would hear this word
        what, number = word.tolist()
        return what, number


def _word(what: int, number: int) -> Tensor:
    return torch.tensor([what, number], device="cpu")
