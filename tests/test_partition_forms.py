"""Partitions, reports and plans of models of many forms, and what they say of pins."""

import re
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import smp
from smp import _core, plan
from smp.modules import creation
from smp.modules.pins import PartitionError, hand_on_pin, keep_together, pin_of, set_partition
from smp.partitioning.partition import Partition, _FlatModel, make_partition
from smp.partitioning.report import PartitionReport
from smp.partitioning.shared import Home
from smp.partitioning.tracing import trace
from smp.partitioning.tree import in_bytes, readable
from tests.models.modules import module_of
from tests.models.partition import distributed
from tests.ranks import on_ranks
from tests.test_partitioning import decide


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(8, 8) for _ in range(count)]


# ----------------------------------------------------------------------- who sits with whom


class Skips(nn.Sequential):
    """A Sequential by name: it adds what it was given."""

    def forward(self, x):
        return x + super().forward(x)


@pytest.mark.parametrize("made", [nn.Sequential, Skips])
def test_an_activation_stays_with_its_parent_unless_that_only_hands_on(made):
    net = made(*linears(1), nn.ReLU(), *linears(1), nn.ReLU())
    set_partition(net[0], 0)
    set_partition(net[2], 1)
    assert decide(net, torch.ones(2, 8)).rank_of["3"] == (made is nn.Sequential)


def test_children_follow_one_another_where_the_class_says_so_alone():
    """... and not in a Sequential with a forward of its own, whose children may branch."""
    for made in (nn.Sequential, Skips):
        net = nn.Sequential(made(*linears(3)))
        assert list(_FlatModel(net, None).chain)[:2] == [True, made is nn.Sequential]


@pytest.mark.parametrize("held", [nn.ParameterList, nn.ParameterDict])
def test_lists_and_dicts_of_parameters_sit_with_who_has_them(held):
    tensors = [torch.ones(40, 20) for _ in range(2)]
    net = nn.Module()
    net.layer = nn.Linear(40, 40)
    net.held = held(
        tensors if held is nn.ParameterList else dict(zip("ab", tensors, strict=True))
    )
    assert decide(net).rank_of == {"": 0, "layer": 1, "held": 0}


def test_what_is_kept_together_sits_on_one_rank():
    net = nn.Sequential(nn.Sequential(*linears(4)), *linears(1))
    assert decide(net, degree=3).ranks.tolist() == [0, 0, 0, 0, 1, 1, 2]
    keep_together(net[0])
    assert decide(net).ranks.tolist() == [0, 0, 0, 0, 0, 0, 1]


def test_lazy_layers_have_no_size_until_a_traced_run_has_made_them():
    net = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 8))
    assert list(decide(net, degree=1).parameters) == [0, 0, 0, 72]
    seen = trace(net, lambda: net(torch.ones(4, 6)))
    assert type(net[0]) is nn.Linear and net[0].weight.shape == (8, 6)
    assert seen.modules["0"].executions == 1
    assert net[0].in_features == 6 and not net[0]._forward_pre_hooks
    assert not net[1].running_mean.any() and net[1].num_batches_tracked == 0
    partition = make_partition(net, None, degree=1, memory_weight=1.0)
    assert list(partition.parameters) == [0, 56, 16, 72]


def test_parameters_over_the_same_memory_are_counted_once():
    net = nn.Sequential(*linears(2))
    net[1].weight = nn.Parameter(net[0].weight.detach())
    partition = decide(net, degree=1)
    assert list(partition.parameters) == [0, 72, 8]
    assert partition.own_costs.tolist() == pytest.approx([0, 72 / 80, 8 / 80])


def test_parameters_weigh_their_bytes():
    dtypes = [torch.int8, torch.float16, torch.float32, torch.float64]
    net = nn.Module()
    for dtype in dtypes:
        inner = nn.Module()
        inner.p = nn.Parameter(torch.zeros(10, dtype=dtype), requires_grad=False)
        net.add_module(str(dtype)[6:], inner)
    partition = decide(net, degree=1)
    assert partition.own_costs.tolist() == pytest.approx([0, 1 / 15, 2 / 15, 4 / 15, 8 / 15])
    assert partition.parameters.tolist() == [0, 10, 10, 10, 10]


