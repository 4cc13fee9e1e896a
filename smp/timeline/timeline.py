"""Each rank's work in the last step: ``smp.save_trace``.

The core notes when a worker begins a task, waits inside it, goes on and ends it (a ring of the
last 65,536 events a step, ``csrc/server/timeline.h``).  The tasks of all ranks of the PP_GROUP
are brought together, and written in the trace event format of Chrome, or drawn, or summed up.

Source of the format: Chromium, "Trace Event Format" (catapult project documentation).
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from smp import _core
from smp.collectives.objects import allgather
from smp.modules import live_models
from smp.ranks import CommGroup, rank
from smp.state_mod import state
from smp.timeline import timeline_picture
from smp.timeline.summary import TraceSummary, summarize
from smp.timeline.tasks import Task, passes_of, read_events, working


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
    ranks = _of_all_ranks("smp.save_trace()")
    if rank() != 0:
        return
    text = timeline_picture.picture(ranks) if _is_svg(path) else as_json(ranks)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def trace_summary() -> TraceSummary:
    """Where the last step's time went, on every rank of the PP_GROUP.

    Collective over all ranks.  Without pipeline parallelism there are no requests, and all
    shares are of nothing.

    Returns:
        the shares of work, bubble, relay, imbalance and overhead; ``print`` shows them.

    Raises:
        RuntimeError: before ``smp.init``.
    """
    return summarize(_of_all_ranks("smp.trace_summary()"))


def _of_all_ranks(caller: str) -> list[list[Task]]:
    """The tasks of the last step, by pp_rank.  Collective over the PP_GROUP."""
    boot = state.job(caller).boot
    # Clocks of different hosts are compared by reading them when a collective ends.
    hosts = allgather(boot.host, CommGroup.PP_GROUP)
    now = time.monotonic_ns()
    models = live_models.partitioned()
    paths = [entry.path for model in models for entry in live_models.parts_of(model).entries]
    everyone = allgather((now, list(_core.timeline()), paths), CommGroup.PP_GROUP)
    ranks = []
    for host, (clock, events, names) in zip(hosts, everyone, strict=True):
        ahead = 0 if host == hosts[0] else clock - everyone[0][0]
        ranks.append(read_events(events, names, ahead))
    return ranks


def _is_svg(path: str | os.PathLike) -> bool:
    return os.fspath(path).lower().endswith(".svg")


def as_json(ranks: Sequence[list[Task]]) -> str:
    """The trace events of all ranks, tasks given by pp_rank, as text."""
    first = min((task.start_ns for tasks in ranks for task in tasks), default=0)
    events = [
        event
        for pp_rank, tasks in enumerate(ranks)
        for event in (*_names(pp_rank, tasks), *_slices(pp_rank, tasks, first))
    ]
    events += _passes(ranks, first)
    summary = str(summarize(ranks))
    trace: dict[str, Any] = {"displayTimeUnit": "ms"}
    trace |= {"otherData": {"summary": summary}, "traceEvents": events}
    return json.dumps(trace, separators=(",", ":"))


def _passes(ranks: Sequence[list[Task]], first: int) -> Iterator[dict[str, Any]]:
    """Arrows from an owner of a chain to the next one's request."""
    for number, one in enumerate(passes_of(ranks)):
        arrow = {"name": "chain", "cat": "chain", "id": number, "tid": 0}
        at, to = ((ns - first) / 1000 for ns in (one.note.at_ns, one.received.start_ns))
        yield arrow | {"ph": "s", "pid": one.pp_rank, "ts": at}
        yield arrow | {"ph": "f", "bp": "e", "pid": one.note.about, "ts": to}


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
        for note in task.notes:
            more = {"about": note.about} | ({"reason": note.reason} if note.reason else {})
            event = mark("B", row, note.at_ns, f"{note.kind}: {note.path}", **more)
            yield event | {"ph": "i", "s": "t"}
        yield mark("E", row, task.end_ns, name)
