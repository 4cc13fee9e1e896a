"""Spec: smp/timeline/timeline.py; the trace event format of Chrome."""

import json
import re
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict

import pytest
import torch
from torch import nn

import smp
from smp import _core
from smp.timeline.summary import summarize
from smp.timeline.tasks import read_events, working
from smp.timeline.timeline import as_json
from smp.timeline.timeline_picture import merged, picture, shade
from tests.models.partition import distributed
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
        if event["ph"] in "sfi":  # a chain's pass or note
            continue
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

    for _ in range(2):  # of the last one
        train(torch.ones(6, 4))
        tasks = sum(kind == BEGIN for _, _, kind, *_ in _core.timeline())
        assert tasks == (3 if smp.pp_rank() == 0 else 6)
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


@on_ranks(2)
def test_torchs_profiler_sees_a_step_with_its_stacks():
    """It looks for the caller of each module."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(Net())

    @smp.step
    def step(model, x):
        model.backward(model(x))

    step(model, torch.ones(4, 4))
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(with_stack=True, experimental_config=everywhere) as profile:
        step(model, torch.ones(4, 4))
    assert "aten::linear" in {event.key for event in profile.key_averages()}


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
    (100, 0, BEGIN, 0, 5, -1, 0),
    (110, 0, WAIT, 0, 5, -1, 0),
    (112, 1, BEGIN, 0, 5, 0, 0),
    (118, 1, END, 0, 5, 0, 0),
    (130, 0, GO, 0, 5, -1, 0),
    (140, 0, WAIT, 0, 5, -1, 0),
    (150, 0, GO, 0, 5, -1, 0),
    (170, 0, END, 1, 5, -1, 0),
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


def test_the_picture_shows_a_chains_passes_fetches_and_calls_in_vain():
    begin, end = (80, 1, BEGIN, 0, 5, 0, 0), (180, 1, END, 0, 5, 0, 0)
    notes = [(90, 1, 5, 0, 5, 1, 1), (95, 1, 6, 0, 5, 0, 2), (96, 1, 7, 0, 5, 1, 0)]
    owner = read_events([begin, *notes, end], ["near", "far"])
    later = [(at, worker, kind, 0, 5, 1, 0) for at, worker, kind, *_ in EVENTS[2:4]]
    drawn = ElementTree.fromstring(picture([owner, read_events(later, ["near", "far"])]))

    shown = {path.get("class"): "".join(path.itertext()) for path in drawn.iter(f"{SVG}path")}
    assert shown == {
        "pass": "microbatch 5, forward: passed to 'far'",
        "fetch": "microbatch 5, outputs of 'near' fetched: 2",
        "miss": f"microbatch 5, call of 'far' in vain: {_core.misses[0]}",
    }


def test_bars_nearly_adjacent_and_alike_are_one():
    tasks = read_events(EVENTS, ["far"])

    assert [(b.start_ns, b.end_ns, b.phase) for b in merged(tasks, gap_ns=12)] == [
        (100, 140, 0),
        (150, 170, 1),
    ]
    assert len(merged(tasks, gap_ns=1)) == 4


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", text)]


def test_slices_have_their_module_microbatch_and_phase():
    trace = json.loads(as_json([read_events(EVENTS, [""]), []]))
    slices = slices_of(trace)

    step = {"module": "step function", "microbatch": 5}
    root = {"module": "(root)", "microbatch": 5, "phase": "forward"}
    assert slices[0, 0] == [
        (0.0, 0.01, "step function forward 5", {**step, "phase": "forward"}),
        (0.012, 0.018, "(root) forward 5", root),
        (0.03, 0.04, "step function forward 5", {**step, "phase": "forward"}),
        (0.05, 0.07, "step function backward 5", {**step, "phase": "backward"}),
    ]
    waits = [(begin, end) for begin, end, name, _ in slices[0, 1] if name == "waiting"]
    assert waits == [(0.01, 0.03), (0.04, 0.05)]
    assert slices[0, 1][-1][:3] == (0.0, 0.07, "step function 5")
    assert [s[2] for s in slices[0, 2]] == ["forward", "(root) 5"]
    named = {
        (e["pid"], e["tid"], e["name"]): e["args"]
        for e in trace["traceEvents"]
        if e["ph"] == "M"
    }
    assert named == {
        (0, 0, "process_name"): {"name": "pp_rank 0"},
        (0, 0, "process_sort_index"): {"sort_index": 0},
        (0, 0, "thread_name"): {"name": "working"},
        (0, 1, "thread_name"): {"name": "worker 0"},
        (0, 2, "thread_name"): {"name": "worker 1"},
        (1, 0, "process_name"): {"name": "pp_rank 1"},
        (1, 0, "process_sort_index"): {"sort_index": 1},
        (1, 0, "thread_name"): {"name": "working"},
    }
    assert trace["displayTimeUnit"] == "ms"


def test_times_count_from_the_first_event_of_any_rank():
    later = read_events(EVENTS, ["far"])
    first = read_events(EVENTS, ["far"], ahead_ns=50)
    for ranks in ([first, later], [later, first]):
        begins = {
            e["pid"]: e["ts"]
            for e in reversed(json.loads(as_json(ranks))["traceEvents"])
            if e["ph"] == "B"
        }
        assert begins == {ranks.index(first): 0.0, ranks.index(later): 0.05}


@on_ranks(2)
@pytest.mark.parametrize("hosts", [1, 2])
def test_clocks_of_other_hosts_are_set_by_the_first_ranks(hosts, tmp_path, monkeypatch):
    """Rank 1's clock is an hour ahead; on one host there is one clock."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
    model = smp.DistributedModel(Net())
    smp.step(lambda x: model.backward(model(x)))(torch.ones(2, 4))
    boot = smp.state.job("a test").boot
    monkeypatch.setattr(boot, "host", boot.host if hosts == 1 else smp.rank())
    hour = 3600 * 10**9 * smp.rank()
    events = [(at + hour, *rest) for at, *rest in _core.timeline()]
    monkeypatch.setattr(_core, "timeline", lambda: events)
    now = time.monotonic_ns
    monkeypatch.setattr(time, "monotonic_ns", lambda: now() + hour)

    path = tmp_path / "trace.json"
    smp.save_trace(str(path) if hosts == 1 else path)
    smp.barrier()

    slices = slices_of(json.loads(path.read_text()))
    last = max(end for row in slices.values() for _, end, *_ in row)
    assert (last < 1800e6) == (hosts == 2)


