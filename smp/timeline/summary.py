"""Where a step's time went: ``smp.trace_summary``.

The time of a step, times the ranks, is work or idle.  Idle time before a rank's first work and
behind its last is the pipeline's bubble.  Idle time before a request, since an earlier request
of its microbatch, is relay, without the work of other ranks on the microbatch: the value was on
its way through the caller.  Imbalance is, of other idle time, the busiest rank's work less each
rank's.  The remainder is overhead: messages, and waits for them.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from smp.timeline.tasks import STEP_FUNCTION, Task, passes_of


class TraceSummary(NamedTuple):
    """Shares of a step in percent of its time on all ranks; they add up to 100.

    Attributes:
        milliseconds: from the first task to the end of the last one.
        work, bubble, relay, imbalance, overhead: the shares, defined in ``docs/debugging.md``.
        by_rank: (work, bubble, relay, other idle time) of each pp_rank, in percent of its time.
        chains: the number of chains, and of the calls in them.
        passed: chains passed on from owner to owner.
        fetched: outputs of chains fetched by the caller.
        missed: how often a foreseen call was in vain, by (module path, reason).
    """

    milliseconds: float
    work: float
    bubble: float
    relay: float
    imbalance: float
    overhead: float
    by_rank: list[tuple[float, float, float, float]]
    chains: tuple[int, int]
    passed: int
    fetched: int
    missed: dict[tuple[str, str], int]

    def __str__(self) -> str:
        """A line for the step, each rank, and each reason for calls in vain."""
        lines = [f"a step of {self.milliseconds:.1f} ms: {self.shares()}"]
        for rank, (work, bubble, relay, other) in enumerate(self.by_rank):
            lines.append(
                f"  pp_rank {rank}: work {work:.1f} %, bubble {bubble:.1f} %, "
                f"relay {relay:.1f} %, other idle time {other:.1f} %"
            )
        count, calls = self.chains
        lines.append(
            f"{count} chains of {calls} calls, {self.passed} passed on, "
            f"{self.fetched} outputs fetched"
        )
        lines += [
            f"  in vain {times} times: {path}: {reason}"
            for (path, reason), times in self.missed.items()
        ]
        return "\n".join(lines)

    def shares(self) -> str:
        """The shares in one line."""
        return (
            f"work {self.work:.1f} %, bubble {self.bubble:.1f} %, relay {self.relay:.1f} %, "
            f"imbalance {self.imbalance:.1f} %, overhead {self.overhead:.1f} %"
        )


class _Stretch(NamedTuple):
    """Work, from begin to end, on a microbatch in a phase."""

    start: int
    end: int
    of: tuple[int, int]
    of_request: bool


def summarize(ranks: Sequence[list[Task]]) -> TraceSummary:
    """The summary of a step.

    Args:
        ranks: the tasks of each pp_rank.
    """
    every = [task for tasks in ranks for task in tasks]
    first = min((task.start_ns for task in every), default=0)
    last = max((task.end_ns for task in every), default=first + 1)
    length = max(last - first, 1)
    works = [_works_of(tasks) for tasks in ranks]
    of_microbatch: dict[tuple[int, int], list[_Stretch]] = {}
    for stretch in sorted(one for its in works for one in its):
        of_microbatch.setdefault(stretch.of, []).append(stretch)
    worked: list[int] = []
    bubbles: list[int] = []
    relays: list[int] = []
    direct = {id(one.received) for one in passes_of(ranks)}
    for tasks, its in zip(ranks, works, strict=True):
        asked = {task.start_ns for task in tasks if id(task) not in direct}
        worked.append(sum(one.end - one.start for one in its))
        inner = its[-1].end - its[0].start if its else 0
        bubbles.append(length - inner)
        relays.append(_relayed(asked, its, of_microbatch))
    total = length * max(len(ranks), 1)
    idle = total - sum(worked)
    rest = idle - sum(bubbles) - sum(relays)
    imbalance = min(rest, sum(max(worked, default=0) - one for one in worked))
    share = 100 / length
    by_rank = [
        (share * w, share * b, share * r, share * (length - w - b - r))
        for w, b, r in zip(worked, bubbles, relays, strict=True)
    ]
    notes = [note for task in every for note in task.notes]
    chains = [note.about for note in notes if note.kind == "chain"]
    return TraceSummary(
        milliseconds=length / 1e6,
        work=100 * sum(worked) / total,
        bubble=100 * sum(bubbles) / total,
        relay=100 * sum(relays) / total,
        imbalance=100 * imbalance / total,
        overhead=100 * (rest - imbalance) / total,
        by_rank=by_rank,
        chains=(len(chains), sum(chains)),
        passed=sum(note.kind == "pass" for note in notes),
        fetched=sum(note.about for note in notes if note.kind == "fetch"),
        missed=dict(Counter((n.path, n.reason) for n in notes if n.kind == "miss")),
    )


def _works_of(tasks: Sequence[Task]) -> list[_Stretch]:
    return sorted(
        _Stretch(
            span.start_ns,
            span.end_ns,
            (task.microbatch, span.phase),
            task.path != STEP_FUNCTION,
        )
        for task in tasks
        for span in task.spans
        if not span.waiting
    )


def _relayed(
    asked: set[int],
    works: Sequence[_Stretch],
    of_microbatch: dict[tuple[int, int], list[_Stretch]],
) -> int:
    """Idle time of a rank, in ns, while a value was on its way through the caller.

    Args:
        asked: when requests of callers began here.
    """
    relayed = 0
    for before, stretch in zip(works, works[1:], strict=False):
        if stretch.start not in asked or stretch.start <= before.end:
            continue
        earlier = [one for one in of_microbatch[stretch.of] if one.start < stretch.start]
        ends = [one.end for one in earlier if one.of_request and one.end <= stretch.start]
        if not ends:
            continue
        since = max(before.end, *ends)
        worked = sum(
            max(0, min(one.end, stretch.start) - max(one.start, since)) for one in earlier
        )
        relayed += max(0, stretch.start - since - worked)
    return relayed
