"""The places of the job's ranks, shared once a rank does not go on.

The watchdog in C knows this rank alone.  While the rank stands still, a thread here puts the
watchdog's lines into the job's store and reads those of others.  The watchdog shows them in its
reports.  A moving rank tells nothing.
"""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from smp import _core
from smp.collectives.ranks import Ranks
from smp.state_mod import Job

LOOKS = 8  # within the shorter limit, and within each time of a rank's standstill
LONGEST_S = 1.0  # between two looks
LEAVE_S = 1.0  # for `stop` to wait for a look
SHOWN = 8  # ranks in a report
SHOWN_BYTES = 900  # of each


_generations = itertools.count()  # each job has keys of its own


@contextmanager
def shared(job: Job) -> Iterator[None]:
    """Have the watchdog's reports name the places of the job's other ranks.

    A rank without a pipeline has its watchdog from here, too; else it is the core's.
    """
    limits = job.cfg.watchdog_report_s, job.cfg.watchdog_end_s
    store = dist.PrefixStore(
        f"smp-whereabouts-{next(_generations)}", dist.distributed_c10d._get_default_store()
    )
    if len(job.groups["pp"]) == 1:
        _core.watch(f"rank {job.boot.rank}", *limits)
    told = Whereabouts(store, job.boot.rank, job.boot.size, *limits)
    told.start()
    try:
        yield
    finally:
        told.stop()
        _core.unwatch()


class Whereabouts:
    """The thread of this rank, from `start` to `stop`.

    Args:
        store: its keys are those of the ranks of this job alone.
        rank: this one, among ``size``.
        limits: in seconds, until the watchdog reports, or ends the job; 0: never.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, *limits: float) -> None:
        self.store, self.rank = store, rank
        self.limit = min((limit for limit in limits if 0 < limit < 1e9), default=0.0)
        self.keys = [str(each) for each in range(size)]
        self.period = min(self.limit / LOOKS, LONGEST_S)
        self.next = self.limit / 2  # without a move: when to tell and to read
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="smp-whereabouts", daemon=True)

    def start(self) -> None:
        if self.limit:
            self.store.set(str(self.rank), "")
            self._thread.start()

    def stop(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(LEAVE_S)  # a store whose rank is stopped answers late

    def _run(self) -> None:
        while not self._end.wait(self.period):
            with suppress(RuntimeError):  # the store's rank has ended
                self._look()

    def _look(self) -> None:
        still, here = standing()
        if still < self.limit / 2:
            if self.next > self.limit / 2:
                self.store.set(str(self.rank), "")
                self.next = self.limit / 2
                _core.hear_of("")
            return
        if still < self.next:
            return
        self.next = still + max(self.period, still / LOOKS)
        self.store.set(str(self.rank), here)
        if still >= self.limit * (LOOKS - 2) / LOOKS and self.store.check(self.keys):
            others = self._others()
            if not self._end.is_set():
                _core.hear_of(others)

    def _others(self) -> str:
        """The lines of other ranks, and the ranks without one, for the report."""
        told = dict(zip(self.keys, self.store.multi_get(self.keys), strict=True))
        del told[str(self.rank)]
        shown = [lines.decode() for lines in told.values() if lines]
        silent = [rank for rank, lines in told.items() if not lines]
        lines = "".join(shown[:SHOWN])
        if len(shown) > SHOWN:
            lines += f"  {len(shown) - SHOWN} more ranks wait\n"
        if silent:
            more = ", ..." if len(silent) > SHOWN else ""
            lines += (
                f"  rank{'s' if len(silent) > 1 else ''} {', '.join(silent[:SHOWN])}{more} "
                "told nothing: computing, in no step and no call of smp, or stopped\n"
            )
        return lines


def standing() -> tuple[float, str]:
    """Seconds without a move, and this rank's place; 0.0: in no step and no call."""
    now = _core.standing()
    if now is None:
        return 0.0, ""
    still, lines = now
    for ranks in list(Ranks.open):
        lines += "".join(f"    {wait}\n" for wait in ranks.comm.waits().splitlines())
    return still, lines[:SHOWN_BYTES]
