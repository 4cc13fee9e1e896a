"""Spec: smp/timeline/timeline.py; the trace event format of Chrome."""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict

import pytest
import torch
from torch import nn

import smp
from smp.timeline.timeline import as_json, read_events, working
from smp.timeline.timeline_picture import merged, picture, shade
from tests.ranks import on_ranks

BEGIN, WAIT, GO, END = range(4)
SVG = "{http://www.w3.org/2000/svg}"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.near = nn.Linear(4, 4)
        self.far = nn.Linear(4, 4)
        smp.set_partition(self.near, 0)
        smp.set_partition(self.far, 1)

    def forward(self, x):
        return self.far(self.near(x)).sum()


def slices_of(trace):
    """Slices by (pid, tid), each (begin, end, name, args), after checking the format."""
    rows, last, slices, named = defaultdict(list), {}, defaultdict(list), {}
    for event in trace["traceEvents"]:
        assert {"ph", "pid", "tid", "ts", "name"} <= event.keys()
        row = event["pid"], event["tid"]
        if event["ph"] == "M":
            named.setdefault(row, {})[event["name"]] = event["args"]
            continue
        assert event["ts"] >= last.get(row, 0.0), "times descend"
        last[row] = event["ts"]
        if event["ph"] == "B":
            rows[row].append(event)
        else:
            assert event["ph"] == "E"
            begin = rows[row].pop()  # an E without a B raises
            assert begin["name"] == event["name"]
            slices[row].append((begin["ts"], event["ts"], begin["name"], begin["args"]))
    assert not any(rows.values()), "a B without an E"
    for pid, tid in slices:
        assert named[pid, tid]["thread_name"]["name"]
        assert named[pid, 0]["process_name"]["name"] == f"pp_rank {pid}"
    return slices


@on_ranks(2)
def test_a_step_becomes_a_trace_with_every_request(tmp_path):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 3})
    model = smp.DistributedModel(Net())

    @smp.step
    def train(x):
        model.backward(model(x))

    train(torch.ones(6, 4))
    smp.save_trace(tmp_path / "trace.json")
    smp.save_trace(tmp_path / "step.svg")
    smp.barrier()
    slices = slices_of(json.loads((tmp_path / "trace.json").read_text()))

    assert {pid for pid, _ in slices} == {0, 1}
    requests = {
        (args["module"], args["microbatch"], args["phase"]) for *_, args in slices[1, 0]
    }
    assert requests == {("far", i, p) for i in range(3) for p in ("forward", "backward")}
    root = {(args["microbatch"], args["phase"]) for *_, args in slices[0, 0]}
    assert root == {(i, p) for i in range(3) for p in ("forward", "backward")}
    assert all(args["module"] == "step function" for *_, args in slices[0, 0])
    waits = [s for row in slices for s in slices[row] if s[2] == "waiting"]
    assert {args["microbatch"] for *_, args in waits} == {0, 1, 2}
    # One baton a rank: what it works on never overlaps.
    for pid in (0, 1):
        work = sorted(slices[pid, 0])
        assert all(a[1] <= b[0] for a, b in zip(work, work[1:], strict=False))
    ElementTree.fromstring((tmp_path / "step.svg").read_text())


@on_ranks(1)
def test_without_a_pipeline_the_trace_is_empty_and_whole(tmp_path):
    smp.init({})
    smp.save_trace(tmp_path / "trace.json")
    smp.save_trace(tmp_path / "step.svg")

    trace = json.loads((tmp_path / "trace.json").read_text())
    assert [e["ph"] for e in trace["traceEvents"]] == ["M", "M", "M"]
    assert not slices_of(trace)
    ElementTree.fromstring((tmp_path / "step.svg").read_text())


def test_save_trace_needs_init(tmp_path):
    with pytest.raises(RuntimeError, match=r"smp.save_trace\(\) needs smp.init\(\)"):
        smp.save_trace(tmp_path / "trace.json")


# Worker 0 runs the step function, which waits for a response and then for its turn to
# go backward; the core notes that it goes on before it notes the phase.
EVENTS = [
    (100, 0, BEGIN, 0, 5, -1),
    (110, 0, WAIT, 0, 5, -1),
    (112, 1, BEGIN, 0, 5, 0),
    (118, 1, END, 0, 5, 0),
    (130, 0, GO, 0, 5, -1),
    (140, 0, WAIT, 0, 5, -1),
    (150, 0, GO, 0, 5, -1),
    (170, 0, END, 1, 5, -1),
]


def test_spans_have_the_phase_in_which_they_end():
    root, request = read_events(EVENTS, ["far"], ahead_ns=100)

    assert (root.path, request.path) == ("step function", "far")
    assert [(s.start_ns, s.end_ns, s.phase, s.waiting) for s in root.spans] == [
        (0, 10, 0, False),
        (10, 30, 0, True),
        (30, 40, 0, False),
        (40, 50, 0, True),
        (50, 70, 1, False),
    ]
    assert [s.start_ns for s, _ in working([root, request])] == [0, 12, 30, 50]


def test_a_ring_that_lost_its_oldest_events_still_makes_a_trace():
    for lost in range(len(EVENTS)):
        slices_of(json.loads(as_json([read_events(EVENTS[lost:], ["far"])])))


def test_a_task_that_never_ended_is_left_out():
    assert [task.path for task in read_events(EVENTS[:-1], ["far"])] == ["far"]


def test_the_picture_has_a_row_for_each_rank_and_both_shades():
    tasks = read_events(EVENTS, ["far"])
    drawn = ElementTree.fromstring(picture([tasks, []]))

    words = [text.text for text in drawn.iter(f"{SVG}text")]
    assert {"rank 0", "rank 1", "66% busy", "0% busy", "idle"} <= set(words)
    fills = {rect.get("fill") for rect in drawn.iter(f"{SVG}rect")}
    assert {shade(5, 0), shade(5, 1)} <= fills
    legend = [r for r in drawn.iter(f"{SVG}rect") if r.get("height") == "14" and r.get("fill")]
    below = sorted(legend, key=lambda rect: float(rect.get("y")))
    assert [rect.get("fill") for rect in below] == [shade(5, 0), shade(5, 1)]
    at = {text.text: float(text.get("y")) for text in drawn.iter(f"{SVG}text")}
    assert at["forward"] < at["backward"]
    assert not re.search(r"nan|inf", picture([[], []]))


def test_bars_nearly_adjacent_and_alike_are_one():
    tasks = read_events(EVENTS, ["far"])

    assert [(b.start_ns, b.end_ns, b.phase) for b in merged(tasks, gap_ns=12)] == [
        (100, 140, 0),
        (150, 170, 1),
    ]
    assert len(merged(tasks, gap_ns=1)) == 4
