"""Steps in which all replicas run the same in one order (``deterministic_server``).

The order is csrc/server/sequence.h's.  Here is what becomes of collectives that modules call
by themselves, with torch.distributed.  Over ``smddp`` a task that waits for one lets others
run, as for a collective of a distributed module, so that ranks which do not call the same hear
of it.  Over other backends, and on devices, it holds its server's baton until it is over.
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


_CALLED = "torch.distributed"  # in the place of a module's path in a collective's key


def prepare() -> None:
    """Have tasks give way where they wait for a collective of their own."""
    for group in _process_groups():
        if isinstance(group, ProcessGroup):
            group.gives_way = _give_way


def _give_way(work: dist.Work) -> None:
    """Wait for an operation that this task has begun."""
    order.Call.of_module(_CALLED).run(lambda is_async: work)


def finish_failed_step() -> None:
    """Have the ranks of the DP_GROUP end, in a step that failed, with as many collectives.

    A rank that has failed calls another operation at once: with it fails the collective in
    which others may wait for this rank, with the baton.  They run the same, so none waits in a
    later one.  Then all make up for what they have begun less.  Collective over the ranks that
    failed the step.

    Raises:
        RuntimeError: the group's backend cannot do that.
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
    """The groups over which modules of this rank call collectives."""
    groups = [ranks.get_dp_process_group()]
    if ranks.rdp_size() > 1:
        groups.append(ranks.get_rdp_process_group())
    if ranks.tp_size() > 1:
        groups.append(ranks.get_tp_process_group())
    return list(dict.fromkeys(groups))


class _Group:
    """A process group and how many operations this rank has begun in it."""

    def __init__(self, group: Any):
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        # Tasks give way in operations of smddp, so that several may wait behind one another.
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
            RuntimeError: the group's backend would leave those who have begun more waiting.
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
            with suppress(Exception):  # two that differ have ended each other
                work.wait()
