"""The tasks of a rank in a step, from the core's events (``csrc/server/timeline.h``)."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from smp import _core

STEP_FUNCTION = "step function"
_BEGIN, _WAIT, _GO, _END = range(4)
_NOTES = {4: "chain", 5: "pass", 6: "fetch", 7: "miss"}


@dataclass
class Span:
    """A stretch of a task, of work or of waiting."""

    start_ns: int
    end_ns: int
    phase: int  # 0 forward, 1 backward
    waiting: bool


@dataclass
class Note:
    """An event within a task, about a chain of calls (`csrc/python/modules/chain.h`).

    Attributes:
        kind: "chain", "pass" (to the next owner, forward or backward), "fetch" or "miss".
        path: of the called module.
        about: the chain's calls; the next owner's pp_rank; the number of outputs; 0.
        reason: of a miss.
    """

    at_ns: int
    kind: str
    path: str
    phase: int
    about: int
    reason: str = ""


@dataclass
class Task:
    """One request, or the step function on one microbatch, from begin to end."""

    worker: int
    microbatch: int
    path: str
    spans: list[Span] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    @property
    def start_ns(self) -> int:
        return self.spans[0].start_ns

    @property
    def end_ns(self) -> int:
        return self.spans[-1].end_ns


def read_events(
    events: Iterable[tuple[int, int, int, int, int, int, int]],
    paths: Sequence[str],
    ahead_ns: int = 0,
) -> list[Task]:
    """The tasks of one rank, by their begin.

    Args:
        events: (time in ns, worker, kind, phase, microbatch, entry, about), oldest first; kind
            is 0 begin, 1 wait, 2 go on, 3 end, more: a note; entry -1 is the step function.
        paths: module path by entry.
        ahead_ns: how far this rank's clock is ahead.

    A task with its begin lost from the ring starts with its first event left; a task without an
    end (the step failed) is left out.
    """
    done: list[Task] = []
    under_way: dict[int, Task] = {}
    since: dict[int, int] = {}
    for at, worker, kind, phase, microbatch, entry, about in events:
        at -= ahead_ns
        if kind in _NOTES:
            if worker in under_way:
                note = Note(at, _NOTES[kind], paths[entry] or "(root)", phase, about)
                if note.kind == "miss":
                    note.about, note.reason = 0, _core.misses[about]
                under_way[worker].notes.append(note)
            continue
        if kind == _BEGIN or worker not in under_way:
            path = STEP_FUNCTION if entry < 0 else paths[entry] or "(root)"
            under_way[worker] = Task(worker, microbatch, path)
            since[worker] = at
            if kind == _BEGIN:
                continue
        # The phase of a span is its last event's: the step function changes from forward to
        # backward while it waits for its turn.
        under_way[worker].spans.append(Span(since[worker], at, phase, kind == _GO))
        since[worker] = at
        if kind == _END:
            done.append(under_way.pop(worker))
    return sorted(done, key=lambda task: task.start_ns)


def working(tasks: Iterable[Task]) -> list[tuple[Span, Task]]:
    """A rank's work, one stretch after the other; the rest of the time it idled."""
    spans = [(span, task) for task in tasks for span in task.spans if not span.waiting]
    return sorted(spans, key=lambda pair: pair[0].start_ns)


class Pass(NamedTuple):
    """A chain on its way from owner to owner, forward or backward."""

    pp_rank: int
    note: Note
    received: Task


def passes_of(ranks: Sequence[list[Task]]) -> list[Pass]:
    """The passes of a step, with the next owner's task of each.

    Args:
        ranks: the tasks of each pp_rank.
    """
    received: dict[tuple[int, str, int], list[Task]] = {}
    for pp_rank, tasks in enumerate(ranks):
        for task in sorted(tasks, key=_start):
            received.setdefault((pp_rank, task.path, task.microbatch), []).append(task)
    passes = []
    for pp_rank, tasks in enumerate(ranks):
        for task in tasks:
            for note in task.notes:
                if note.kind != "pass":
                    continue
                ones = received.get((note.about, note.path, task.microbatch), [])
                first = bisect_left(ones, note.at_ns, key=_start)
                if first < len(ones):
                    passes.append(Pass(pp_rank, note, ones[first]))
    return passes


def _start(task: Task) -> int:
    return task.start_ns
