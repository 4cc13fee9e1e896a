"""Each rank's work in the last step: ``smp.save_trace``.

The core notes when a worker begins a task, waits inside it, goes on and ends it (a ring of the
last 65,536 events a step, ``csrc/server/timeline.h``).  Here these events become tasks and
spans.  Those of all ranks of the PP_GROUP are brought together, and written in the trace event
format of Chrome, or drawn.

Source of the format: Chromium, "Trace Event Format" (catapult project documentation).
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from smp import _core
from smp.collectives.objects import allgather
from smp.modules import live_models
from smp.ranks import CommGroup, rank
from smp.state_mod import state
from smp.timeline import timeline_picture

STEP_FUNCTION = "step function"
_BEGIN, _WAIT, _GO, _END = range(4)


@dataclass
class Span:
    """A stretch of a task, of work or of waiting."""

    start_ns: int
    end_ns: int
    phase: int  # 0 forward, 1 backward
    waiting: bool


@dataclass
class Task:
    """One request, or the step function on one microbatch, from begin to end."""

    worker: int
    microbatch: int
    path: str
    spans: list[Span] = field(default_factory=list)

    @property
    def start_ns(self) -> int:
        return self.spans[0].start_ns

    @property
    def end_ns(self) -> int:
        return self.spans[-1].end_ns


def save_trace(path: str | os.PathLike) -> None:
    """Write the last step, of every rank of the PP_GROUP, to a file.

    A path with the suffix ``.svg`` becomes a picture, any other the JSON of
    https://ui.perfetto.dev and chrome://tracing.  The JSON has a process for each rank.  In it
    are a row "working", with idle time for gaps, and a row for each worker with its requests
    and, inside them, its waiting.  Times count from the step's first event, in microseconds.

    Collective over all ranks; rank 0 writes.  Without pipeline parallelism there are no
    requests, and the trace is empty.

    Args:
        path: of the file, replaced if it exists.

    Raises:
        RuntimeError: before ``smp.init``.
        OSError: rank 0 cannot write the file.
    """
    boot = state.job("smp.save_trace()").boot
    # Clocks of different hosts are compared by reading them when a collective ends.
    hosts = allgather(boot.host, CommGroup.PP_GROUP)
    now = time.monotonic_ns()
    models = live_models.partitioned()
    paths = [entry.path for model in models for entry in live_models.parts_of(model).entries]
    everyone = allgather((now, list(_core.timeline()), paths), CommGroup.PP_GROUP)
    if rank() != 0:
        return
    ranks = []
    for host, (clock, events, names) in zip(hosts, everyone, strict=True):
        ahead = 0 if host == hosts[0] else clock - everyone[0][0]
        ranks.append(read_events(events, names, ahead))
    text = timeline_picture.picture(ranks) if _is_svg(path) else as_json(ranks)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _is_svg(path: str | os.PathLike) -> bool:
    return os.fspath(path).lower().endswith(".svg")


def read_events(
    events: Iterable[tuple[int, int, int, int, int, int]],
    paths: Sequence[str],
    ahead_ns: int = 0,
) -> list[Task]:
    """The tasks of one rank, by their begin.

    Args:
        events: (time in ns, worker, kind, phase, microbatch, entry), oldest first; kind is
            0 begin, 1 wait, 2 go on, 3 end; entry -1 is the step function.
        paths: module path by entry.
        ahead_ns: how far this rank's clock is ahead.

    A task with its begin lost from the ring starts with its first event left; a task without an
    end (the step failed) is left out.
    """
    done: list[Task] = []
    under_way: dict[int, Task] = {}
    since: dict[int, int] = {}
    for at, worker, kind, phase, microbatch, entry in events:
        at -= ahead_ns
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


def as_json(ranks: Sequence[list[Task]]) -> str:
    """The trace events of all ranks, tasks given by pp_rank, as text."""
    first = min((task.start_ns for tasks in ranks for task in tasks), default=0)
    events = [
        event
        for pp_rank, tasks in enumerate(ranks)
        for event in (*_names(pp_rank, tasks), *_slices(pp_rank, tasks, first))
    ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def _names(pp_rank: int, tasks: Sequence[Task]) -> Iterator[dict[str, Any]]:
    def name(kind: str, tid: int, **what: Any) -> dict[str, Any]:
        return {"ph": "M", "pid": pp_rank, "tid": tid, "ts": 0, "name": kind, "args": what}

    yield name("process_name", 0, name=f"pp_rank {pp_rank}")
    yield name("process_sort_index", 0, sort_index=pp_rank)
    yield name("thread_name", 0, name="working")
    for worker in sorted({task.worker for task in tasks}):
        yield name("thread_name", worker + 1, name=f"worker {worker}")


def _slices(pp_rank: int, tasks: Sequence[Task], first: int) -> Iterator[dict[str, Any]]:
    """Begin and end of every slice, ascending in time within each row."""

    def mark(kind: str, tid: int, at: int, name: str, **what: Any) -> dict[str, Any]:
        event = {"ph": kind, "pid": pp_rank, "tid": tid, "ts": (at - first) / 1000}
        return event | {"name": name, "args": what} if kind == "B" else event | {"name": name}

    def what(task: Task, phase: int) -> dict[str, Any]:
        return {
            "module": task.path,
            "microbatch": task.microbatch,
            "phase": _core.phases[phase],
        }

    for span, task in working(tasks):
        name = f"{task.path} {_core.phases[span.phase]} {task.microbatch}"
        yield mark("B", 0, span.start_ns, name, **what(task, span.phase))
        yield mark("E", 0, span.end_ns, name)
    for task in tasks:
        row = task.worker + 1
        name = f"{task.path} {task.microbatch}"
        yield mark("B", row, task.start_ns, name, **what(task, task.spans[0].phase))
        for span in task.spans:
            inner = "waiting" if span.waiting else _core.phases[span.phase]
            yield mark("B", row, span.start_ns, inner, **what(task, span.phase))
            yield mark("E", row, span.end_ns, inner)
        yield mark("E", row, task.end_ns, name)
