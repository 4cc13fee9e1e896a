"""Sizes that the tp_ranks are taken to have, until a gather shows that they have others.

To exchange sizes takes as long as a small gather.  So a gather assumes that all tp_ranks have
what they had when this one had last what it has now, or that all have the same, and says by a
hash what it assumes.  The core compares the hashes (``assumed`` in
csrc/comm/collective/checks/call.h).  Where they differ no rank gathers anything; all exchange
their sizes and gather again.  So what a gather with a result assumed is true, on all ranks.
"""

from collections.abc import Hashable

import torch.distributed as dist
from torch import Tensor

from smp import _core, ranks
from smp.collectives.process_group import ProcessGroup
from smp.execution import runtime

Words = tuple[int, ...]  # a tp_rank's sizes
Everyones = tuple[Words, ...]  # by tp_rank

_MOST = 4096  # of what is remembered: batches of many lengths bring ever new sizes

_seen: dict[tuple[Hashable, int, Words], Everyones] = {}  # by kind, tp_size, own sizes


class Unlike(Exception):
    """A gather has found, on all tp_ranks, that they do not assume the same sizes."""


def is_possible(tensor: Tensor) -> bool:
    """Whether gathers of such tensors can assume sizes; the same on all tp_ranks."""
    return (
        tensor.is_cpu
        and ranks.pp_size() == 1  # there gathers are waited for elsewhere
        and isinstance(ranks.get_tp_process_group(), ProcessGroup)
        and not (runtime.current is not None and runtime.current.tracing)
    )


def everyones(kind: Hashable, mine: Words) -> Everyones:
    """What all tp_ranks are taken to have where this one has ``mine``."""
    size = ranks.tp_size()
    return _seen.get((kind, size, mine)) or (mine,) * size


def remember(kind: Hashable, mine: Words, had: Everyones) -> None:
    """What they had; ``kind`` tells apart sizes of other things."""
    if len(_seen) >= _MOST:
        _seen.clear()
    _seen[kind, len(had), mine] = had


def signature(sizes: Everyones) -> int:
    """What such a gather says; not 0, and the same in every process."""
    return hash(sizes) % 2**64 or 1


def check(error: dist.DistBackendError) -> None:
    """Of a gather that said what it assumed.

    Raises:
        Unlike: others assumed other sizes, and it has failed for that alone.
    """
    if isinstance(error, _core.Error) and error.status == "SMP_ERR_SIZES":
        raise Unlike from None
