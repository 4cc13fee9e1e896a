"""Sizes assumed for the tp_ranks, until a gather shows others.

An exchange of sizes takes as long as a small gather.  So a gather assumes the sizes of the last
time this rank had its present ones, or the same size on all tp_ranks.  It sends a hash of its
assumption.  The core compares the hashes (``assumed`` in csrc/comm/collective/checks/call.h).
Where they differ no rank gathers anything; all exchange their sizes and gather again.  So the
assumption of a gather with a result is true, on all ranks.
"""

from collections.abc import Hashable

import torch.distributed as dist
from torch import Tensor

from smp import _core, ranks
from smp.collectives.process_group import ProcessGroup
from smp.state_mod import state

Words = tuple[int, ...]  # a tp_rank's sizes
Everyones = tuple[Words, ...]  # by tp_rank

_MOST = 4096  # of remembered sizes: batches of many lengths bring ever new ones

_seen: dict[tuple[Hashable, int, Words], Everyones] = {}  # by kind, tp_size, own sizes


class Unlike(Exception):
    """A gather has found, on all tp_ranks, that they do not assume the same sizes."""


def is_possible(tensor: Tensor) -> bool:
    """Whether gathers of such tensors can assume sizes; the same on all tp_ranks."""
    return (
        tensor.is_cpu
        and ranks.pp_size() == 1  # there gathers are waited for elsewhere
        and isinstance(ranks.get_tp_process_group(), ProcessGroup)
        and not state.is_tracing
    )


def everyones(kind: Hashable, mine: Words) -> Everyones:
    """The assumed sizes of all tp_ranks where this one has ``mine``."""
    size = ranks.tp_size()
    return _seen.get((kind, size, mine)) or (mine,) * size


def remember(kind: Hashable, mine: Words, had: Everyones) -> None:
    """Remember the tp_ranks' sizes; ``kind`` tells apart sizes of other tensors."""
    if len(_seen) >= _MOST:
        _seen.clear()
    _seen[kind, len(had), mine] = had


def signature(sizes: Everyones) -> int:
    """The hash sent with such a gather; not 0, and the same in every process."""
    return hash(sizes) % 2**64 or 1


def check(error: dist.DistBackendError) -> None:
    """Judge the error of a gather with an assumption.

    Raises:
        Unlike: others assumed other sizes, and the gather failed for this alone.
    """
    if isinstance(error, _core.Error) and error.status == "SMP_ERR_SIZES":
        raise Unlike from None