def test_what_is_not_pinned_is_on_partition_0_without_another_default():
    with smp.partition(1):
        net = nn.Sequential(*linears(1))
    net.append(nn.Linear(8, 8))
    assert decide(nn.Sequential(net, *linears(1)), auto=False).ranks.tolist() == [0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"degree": 0}, "pipeline_parallel_degree must be at least 1, got 0"),
        (
            {"degree": 2, "memory_weight": -0.1},
            "memory_weight must be between 0 and 1, got -0.1",
        ),
        ({"degree": 2, "memory_weight": 1.1}, "memory_weight must be between 0 and 1, got 1.1"),
        (
            {"degree": 2, "auto": False, "default": 2},
            "default_partition must be below pipeline_parallel_degree 2, got 2",
        ),
    ],
)
def test_a_number_out_of_range_is_told_with_what_is_allowed(wrong, told):
    with pytest.raises(ValueError, match=f"smp: {told}"):
        make_partition(nn.Linear(1, 1), None, **{"memory_weight": 1.0, **wrong})


def core(**other):
    """Two modules, the second with the only parameter."""
    given = {
        "devices": 2,
        "memory_weight": 1.0,
        "default_device": -1,
        "nmodules": 2,
        "edge_parent": array("i", [0]),
        "edge_child": array("i", [1]),
        "parameter_bytes": array("q", [8]),
        "use_module": array("i", [1]),
        "use_parameter": array("i", [0]),
    }
    return _core.partition(**{**given, **other})


@pytest.mark.parametrize(
    ("wrong", "error", "told"),
    [
        ({"edge_parent": array("q", [0])}, TypeError, "edge_parent: .* got 1 of 8-byte 'q'"),
        ({"edge_parent": array("f", [0])}, TypeError, "edge_parent: .* got 1 of 4-byte 'f'"),
        ({"use_module": memoryview(bytes(4)).cast("i", (1, 1))}, TypeError, "got 2 of 4-byte"),
        (
            {"parameter_bytes": array("i", [8])},
            TypeError,
            "parameter_bytes: .* 8-byte elements",
        ),
        (
            {"seconds": array("q", [1, 1])},
            TypeError,
            "seconds: .* type 'd', got 1 of 8-byte 'q'",
        ),
        ({"use_module": None}, TypeError, "NoneType"),
        ({"edge_child": array("i", [1, 1])}, ValueError, "edge_parent has 1 .*, edge_child 2"),
        ({"use_module": array("i")}, ValueError, "use_module has 0 .*, use_parameter 1"),
        ({"first_run": array("q", [0])}, ValueError, "first_run: 1 elements for 2 modules"),
        ({"pin": array("i", [0, 0, 0])}, ValueError, "pin: 3 elements for 2 modules"),
        ({"pin": array("i", [0, 2])}, ValueError, "out of range"),
        ({"use_parameter": array("i", [1])}, ValueError, "out of range"),
        ({"devices": 0}, ValueError, "devices must be 1 to .* got 0 and default_device -1"),
    ],
)
def test_arrays_that_do_not_fit_one_another_are_refused(wrong, error, told):
    with pytest.raises(error, match=told):
        core(**wrong)


def test_what_is_not_known_of_modules_may_be_left_out():
    names = ("first_run", "activation_bytes", "seconds", "chain", "pin")
    assert core(**dict.fromkeys(names)) == core()
    assert core(edge_parent=memoryview(bytes(4)).cast("@i")) == core()  # a format of struct
    device, node, own_cost, cost = core(activation_bytes=array("q", [8, 0]))
    assert [array("i", one).tolist() for one in (device, node)] == [[0, 1], [0, 1]]
    assert [array("d", one).tolist() for one in (own_cost, cost)] == [[0.5, 0.5], [0.5, 0.5]]
    with pytest.raises(_core.PartitionConflict) as conflict:
        core(
            use_module=array("i", [0, 1]),
            use_parameter=array("i", [0, 0]),
            pin=array("i", [0, 1]),
        )
    assert conflict.value.args == (0, 1)


