"""Spec: smp/partitioning/report.py, planning.py; api.md 3 (smp.plan), 4 (partition_report)."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn

import smp
from smp import plan
from smp.modules.pins import set_partition
from smp.partitioning.partition import Partition
from smp.partitioning.picture import colour
from smp.partitioning.report import PartitionReport
from tests.models.modules import module_of
from tests.ranks import on_ranks

SVG = "{http://www.w3.org/2000/svg}"


@module_of(
    lambda width: {
        "up": nn.Linear(width, width),
        "act": nn.GELU(),
        "down": nn.Linear(width, width),
    }
)
def Block(self, x):
    return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    def __init__(self, layers=6, width=10):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, scale=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def report_of(model=None, **kwargs):
    kwargs.setdefault("pipeline_parallel_degree", 3)
    kwargs.setdefault("memory_weight", 1.0)
    model = model or Model()
    return plan(model, torch.zeros(1, 1, dtype=torch.long), **kwargs)


def without_numbers(text):
    """The lines of the tree, with costs taken out."""
    tree = text.split("\n\n")[1]
    return "\n".join(re.sub(r" +\d\.\d{4}", "", line) for line in tree.splitlines()[1:])


def test_the_text_is_the_tree_down_to_what_sits_on_one_rank():
    """Modules alike that follow one another on one rank are one line."""
    assert (
        without_numbers(str(report_of()))
        == """\
