"""Steps in which all replicas run the same in one order (``deterministic_server``).

The order is csrc/server/sequence.h's.  Here is what becomes of collectives that modules call
by themselves, with torch.distributed, when a step fails: a rank that is in one holds its
server's baton, and hears of nothing until the collective is over.
"""

from contextlib import suppress
from typing import Any

import torch.distributed as dist

from smp import _core, ranks
from smp.collectives.process_group import ProcessGroup
from smp.job import objects
from smp.ranks import CommGroup
from smp.tensor_parallel import order

_FAILED = "the end of a step that failed"


def finish_failed_step() -> None:
    """Have the ranks of the DP_GROUP end, in a step that failed, with as many collectives.

    A rank that has failed calls another operation at once: with it fails the collective in
    which others may wait for this rank.  They run the same, so none waits in a later one.  Then
    all make up for what they have begun less.  Collective over the ranks that failed the step.

    Raises:
        RuntimeError: the group's backend cannot do that.
    """
    groups = _groups()
    ended, _ = _core.ended_in_order()
    counts = [_end_one(group) if not ended else _begun(group) for group in groups]
    order.finish_failed_step()
    _, all_ended = _core.ended_in_order()
    if all_ended:  # their collectives, too; some of these ranks' steps may have gone well
        return
    packed = _core.pack(tuple(counts))
    everyone = [
        _core.unpack(one) for one in objects.gather_bytes(_FAILED, CommGroup.DP_GROUP, packed)
    ]
    members = ranks.get_dp_group()
    for at, group in enumerate(groups):
        own = dist.get_process_group_ranks(group)
        most = max(everyone[members.index(rank)][at] for rank in own)
        _make_up(group, most - counts[at])


def _groups() -> list[Any]:
    """The groups over which modules of this rank may call collectives of their own."""
    groups = [ranks.get_dp_process_group()]
    rdp = ranks.get_rdp_process_group()
    if ranks.rdp_size() > 1 and rdp is not groups[0]:
        groups.append(rdp)
    return groups


def _begun(group: Any) -> int:
    return group._get_sequence_number_for_group()


def _end_one(group: Any) -> int:
    """Call another operation; how many have begun with it."""
    count = _begun(group)
    if not isinstance(group, ProcessGroup):
        return count
    dist.barrier(group, async_op=True)
    return count + 1


def _make_up(group: Any, missing: int) -> None:
    if missing and not isinstance(group, ProcessGroup):
        raise RuntimeError(
            "smp: the step failed within collectives that modules call, which the backend "
            f"'{dist.get_backend(group)}' cannot end: this job cannot go on "
            "(ddp_dist_backend='smddp' can)"
        )
    works = [dist.barrier(group, async_op=True) for _ in range(missing)]
    for work in works:
        with suppress(Exception):
            if work is not None:
                work.wait()
