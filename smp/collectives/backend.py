"""``smddp`` in ``torch.distributed``: a name, and the maker of its groups."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from smp.collectives.process_group import ProcessGroup
from smp.collectives.ranks import Ranks

_ITEMS = 6  # of the ranks in a group's name; the core keeps 63 bytes of these

_everyone: Ranks | None = None  # those of the default group, if smddp's


def create(opts: Any, options: Any = None) -> ProcessGroup:
    """Make a group for ``torch.distributed``; collective over its members.

    Args:
        options: the script's ``pg_options``: NCCL's, for CUDA tensors.
    """
    global _everyone
    if not (dist.is_nccl_available() and isinstance(options, dist.ProcessGroupNCCL.Options)):
        options = None
    rank, size, members = opts.group_rank, opts.group_size, opts.global_ranks_in_group
    is_default = not members
    ranks = _everyone
    if is_default or ranks is None or not ranks.is_open:
        ranks = Ranks(opts.store, rank, size, opts.timeout, members or range(size))
        members = list(range(size))
    if is_default:
        if _everyone is not None:
            _everyone.of_default = False
        _everyone = ranks
        ranks.of_default = True
    shown = _shown or _named(opts.group_id, opts.global_ranks_in_group)
    try:
        return ProcessGroup(
            ranks, list(members), rank, opts.store, opts.timeout, opts.group_id, options, shown
        )
    except BaseException:
        ranks.close_unused()
        raise


def _named(number: str, members: list[int]) -> str:
    """Torch's number of a group, and its ranks unless these are all ranks of the job.

    Args:
        members: global ranks; none: all.
    """
    if not members or len(members) == dist.get_world_size():
        return number
    return f"{number} ({_in_words(members)})"


def _in_words(ranks: list[int]) -> str:
    """Three or more in a row are the first to the last; of many the start."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    items = [
        item
        for run in runs
        for item in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))
    ]
    shown = ", ".join(items[:_ITEMS] + ["..."] * (len(items) > _ITEMS))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


_shown: str | None = None


@contextmanager
def called(shown: str) -> Iterator[None]:
    """Have errors and reports call a group made meanwhile so, not by torch's number."""
    global _shown
    _shown = shown
    try:
        yield
    finally:
        _shown = None


def register() -> None:
    """Make ``smddp`` known to ``torch.distributed``."""
    dist.Backend.register_backend("smddp", create, extended_api=True, devices=["cpu", "cuda"])
