"""``smddp`` as ``torch.distributed`` knows it: a name, and what makes its groups."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from smp.collectives.process_group import ProcessGroup
from smp.collectives.ranks import Ranks

_everyone: Ranks | None = None  # those of the default group, if it is one of ours


def create(opts: Any, options: Any = None) -> ProcessGroup:
    """What ``torch.distributed`` calls to make a group; collective over its members.

    Args:
        options: what the script gave as ``pg_options``: NCCL's, for CUDA tensors.
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
    try:
        return ProcessGroup(
            ranks, list(members), rank, opts.store, opts.timeout, opts.group_id, options, _shown
        )
    except BaseException:
        ranks.close_unused()
        raise


_shown: str | None = None


@contextmanager
def called(shown: str) -> Iterator[None]:
    """Errors and reports call a group that is made meanwhile so, not by torch's number."""
    global _shown
    _shown = shown
    try:
        yield
    finally:
        _shown = None


def register() -> None:
    """Make ``smddp`` known to ``torch.distributed``."""
    dist.Backend.register_backend("smddp", create, extended_api=True, devices=["cpu", "cuda"])