(root)     Model            1.4 K  0 (of 0-2)
├─ embed   Embedding          110  0
├─ layers  ModuleList       1.3 K  0 (of 0-2)
│  ├─ 0-1  2 x Block          440  0
│  ├─ 2-3  2 x Block          440  1
│  └─ 4-5  2 x Block          440  2
└─ head    Linear               0  0"""
    )


def test_the_whole_text_goes_to_the_leaves():
    text = without_numbers(report_of().text(everything=True))
    assert "│  ├─ 0-1      2 x Block" in text
    assert text.count("GELU") == 3 and text.count("├─ up ") == 3


def test_modules_that_differ_inside_are_not_joined():
    model = Model(4)
    model.layers[2].act = nn.ReLU()
    text = str(report_of(model, pipeline_parallel_degree=2))
    for label in ("0-1 ", "2 ", "3 "):
        assert f"─ {label}" in text


def test_a_module_whose_parts_are_elsewhere_shows_where():
    model = Model(3)
    set_partition(model.layers[0], 0)
    set_partition(model.layers[1].up, 4)
    set_partition(model.layers[1].down, 2)
    set_partition(model.layers[1], 2)
    text = str(report_of(model, pipeline_parallel_degree=5))
    assert re.search(r"├─ 1 +Block .*  2 \(of 2, 4\)", text)


def test_costs_and_ranks_are_those_of_the_partition():
    report = report_of()

    assert sum(report.costs) == pytest.approx(1) and len(report.costs) == 3
    assert [report.rank_of(f"layers.{i}") for i in range(6)] == [0, 0, 1, 1, 2, 2]
    for rank, cost in enumerate(report.costs):
        assert re.search(rf"^{rank} .* {cost:.4f}  █+$", str(report), re.MULTILINE)
    with pytest.raises(KeyError, match="no module 'layer.0'"):
        report.rank_of("layer.0")


def test_a_report_needs_no_model():
    report = report_of()
    arrived = PartitionReport(Partition.from_bytes(report.partition.to_bytes()))
    assert str(arrived) == str(report)


# ------------------------------------------------------------------------------- picture


def boxes(report, folder):
    """By module path: x, width and fill of its box, from the drawn file."""
    report.svg(folder / "p.svg")
    out = {}
    for group in ElementTree.parse(folder / "p.svg").getroot().iter(f"{SVG}g"):
        title, rect = group.find(f"{SVG}title").text, group.find(f"{SVG}rect")
        out[title.partition(":")[0]] = (
            float(rect.get("x")),
            float(rect.get("y")),
            float(rect.get("width")),
            rect.get("fill"),
            title,
        )
    return out


def test_the_picture_shows_cost_as_width_rank_as_colour_and_depth_as_row(tmp_path):
    report = report_of()
    drawn = boxes(report, tmp_path)

    costs = dict(zip(report.partition.paths, report.partition.own_costs, strict=True))
    whole = drawn["(root)"][2]
    for path in ("layers.0.up", "embed"):
        assert drawn[path][2] / whole == pytest.approx(costs[path], abs=1e-4)
    for i in range(6):
        path = f"layers.{i}"
        assert drawn[path][3] == colour(report.rank_of(path))
        assert drawn[path][1] > drawn["layers"][1] > drawn["(root)"][1]
    assert drawn["layers"][3] is None  # it spans ranks
    told = drawn["layers.5"][4]
    assert re.fullmatch(r"layers\.5: Block, rank 2, 220 parameters, cost 0\.\d{4}", told)


@on_ranks(1)
def test_with_one_rank_the_report_has_all_of_the_model_at_once():
    smp.init({"microbatches": 2})
    net = Block(8)
    model = smp.DistributedModel(net)
    for _ in range(2):
        report = model.partition_report()
        assert {report.rank_of(path) for path in report.partition.paths} == {0}
        assert report.costs == pytest.approx([1.0])
        smp.step(lambda model, x: model.backward(model(x).sum()))(model, torch.ones(4, 8))


def test_the_legend_says_cost_and_mean_and_the_fullest_rank_is_not_full():
    report = report_of()
    drawn = ElementTree.fromstring(report._repr_svg_())
    words = " ".join(text.text for text in drawn.iter(f"{SVG}text"))

    for cost in report.costs:
        assert f"cost {cost:.3f}" in words
    assert f"mean cost, {sum(report.costs) / len(report.costs):.3f}" in words
    bars = [r for r in drawn.iter(f"{SVG}rect") if r.get("rx") == "3"]
    tracks = [float(r.get("width")) for r in bars if r.get("class") == "track"]
    filled = [float(r.get("width")) for r in bars if r.get("class") != "track"]
    assert len(tracks) == len(filled) == len(report.costs)
    assert max(filled) == pytest.approx(tracks[0] / 1.25, abs=0.2)


def test_the_picture_goes_from_left_to_right_in_execution_order(tmp_path):
    class Backwards(Model):
        def __init__(self):
            super().__init__()
            self.never_runs = nn.Linear(10, 10)

        def forward(self, ids):
            x = self.embed(ids)
            for layer in reversed(self.layers):
                x = layer(x)
            return self.head(x)

    drawn = boxes(report_of(Backwards()), tmp_path)
    xs = [drawn[f"layers.{i}"][0] for i in range(6)]
    assert xs == sorted(xs, reverse=True)
    assert drawn["embed"][0] < min(xs) and max(xs) < drawn["never_runs"][0]


def test_a_module_too_thin_to_be_drawn_keeps_its_place(tmp_path):
    @module_of(lambda: {"scale": nn.Parameter(torch.ones(1))})
    def Thin(self, x):
        return x

    net = nn.Sequential(*(Thin() for _ in range(200)), nn.Linear(200, 200))
    report = plan(net, torch.ones(2, 200), pipeline_parallel_degree=2, memory_weight=1.0)
    drawn = boxes(report, tmp_path)

    assert set(drawn) == {"(root)", "200"}  # no other is a pixel wide; all together are
    left, _, width, _, _ = drawn["(root)"]
    x, _, own, _, _ = drawn["200"]
    assert x + own == pytest.approx(left + width, abs=0.1) and x > left + 2


def test_boxes_lie_within_their_parents_and_beside_one_another(tmp_path):
    drawn = boxes(report_of(Model(9), pipeline_parallel_degree=4), tmp_path)
    for path, (x, y, width, _, _) in drawn.items():
        parent = drawn[path.rpartition(".")[0] or "(root)"]
        assert parent[0] - 0.02 <= x and x + width <= parent[0] + parent[2] + 0.02
        for other, (x2, y2, width2, _, _) in drawn.items():
            assert other == path or y2 != y or x + width <= x2 + 0.02 or x2 + width2 <= x + 0.02


def test_the_picture_stands_alone_and_follows_the_colour_scheme(tmp_path):
    report_of().svg(tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text()
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"href|url\(|@import|<script", text)


def test_a_picture_takes_the_place_of_another_one(tmp_path):
    """... and is what a notebook shows."""
    path = tmp_path / "p.svg"
    report_of(Model(9)).svg(path)
    report_of().svg(path)
    assert path.read_text() == report_of()._repr_svg_()


def test_names_are_escaped(tmp_path):
    model = nn.Sequential()
    model.add_module("<&>", nn.Linear(100, 100))
    report = plan(model, torch.zeros(1, 100), pipeline_parallel_degree=1)
    assert "<&>" in boxes(report, tmp_path)


def test_neighbouring_ranks_have_colours_of_their_own():
    colours = [colour(rank) for rank in range(64)]
    assert len(set(colours)) == 64
    assert all(re.fullmatch(r"#[0-9A-F]{6}", c) for c in colours)


# ---------------------------------------------------------------------------------- plan


def test_a_plan_of_a_model_on_the_meta_device_is_that_of_the_real_one():
    with torch.device("meta"):
        meta = Model(8)
    ids = torch.zeros(4, 5, dtype=torch.long)

    a = plan(meta, ids, pipeline_parallel_degree=4)
    b = plan(Model(8), ids, pipeline_parallel_degree=4)
    assert str(a) == str(b) and a.partition.hash == b.partition.hash


def test_a_plan_runs_the_first_microbatch():
    seen = []

    class Spy(Model):
        def forward(self, ids, scale=None):
            seen.append((ids.shape[0], None if scale is None else scale["s"].shape[0]))
            return super().forward(ids)

    ids = torch.zeros(7, 2, dtype=torch.long)
    plan(Spy(), ids, pipeline_parallel_degree=2, microbatches=3, scale={"s": torch.ones(7)})
    assert seen == [(3, 3)]
    plan(Spy(), ids, pipeline_parallel_degree=2, microbatches=8)
    assert seen[1:] == [(1, None)]
    with pytest.raises(ValueError, match="microbatches must be at least 1"):
        plan(Spy(), ids, pipeline_parallel_degree=2, microbatches=0)


@pytest.mark.parametrize("memory_weight", [0, 0.25, 1, None])
def test_a_plan_weighs_memory_against_computation(memory_weight):
    """Costs by hand: bytes of parameters and outputs; the root is a fourth module."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 24), nn.ReLU())
    given = {} if memory_weight is None else {"memory_weight": memory_weight}

    report = plan(net, torch.zeros(8, 8), pipeline_parallel_degree=2, microbatches=2, **given)

    weight = 0.8 if memory_weight is None else memory_weight
    outputs = [0, 4 * 8, 4 * 24, 4 * 24]  # of four rows of the batch
    elements = [out + own for out, own in zip(outputs, [0, 72, 216, 0], strict=True)]
    want = [weight * n / sum(elements) + (1 - weight) / 4 for n in elements]
    assert report.partition.own_costs.tolist() == pytest.approx(want)
    assert report.costs == pytest.approx([sum(want[:2]), sum(want[2:])])
    assert report.partition.ranks.tolist() == [0, 0, 1, 1]
    assert f"memory_weight {weight:g}" in str(report)