# ----------------------------------------------------------------------------------- pins


def test_pins_that_contradict_over_a_third_module_name_both():
    """The first shares with the second, and that with the third."""
    net = nn.Sequential(*linears(3))
    net[1].weight, net[1].bias = net[0].weight, net[2].bias
    set_partition(net[0], 0)
    set_partition(net[2], 1)
    told = (
        r"modules '0' \(pinned to partition 0\) and '2' \(pinned to partition 1\) share "
        "parameters, by way of others and so sit on one rank; pin both to the same"
    )
    with pytest.raises(PartitionError, match=told):
        decide(net)


def in_two_places() -> nn.Sequential:
    """A layer that two boxes hold, pinned to 0 and to 1."""
    layer, *others = linears(4)
    net = nn.Sequential(nn.Sequential(layer, others[0]), nn.Sequential(layer, others[1]))
    net.append(others[2])
    set_partition(net[0], 0)
    set_partition(net[1], 1)
    return net


@pytest.mark.parametrize("auto", [True, False])
def test_a_module_in_two_places_is_pinned_as_the_first_defined(auto):
    ranks = decide(in_two_places(), degree=3, auto=auto, default=2).rank_of
    assert (ranks["0"], ranks["0.0"], ranks["0.1"]) == (0, 0, 0)
    assert (ranks["1"], ranks["1.1"], ranks["2"]) == (1, 1, 2)


def test_a_module_in_two_places_says_where_it_has_its_pin_from():
    net = in_two_places()
    net[2].weight = net[0][0].weight
    set_partition(net[2], 1)
    told = r"'0.0' \(pinned to partition 0 with '0'\) and '2' \(pinned to partition 1\) share"
    with pytest.raises(PartitionError, match=told):
        decide(net)
    homes = {id(net[0][0]): home("module", 1)}
    told = r"module '0.0' \(pinned to partition 0 with '0'\) is the module 'it' of a Net"
    with pytest.raises(PartitionError, match=told):
        decide(net, homes=homes)


def test_a_pin_is_handed_on_to_what_takes_a_modules_place():
    old, new = nn.Sequential(*linears(2)), nn.Sequential(*linears(2))
    hand_on_pin(old, new, "body")
    assert {pin_of(module) for module in new.modules()} == {None}
    set_partition(old, 1)
    set_partition(old[1], 1)
    hand_on_pin(old, new, "body")
    assert {pin_of(module) for module in new.modules()} == {1}


@pytest.mark.parametrize("outer", [None, 2])
def test_a_pin_inside_of_what_is_replaced_as_a_whole_is_refused(outer):
    old = nn.Sequential(*linears(2))
    if outer is not None:
        set_partition(old, outer)
    set_partition(old[1], 1)
    told = (
        "module 'body.1' is pinned to partition 1, but all of 'body' is replaced by one "
        "Linear: pin 'body' instead"
    )
    with pytest.raises(PartitionError, match=told):
        hand_on_pin(old, nn.Linear(1, 1), "body")


def test_a_context_that_an_exception_leaves_has_ended():
    plain = nn.Module.__init__, nn.Module.__setstate__
    with pytest.raises(KeyError), smp.partition(1):
        with pytest.raises(KeyError), smp.partition(2):
            raise KeyError
        between = nn.Linear(1, 1)
        raise KeyError
    assert pin_of(between) == 1 and pin_of(nn.Linear(1, 1)) is None
    assert (nn.Module.__init__, nn.Module.__setstate__) == plain


def test_who_changes_how_modules_are_made_within_a_context_keeps_that():
    plain, made = nn.Module.__init__, []
    try:
        with smp.partition(1):
            noticing = nn.Module.__init__

            def init(self, *args, **kwargs):
                made.append(self)
                noticing(self, *args, **kwargs)

            nn.Module.__init__ = init
        assert nn.Module.__init__ is init
        later = nn.Linear(1, 1)
        assert later in made and pin_of(later) is None
    finally:
        nn.Module.__init__ = plain


