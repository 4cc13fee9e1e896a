"""The end of a step without a pipeline, on all ranks of a TP_GROUP together.

So, too, the end of a run traced by all ranks of a DP_GROUP.

A rank with a failed step makes no more of its modules' collectives, and the others would wait.
So it calls another operation in place of the next one.  The other operation fails on every
rank, with as many operations called on each, and the step fails with it.  Ranks with successful
steps meet in a last operation: a failure after the last collective of a module is heard, too.

In a pipeline the servers tell each other (``smp.tensor_parallel.backward.order``).
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from smp import _core, ranks
from smp.collectives.torch_process_groups import device_of_numbers
from smp.tensor_parallel.backward import keys

_is_over = False  # whether this step has met the other ranks' failure


class PeerFailed(RuntimeError):
    """Another rank of the group failed, or ran other modules than this one."""


@contextmanager
def of_tp_group() -> Iterator[None]:
    """A step of this rank; its TP_GROUP's ranks have one at the same time."""
    with together(ranks.get_tp_process_group() if ranks.tp_size() > 1 else None):
        yield


@contextmanager
def together(group: dist.ProcessGroup | None) -> Iterator[None]:
    """A run of this rank; the group's ranks have one at the same time.

    Args:
        group: None: this rank runs alone.

    Raises:
        PeerFailed: another rank's run failed, or had other collectives.
    """
    global _is_over
    if group is None:
        yield
        return
    _is_over = False
    try:
        yield
    except BaseException:
        if not _is_over:
            with suppress(Exception):  # this call fails where the others' steps go on
                dist.barrier(group)
        raise
    try:
        dist.all_reduce(torch.zeros(1, device=device_of_numbers(group)), group=group)
    except Exception as error:
        hear("the end of the step", error)
        raise


def is_mismatch(error: Exception) -> bool:
    """Whether a collective failed because another rank called another operation."""
    return isinstance(error, _core.GroupError) and error.status == "SMP_ERR_MISMATCH"


def hear(where: str, error: Exception) -> None:
    """Find the meaning of a failed collective, if the ranks' differ.

    Args:
        where: the collective, in words.

    Raises:
        PeerFailed: the ranks' collectives differ.
    """
    global _is_over
    if not is_mismatch(error):
        return
    _is_over = True
    met, advice = "had failed, or that ran other modules", ""
    if keys.tell_unlike(error):
        met = "ran other modules, or in another order"
        advice = "; which run, and in which order, must be alike on all ranks of the group"
    raise PeerFailed(
        f"smp: {where}: this rank met another rank of its group that {met}: "
        f"{keys.explained(error)}{advice}"
    ) from error