@pytest.mark.parametrize("memory_weight", [0.0, 0.7])
@pytest.mark.parametrize("times", [False, True])
@on_ranks(2)
def test_the_first_step_decides_as_the_plan_says(memory_weight, times):
    """With the configuration's memory_weight; measured times are no plan's."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "memory_weight": memory_weight})
    torch.manual_seed(0)
    net, x = Block(8), torch.ones(4, 8)
    planned = plan(
        net, x, pipeline_parallel_degree=2, microbatches=2, memory_weight=memory_weight
    ).partition
    model = smp.DistributedModel(net, trace_execution_times=times)

    smp.step(lambda model, x: model.backward(model(x).sum()))(model, x)

    decided = model.partition_report().partition
    assert decided.memory_weight == memory_weight
    same = decided.own_costs == planned.own_costs
    assert same != times
    assert times or decided.hash == planned.hash


def test_a_plan_weighs_what_autograd_keeps():
    """Costs by hand: a linear keeps its input, tanh its output; both are shown."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 24), nn.Tanh())

    report = plan(
        net,
        torch.zeros(8, 8),
        pipeline_parallel_degree=2,
        microbatches=2,
        memory_weight=1,
        trace_memory_usage=True,
    )

    kept = [0, 4 * 8, 4 * 8, 4 * 24]  # elements, of four rows of the batch
    elements = [out + own for out, own in zip(kept, [0, 72, 216, 0], strict=True)]
    want = [n / sum(elements) for n in elements]
    assert report.partition.own_costs.tolist() == pytest.approx(want)
    assert report.partition.kept_bytes.tolist() == [4 * n for n in kept]
    again = Partition.from_bytes(report.partition.to_bytes())
    assert again.kept_bytes == report.partition.kept_bytes
    assert str(PartitionReport(again)) == str(report)
    header, root = str(report).splitlines()[3:5]
    assert header.split() == ["module", "class", "parameters", "kept", "cost", "rank"]
    assert "640 B" in root
    assert "kept" not in str(plan(net, torch.zeros(8, 8), pipeline_parallel_degree=2))


@on_ranks(2)
def test_the_first_step_measures_what_autograd_keeps():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    torch.manual_seed(0)
    net, x = Block(8), torch.ones(4, 8)
    planned = plan(net, x, pipeline_parallel_degree=2, microbatches=2, trace_memory_usage=True)
    model = smp.DistributedModel(net, trace_memory_usage=True)
    smp.step(lambda model, x: model.backward(model(x).sum()))(model, x)
    assert str(model.partition_report()) == str(planned)
    assert any(planned.partition.kept_bytes)


def test_a_plan_without_inputs_says_what_is_missing():
    with pytest.warns(UserWarning, match="the model is not run"):
        report = plan(Model(), pipeline_parallel_degree=2)
    assert set(report.partition.ranks) == {0, 1}


def test_a_plan_changes_nothing():
    model = Model()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    plan(model, torch.zeros(2, 2, dtype=torch.long), pipeline_parallel_degree=2)

    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