def test_a_listener_of_several_contexts_hears_of_a_module_once():
    heard = []
    with creation.noticed(heard.append):
        with creation.noticed(heard.append):
            one = nn.ReLU()
        two = nn.ReLU()
    nn.ReLU()
    assert heard == [one, two]


@on_ranks(2)
@pytest.mark.parametrize("called", [False, True])
def test_a_lazy_layer_is_to_be_called_before_the_ranks_share_its_model(called):
    smp.init({"pipeline_parallel_degree": 2})
    net = nn.Sequential(nn.Linear(6, 6), nn.LazyBatchNorm1d())
    x = torch.ones(4, 6)
    if called:
        net(x)
    model = smp.DistributedModel(net)
    step = smp.step(lambda model, x: model.backward(model(x).sum()))
    if called:
        step(model, x)
        return
    told = "'1.weight' of a LazyBatchNorm1d has no shape before the first forward"
    with pytest.raises(RuntimeError, match=told):
        step(model, x)


@on_ranks(2)
@pytest.mark.parametrize("default", [0, 1])
def test_without_the_automatic_partition_what_is_not_pinned_is_on_the_configured_one(default):
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "auto_partition": False,
            "default_partition": default,
        }
    )
    net = nn.Sequential(*linears(4))
    model = distributed(net, {"1": 1 - default})
    smp.step(lambda model, x: model.backward(model(x).sum()))(model, torch.ones(2, 8))
    ranks = [model.get_module_partition(module) for module in net.modules()]
    assert ranks == [default, default, 1 - default, default, default]


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:.*no module of Sequential is on partition 0")
def test_a_distributed_model_is_pinned_as_its_module():
    smp.init({"pipeline_parallel_degree": 2})
    net = nn.Sequential(*linears(2))
    model = smp.DistributedModel(net)
    smp.set_partition(model, 1)
    smp.step(lambda model, x: model.backward(model(x).sum()))(model, torch.ones(2, 8))
    assert [model.get_module_partition(module) for module in (model, net, *net)] == [1] * 4
    with pytest.raises(PartitionError, match="too late to pin module ''"):
        smp.set_partition(model, 0)


# --------------------------------------------------------------- what another model has, too


def home(kind: str, rank: int, pinned: bool = False) -> Home:
    return Home(kind, "'it' of a Net", rank, pinned)


def test_what_is_in_a_module_that_only_has_a_shared_parameter_is_pinned_as_without_it():
    inside = nn.Linear(8, 8)
    inside.child = nn.Sequential(*linears(2))
    net = nn.Sequential(*linears(1), inside)
    ranks = decide(net, degree=3, homes={id(inside.weight): home("parameter", 0)}).ranks
    assert ranks.tolist() == [0, 1, 0, 2, 2, 2]
    with pytest.warns(UserWarning, match="no module of Sequential is on partition 2"):
        ranks = decide(net, degree=3, homes={id(inside): home("module", 0)}).ranks
    assert ranks.tolist() == [0, 1, 0, 0, 0, 0]


def test_parameters_that_other_models_have_on_two_ranks_cannot_meet_in_one_module():
    net = nn.Sequential(*linears(2))
    homes = {
        id(net[1].weight): home("parameter", 0),
        id(net[1].bias): home("parameter", 1, True),
    }
    told = (
        "module '1' has the parameter 'it' of a Net in another DistributedModel, pinned to "
        "partition 1, and has the parameter 'it' of a Net in another DistributedModel, on "
        "partition 0: what models share is on one rank"
    )
    with pytest.raises(PartitionError, match=told):
        decide(net, homes=homes)


def test_a_tie_between_a_pin_and_what_another_model_has_says_whose_word_is_whose():
    net = nn.Sequential(*linears(2))
    net[1].weight = net[0].weight
    set_partition(net[0], 0)
    told = (
        r"'0' \(pinned to partition 0\) and '1' \(by the parameter 'it' of a Net in another "
        r"DistributedModel, on partition 1\) share the parameter '0.weight'"
    )
    with pytest.raises(PartitionError, match=told):
        decide(net, homes={id(net[1].bias): home("parameter", 1)})