@on_ranks(1)
@pytest.mark.parametrize("name", ["step.svg", "STEP.SVG", "step.svg.json"])
def test_the_files_name_says_whether_it_is_a_picture(name, tmp_path):
    """An older file of that name is replaced."""
    smp.init({})
    path = tmp_path / name
    path.write_text("x" * 100_000)

    smp.save_trace(path)

    text = path.read_text()
    assert text.startswith("<svg" if name.lower().endswith(".svg") else "{")
    assert "xxx" not in text


@pytest.mark.parametrize("length_ns", [900, 70_000, 1_000_000, 11_900_000, 730_000_000])
def test_the_picture_is_to_scale(length_ns):
    """Two microbatches, each a third of the step, on the first of two ranks; then a gap."""
    third = length_ns // 3
    events = [
        (0, 0, BEGIN, 0, 0, -1, 0),
        (third, 0, END, 0, 0, -1, 0),
        (third, 0, BEGIN, 0, 1, -1, 0),
        (2 * third, 0, END, 1, 1, -1, 0),
    ]
    last = [(0, 0, BEGIN, 0, 0, -1, 0), (3 * third, 0, END, 0, 0, -1, 0)]
    text = picture([read_events(events, []), read_events(last, [])])
    drawn = ElementTree.fromstring(text)

    rects = [r for r in drawn.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    told = [numbers(r.find(f"{SVG}title").text) for r in rects]
    ms = third / 1e6
    assert [t[0] for t in told] == [0, 1, 0]
    assert [t[1] for t in told] == pytest.approx([ms, ms, 3 * ms], abs=6e-4)
    idle = [r for r in drawn.iter(f"{SVG}rect") if r.get("class") == "idle"][1:]
    left, width = float(idle[0].get("x")), float(idle[0].get("width"))
    at = [(float(r.get("x")), float(r.get("width")), r.get("fill")) for r in rects]
    assert [x for x, *_ in at] == pytest.approx([left, left + width / 3, left], abs=0.02)
    assert [w for _, w, _ in at] == pytest.approx([width / 3, width / 3, width], abs=0.02)
    assert [fill for *_, fill in at] == [shade(0, 0), shade(1, 1), shade(0, 0)]
    assert [r.get("y") for r in rects] == [idle[0].get("y")] * 2 + [idle[1].get("y")]
    words = [t.text for t in drawn.iter(f"{SVG}text")]
    assert {"67% busy", "100% busy", "rank 0", "rank 1"} <= set(words)
    told = f"2 microbatches, {3 * third / 1e6:.1f} ms: work 83.3 %, bubble 16.7 %"
    assert any(word.startswith(told) for word in words)
    assert drawn.find(f"{SVG}title").text == "One step on 2 ranks"
    inside = [t for t in drawn.iter(f"{SVG}text") if t.get("class") == ""]
    assert [(t.text, t.get("fill")) for t in inside] == [
        ("0", "#16181d"),
        ("1", "#ffffff"),
        ("0", "#16181d"),
    ]

    lines = [float(tick.get("x1")) for tick in drawn.iter(f"{SVG}line")]
    bottom = max(float(t.get("y")) for t in drawn.iter(f"{SVG}text"))
    axis = [t for t in drawn.iter(f"{SVG}text") if float(t.get("y")) == bottom]
    times = [float(t.text) for t in axis[:-1]]
    assert axis[-1].text == "ms" and 2 <= len(times) <= 13
    scale = width / (3 * third / 1e6)
    assert lines == pytest.approx([left + time * scale for time in times], abs=0.1)
    assert 3 * third / 1e6 - times[-1] <= times[1] - times[0] + 1e-9


def picture_of_microbatches(count):
    """A task of each; the texts in ink beside it."""
    tasks = [
        task
        for number in range(count)
        for task in read_events(
            [(number, 0, BEGIN, 0, number, -1, 0), (number + 1, 0, END, 0, number, -1, 0)], []
        )
    ]
    drawn = ElementTree.fromstring(picture([tasks]))
    ink = [t for t in drawn.iter(f"{SVG}text") if t.get("class") == "ink"]
    return drawn, [t for t in ink if t.text.isdigit()]


def test_the_legend_shows_the_first_twelve_microbatches():
    drawn, shown = picture_of_microbatches(15)
    _, few = picture_of_microbatches(3)

    assert [t.text for t in shown] == [str(i) for i in range(12)]
    assert shown[-1].get("x") == few[-1].get("x")  # at the right edge
    assert drawn.find(f"{SVG}title").text == "One step on 1 rank"
    assert len({shade(i, phase) for i in range(8) for phase in (0, 1)}) == 16


@on_ranks(2)
@pytest.mark.stress
def test_of_a_long_step_the_last_events_are_kept():
    """A call is two of them on each rank."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
    model = smp.DistributedModel(Net())
    smp.step(lambda x: model(x))(torch.ones(1, 4))

    @smp.step
    def calls(x):
        with torch.no_grad():
            for _ in range(40_000):
                model.module.far(x)

    calls(torch.ones(1, 4))
    times = [at for at, *_ in _core.timeline()]
    assert len(times) == 65_536 and times == sorted(times)


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.wide = False

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if self.wide and block is self.blocks[1]:
                x = x * 2
        return x.sum()


@on_ranks(3)
def test_a_chain_is_in_the_trace_the_summary_and_the_report(tmp_path):
    smp.init({"pipeline_parallel_degree": 3, "microbatches": 2})
    net = Loop()
    owners = {f"blocks.{i}": 1 + i // 2 for i in range(len(net.blocks))}
    model = distributed(net, {"": 0, **owners})

    @smp.step
    def train(x):
        model.backward(model(x))

    for _ in range(3):
        train(torch.ones(4, 4))
    found = smp.trace_summary()
    shares = (found.work, found.bubble, found.relay, found.imbalance, found.overhead)
    assert sum(shares) == pytest.approx(100) and min(shares) >= 0
    assert [pytest.approx(100)] * 3 == [sum(its) for its in found.by_rank]
    assert (found.chains, found.passed, found.fetched) == ((2, 8), 4, 0)
    smp.save_trace(tmp_path / "trace.json")
    smp.barrier()
    trace = json.loads((tmp_path / "trace.json").read_text())
    slices_of(trace)
    assert trace["otherData"]["summary"] == str(found)
    arrows = [(e["ph"], e["pid"]) for e in trace["traceEvents"] if e.get("cat") == "chain"]
    assert (
        sorted(arrows)
        == [("f", 1), ("f", 1), ("f", 2), ("f", 2), ("s", 1), ("s", 1)] + [("s", 2)] * 2
    )
    report = model.partition_report()
    told = "One request for 4 calls: blocks.0 to blocks.3, rank 1 to 2"
    assert (told in str(report)) == (smp.pp_rank() == 0)

    model.module.wide = True
    train(torch.ones(4, 4))
    found = smp.trace_summary()
    assert found.fetched == 2
    assert set(found.missed) == {("blocks.2", "its argument was used by an operator")} or (
        set(found.missed) == {("blocks.2", "called with other tensors")}
    )
    assert "in vain 2 times: blocks.2" in str(found)


def test_the_shares_of_a_step():
    # Rank 1 works on far from 112 to 118; the second request comes after 5 ns by the caller.
    ranks = [
        read_events(EVENTS, ["far"]),
        read_events(
            [
                (115, 0, BEGIN, 0, 5, 0, 0),
                (120, 0, END, 0, 5, 0, 0),
                (130, 0, BEGIN, 0, 5, 0, 0),
                (135, 0, END, 0, 5, 0, 0),
            ],
            ["far"],
        ),
    ]
    found = summarize(ranks)
    (work, bubble, relay, other), (work1, bubble1, relay1, other1) = found.by_rank
    assert found.milliseconds == pytest.approx(70e-6)
    assert [round(x * 0.7) for x in (work, bubble, relay, other)] == [46, 0, 0, 24]
    assert [round(x * 0.7) for x in (work1, bubble1, relay1, other1)] == [10, 50, 10, 0]
    assert found.imbalance == pytest.approx(100 * 24 / 140) and found.overhead == 0
