"""Steps of all replicas alike in one order (``deterministic_server``).

The order is csrc/server/sequence.h's.  This file has the collectives called by modules
themselves, with torch.distributed.  Over ``smddp`` a task that waits for one lets others run,
as for a distributed module's.  So ranks with different calls hear of these.  Over other
backends, and on devices, the task holds its server's baton until the collective is over.
"""

from contextlib import suppress
from typing import Any

import torch.distributed as dist

from smp import _core, ranks
from smp.collectives import objects
from smp.collectives.process_group import ProcessGroup
from smp.ranks import CommGroup
from smp.tensor_parallel.backward import order

_FAILED = "the end of a step that failed"


_CALLED = "torch.distributed"  # in the place of a module's path in a collective's key


def prepare() -> None:
    """Have tasks give way where they wait for a collective of their own."""
    for group in _process_groups():
        if isinstance(group, ProcessGroup):
            group.gives_way = _give_way


def _give_way(work: dist.Work) -> None:
    """Wait for an operation begun by this task."""
    order.Call.of_module(_CALLED).run(lambda is_async: work)


def finish_failed_step() -> None:
    """Bring the ranks of the DP_GROUP, after a failed step, to one number of collectives.

    A failed rank calls another operation at once: this fails the collective of ranks waiting
    for it with the baton.  The ranks run alike, so none waits in a later one.  Then all make up
    for their missing operations.  Collective over the ranks of the failed step.

    Raises:
        RuntimeError: the group's backend cannot do this.
    """
    if _core.counters()["lost"] >= 0:  # nothing goes on: the step's own error says why
        return
    groups = [_Group(one) for one in _process_groups()]
    ended, _ = _core.ended_in_order()
    if not ended:
        for group in groups:
            group.call_another()
    order.await_ends()
    _, all_ended = _core.ended_in_order()
    if all_ended:  # their collectives, too; some of these ranks' steps may have gone well
        return
    counts = _core.pack(tuple(group.begun for group in groups))
    try:
        told = objects.gather_bytes(_FAILED, CommGroup.DP_GROUP, counts)
    except ConnectionError:  # as above
        return
    everyone = dict(zip(ranks.get_dp_group(), map(_core.unpack, told), strict=True))
    for at, group in enumerate(groups):
        group.make_up(max(everyone[rank][at] for rank in group.ranks))


def _process_groups() -> list[dist.ProcessGroup]:
    """The groups of this rank's modules' own collectives."""
    groups = [ranks.get_dp_process_group()]
    if ranks.rdp_size() > 1:
        groups.append(ranks.get_rdp_process_group())
    if ranks.tp_size() > 1:
        groups.append(ranks.get_tp_process_group())
    return list(dict.fromkeys(groups))


class _Group:
    """A process group and the number of this rank's operations begun in it."""

    def __init__(self, group: Any):
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        # Tasks give way in operations of smddp, so several may wait behind one another.
        self.begun: int = (
            group.issued()
            if isinstance(group, ProcessGroup)
            else group._get_sequence_number_for_group()
        )
        self._works: list[Any] = []

    def call_another(self) -> None:
        if isinstance(self.group, ProcessGroup):
            self._works.append(dist.barrier(self.group, async_op=True))
            self.begun += 1

    def make_up(self, most: int) -> None:
        """Begin as many as the others; then all are over.

        Raises:
            RuntimeError: the group's backend would leave ranks with more operations waiting.
        """
        if self.begun < most and not isinstance(self.group, ProcessGroup):
            raise RuntimeError(
                "smp: the step failed within collectives that modules call, which the backend "
                f"'{dist.get_backend(self.group)}' cannot end: this job cannot go on "
                "(ddp_dist_backend='smddp' can)"
            )
        while self.begun < most:
            self.call_another()
        for work in self._works:
            with suppress(Exception):  # two different ones have ended each other
                work.wait()