# --------------------------------------------------------------------------------- reports


@pytest.mark.parametrize(
    ("count", "parameters", "size"),
    [
        (0, "0", "0 B"),
        (999, "999", "999 B"),
        (1000, "1.0 K", "1000 B"),
        (1023, "1.0 K", "1023 B"),
        (1024, "1.0 K", "1.0 KiB"),
        (10**6, "1.0 M", "976.6 KiB"),
        (3 * 2**19, "1.6 M", "1.5 MiB"),
        (124439808, "124.4 M", "118.7 MiB"),
        (10**9, "1.0 B", "953.7 MiB"),
        (5 * 2**30, "5.4 B", "5.0 GiB"),
    ],
)
def test_counts_and_sizes_are_readable(count, parameters, size):
    assert (readable(count), in_bytes(count)) == (parameters, size)


def made_up(names, ranks, parameters, costs, kept, degree) -> Partition:
    """A root with children of one class."""
    paths = ["", *names]
    by_rank = [
        sum(c for c, r in zip(costs, ranks, strict=True) if r == d) for d in range(degree)
    ]
    classes = ["Net", *["Block"] * len(names)]
    order = range(len(paths))
    return Partition(
        degree, 1.0, paths, classes, ranks, parameters, costs, order, by_rank, kept
    )


def cells(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip("│├└─ "))


@settings(max_examples=30)
@given(st.data())
def test_the_rows_of_the_ranks_are_sums_and_bars_in_proportion(data):
    degree = data.draw(st.integers(1, 4))
    ranks = data.draw(st.lists(st.integers(0, degree - 1), min_size=1, max_size=6))
    n = len(ranks)
    parameters = data.draw(st.lists(st.integers(0, 10**10), min_size=n, max_size=n))
    costs = data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    kept = data.draw(st.none() | st.lists(st.integers(0, 2**40), min_size=n, max_size=n))
    names = [f"m{i}" for i in range(n - 1)]
    text = str(PartitionReport(made_up(names, ranks, parameters, costs, kept or (), degree)))
    lines = text.split("\n\n")[2].splitlines()
    assert lines[0].split() == ["rank", "parameters", *(["kept"] if kept else []), "cost"]
    most = max(
        sum(c for c, r in zip(costs, ranks, strict=True) if r == d) for d in range(degree)
    )
    for rank, line in enumerate(lines[1:]):

        def total(values, rank=rank):
            return sum(v for v, r in zip(values, ranks, strict=True) if r == rank)

        bar = "█" * round(total(costs) / most * 40) if most else ""
        wanted = [str(rank), readable(total(parameters))]
        wanted += [in_bytes(total(kept))] if kept else []
        wanted += [f"{total(costs):.4f}", *([bar] if bar else [])]
        assert cells(line) == wanted
    words = "1 rank" if degree == 1 else f"{degree} ranks"
    assert text.startswith(f"Partition over {words}, memory_weight 1\n")
    assert ("kept: what autograd keeps of one microbatch" in text) == bool(kept)


def test_modules_alike_are_joined_where_their_numbers_follow_and_their_numbers_add_up():
    names = ["8", "9", "10", "12", "a-1", "2", "3"]
    partition = made_up(
        names,
        [0] * 8,
        [0, 1, 2, 4, 8, 16, 32, 64],
        [0, 0.1, 0.2, 0.3, 0.05, 0.05, 0.1, 0.2],
        [0, 1, 2, 4, 8, 16, 32, 64],
        1,
    )
    rows = [
        cells(line)
        for line in str(PartitionReport(partition)).split("\n\n")[1].splitlines()[1:]
    ]
    assert rows == [
        ["(root)", "Net", "127", "127 B", "1.0000", "0"],
        ["8-10", "3 x Block", "7", "7 B", "0.6000", "0"],
        ["12", "Block", "8", "8 B", "0.0500", "0"],
        ["a-1", "Block", "16", "16 B", "0.0500", "0"],
        ["2-3", "2 x Block", "96", "96 B", "0.3000", "0"],
    ]


def test_a_report_counts_what_is_split_and_says_why_the_rest_is_whole():
    partition = decide(nn.Linear(1, 1), degree=1)
    split = [("a", "Linear", ""), ("b", "Linear", "it is odd"), ("c", "Linear", "")]
    lines = str(PartitionReport(partition, split)).splitlines()
    assert lines[-4:] == [
        "",
        "Split over the TP_GROUP: 2 x Linear",
        "parameters and costs are tp_rank 0's",
        "left whole: b (Linear): it is odd",
    ]
    told = str(PartitionReport(partition, split[1:2])).splitlines()
    assert told[-2:] == ["Split over the TP_GROUP: nothing", lines[-1]]


@pytest.mark.parametrize("degree", [1, 8, 9, 16, 17])
def test_a_pictures_tree_is_below_the_legend_of_all_ranks(degree):
    names, ones = [f"m{i}" for i in range(degree)], [1] * degree
    partition = made_up(names, [0, *range(degree)], [0, *ones], [0, *ones], (), degree)
    text = PartitionReport(partition)._repr_svg_()
    rows = [float(y) for y in re.findall(r' y="([\d.]+)"[^>]*class="track"', text)]
    boxes = [float(y) for y in re.findall(r' y="([\d.]+)"[^>]*class="part', text)]
    assert len(rows) == degree and len(set(rows)) == -(-degree // 8)
    assert max(rows) + 20 < min(boxes) < max(rows) + 60


def test_a_report_of_one_rank_shows_what_the_model_holds():
    net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4), nn.ReLU()))
    report = plan(net, torch.ones(2, 8), pipeline_parallel_degree=1)
    names = [cells(line)[0] for line in str(report).split("\n\n")[1].splitlines()[1:]]
    assert names == ["(root)", "0", "1"]


@pytest.mark.filterwarnings("ignore:.*no module of|.*no inputs given")
def test_a_model_without_any_cost_has_a_report_and_a_picture():
    report = plan(nn.Sequential(nn.ReLU()), pipeline_parallel_degree=2, memory_weight=1)
    assert report.costs == [0, 0]
    assert cells(str(report).splitlines()[-2]) == ["0", "0", "0.0000"]
    assert report._repr_svg_().startswith("<svg")


# ----------------------------------------------------------------------------------- plans


@module_of(lambda: {"layer": nn.Linear(8, 8), "shapes": None})
def Spy(self, x, scale=None):
    """Keeps the shapes that it was called with."""
    shapes.append((tuple(x.shape), x.device.type, None if scale is None else scale.item()))
    return self.layer(x)


shapes: list = []


def test_a_plan_with_keywords_alone_runs_the_model():
    """A number is for all microbatches, whatever they are."""
    shapes.clear()
    net = Spy()
    report = plan(
        net,
        x=torch.ones(5, 8),
        scale=torch.tensor(3.0),
        pipeline_parallel_degree=1,
        microbatches=2,
    )
    assert shapes == [((3, 8), "cpu", 3.0)]
    assert list(report.partition.order) == [0, 1]


def test_a_plan_of_a_model_of_which_only_a_part_is_on_meta_computes_nothing():
    shapes.clear()
    net = nn.Sequential(Spy(), nn.Linear(8, 8).to("meta"))
    plan(net, torch.ones(2, 8), pipeline_parallel_degree=1)
    assert shapes == [((2, 8), "meta", None)]
    assert net[1].weight.is_meta and not net[0].layer.weight.is_meta


def test_a_plan_names_what_a_step_cannot_cut():
    told = r"'x' has 0 samples on axis 0 \(shape \(0, 8\)\)"
    with pytest.raises(ValueError, match=told):
        plan(Spy(), torch.ones(0, 8), pipeline_parallel_degree=1, microbatches=4)
    plan(Spy(), torch.ones(3, 8), pipeline_parallel_degree=1, microbatches=4)
