"""Spec: smp/partitioning/partition.py; api.md 6; paper 4.5 and C."""

import copy
import pickle
import random
import threading
from array import array

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

import smp.partitioning
from smp import _core
from smp.modules.pins import PartitionError, set_partition
from smp.partitioning.partition import Partition, make_partition
from smp.partitioning.tracing import trace
from tests.models.modules import module_of
from tests.ranks import on_ranks
from tests.reference import partition as reference


def decide(model, *args, degree=2, **kwargs):
    """A partition by parameters only, from a traced run if there are arguments."""
    traced = trace(model, lambda: model(*args)) if args else None
    return make_partition(
        model, traced, degree=degree, memory_weight=kwargs.pop("memory_weight", 1.0), **kwargs
    )


def draw(partition):
    """The tree as indented text, each module with its rank."""
    lines = []
    for path, rank in partition.rank_of.items():
        depth = path.count(".") + 1 if path else 0
        lines.append(f"{'  ' * depth}{path.rpartition('.')[2] or 'root'} {rank}")
    return "\n".join(lines)


@module_of(
    lambda layers=4: {
        "layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(layers)),
        "act": nn.ReLU(),
    }
)
def Stack(self, x):
    for layer in self.layers:
        x = self.act(layer(x))
    return x


def test_layers_are_spread_in_order_and_activations_stay_with_their_parent():
    assert (
        draw(decide(Stack(), torch.randn(2, 8)))
        == """\
root 0
  layers 0
    0 0
    1 0
    2 1
    3 1
  act 0"""
    )


def test_a_sequential_is_cut_into_runs_of_children():
    """A child without parameters runs with the one before it."""
    net = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(8, 8), nn.ReLU())))
    assert (
        draw(decide(net, torch.randn(2, 8)))
        == """\
root 0
  0 0
  1 0
  2 0
  3 0
  4 1
  5 1
  6 1
  7 1"""
    )


def test_execution_order_counts_more_than_definition_order():
    class Backwards(Stack):
        def forward(self, x):
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    assert decide(Backwards(), torch.randn(2, 8)).ranks.tolist()[2:6] == [1, 1, 0, 0]
    assert decide(Backwards()).ranks.tolist()[2:6] == [0, 0, 1, 1]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.body = Stack(6)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))


def test_tied_parameters_keep_their_users_together_and_count_once():
    partition = decide(Tied(), torch.randint(0, 10, (2, 3)), degree=3)

    assert partition.rank_of["embed"] == partition.rank_of["head"]
    assert set(partition.ranks) == {0, 1, 2}
    assert sum(partition.costs) == pytest.approx(1)
    assert sum(partition.parameters) == sum(p.numel() for p in Tied().parameters())


def test_two_parameters_over_the_same_memory_are_one():
    net = Tied()
    net.head.weight = nn.Parameter(net.embed.weight.detach())
    assert net.head.weight is not net.embed.weight

    partition = decide(net, degree=3)
    assert partition.rank_of["embed"] == partition.rank_of["head"]


def test_a_weight_used_by_an_operator_of_another_module_joins_them():
    class Borrows(nn.Module):
        def __init__(self, owner):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.__dict__["owner"] = owner

        def forward(self, x):
            return self.layer(x) @ self.owner.weight

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.last = Borrows(self.first)

        def forward(self, x):
            return self.last(self.second(self.first(x)))

    partition = decide(Net(), torch.randn(2, 8), degree=3)
    assert partition.rank_of["last"] == partition.rank_of["first"]
    assert partition.rank_of["last"] != partition.rank_of["second"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.MultiheadAttention(8, 2),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        lambda: nn.Sequential(nn.ParameterList([torch.ones(8), torch.ones(8)])),
    ],
)
def test_without_tracing_known_uses_of_a_childs_parameters_count(make):
    partition = decide(nn.Sequential(nn.Linear(40, 40), make()), degree=4)
    assert len({r for p, r in partition.rank_of.items() if p.startswith("1")}) == 1


def test_traced_activations_count_as_memory():
    class Wide(Stack):
        def forward(self, x):
            a, *rest = self.layers
            x = a(x[:1].expand(2000, 8))[:10]
            for layer in rest:
                x = layer(x)
            return x

    assert decide(Wide(), torch.randn(2, 8)).ranks.tolist()[2:6] == [0, 1, 1, 1]
    assert decide(Wide()).ranks.tolist()[2:6] == [0, 0, 1, 1]


def test_memory_weight_trades_parameters_against_modules():
    net = nn.Sequential(nn.Linear(64, 64), *(nn.Linear(8, 8) for _ in range(7)))

    memory = decide(net, memory_weight=1.0)
    compute = decide(net, memory_weight=0.0)
    assert memory.ranks.tolist() == [0, 0] + [1] * 7
    assert compute.ranks.tolist() == [0] * 4 + [1] * 5


# --------------------------------------------------------------------- the plain reference


def random_tree(draw):
    """Small numbers, so that costs of 0 and ties are frequent; or some very large ones."""
    n, most = draw.randint(1, 24), draw.choice([3, 10, 100])
    uneven, boxes = draw.choice([1, 1, 8]), draw.randint(1, 6)
    parents = draw.choice(
        [
            lambda child: draw.randrange(child),
            lambda child: draw.randrange(min(child, 3)),
            lambda child: draw.randrange(max(0, child - 4), child),
            lambda child: draw.randint(1, boxes) if child > boxes else 0,
        ]
    )

    def numbers(share, most):
        return [
            int(most * draw.random() ** uneven) if draw.random() < share else 0
            for _ in range(n)
        ]

    tree = reference.Tree(
        parent=[-1, *(parents(child) for child in range(1, n))],
        parameter=numbers(0.7, most**uneven),
        uses=[],
        first_run=draw.choice([list(range(n)), [draw.randrange(-1, n) for _ in range(n)]]),
        activation=numbers(draw.choice([0, 0.3]), 50),
        seconds=[float(s) for s in numbers(draw.choice([0, 1]), 10)],
        chain=[draw.random() < 0.4 for _ in range(n)],
        pin=[reference.INHERIT] * n,
    )
    owners = [module for module, size in enumerate(tree.parameter) if size]
    if owners and draw.random() < 0.3:
        users = [draw.randrange(n) for _ in range(draw.randrange(3))]
        tree.uses += [(user, draw.choice(owners)) for user in users]
    if draw.random() < 0.3:
        for _ in range(draw.randrange(4)):
            tree.pin[draw.randrange(n)] = draw.choice([reference.NONE, 0, 1])
        tree.default = draw.choice([-1, -1, 0, 1])
    return tree


def core_decides(tree, devices, memory_weight):
    n = len(tree.parent)
    uses = [(module, module) for module in range(n) if tree.parameter[module]] + tree.uses
    device, *_ = _core.partition(
        devices,
        memory_weight,
        tree.default,
        n,
        array("i", tree.parent[1:]),
        array("i", range(1, n)),
        array("q", tree.parameter),
        array("i", [module for module, _ in uses]),
        array("i", [owner for _, owner in uses]),
        first_run=array("q", tree.first_run),
        activation_bytes=array("q", tree.activation),
        seconds=array("d", tree.seconds),
        chain=array("b", tree.chain),
        pin=array("i", tree.pin),
    )
    return array("i", device).tolist()


def test_random_trees_are_divided_as_the_plain_reference_divides_them():
    """The device of each module: spare devices, chains, pins, shared parameters, ties."""
    contradictions = 0
    for seed in range(500):
        draw = random.Random(seed)
        tree = random_tree(draw)
        devices, memory_weight = draw.randint(2, 9), draw.choice([0.0, 0.3, 0.8, 1.0])
        try:
            got = core_decides(tree, devices, memory_weight)
        except _core.PartitionConflict:  # a pin against a shared parameter
            contradictions += 1
            continue
        want = reference.partition(tree, devices, memory_weight)
        assert got == want, f"seed {seed}, {devices} devices, {memory_weight}: {tree}"
    assert contradictions < 20


# -------------------------------------------------------------------------------- pinning


def test_set_partition_pins_the_subtree_and_the_innermost_wins():
    net = Tied()
    set_partition(net.body, 2)
    set_partition(net.body.layers[1], 1)
    partition = decide(net, degree=3)

    assert {p: r for p, r in partition.rank_of.items() if p.startswith("body")} == {
        "body": 2,
        "body.layers": 2,
        **{f"body.layers.{i}": 1 if i == 1 else 2 for i in range(6)},
        "body.act": 2,
    }


def test_modules_created_in_a_context_are_pinned_and_the_innermost_wins():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            with smp.partition(1):
                self.a = Stack(1)
                with smp.partition(2):
                    self.b = nn.Linear(8, 8)
                self.c = nn.Linear(8, 8)
            self.d = nn.Linear(8, 8)

    partition = decide(Net(), degree=3)
    assert [partition.rank_of[p] for p in ("a", "a.layers.0", "b", "c", "d")] == [1, 1, 2, 1, 0]


def test_copies_and_unpickled_modules_count_as_created():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    with smp.partition(1):
        net = nn.Sequential(nn.TransformerEncoder(layer, 2), pickle.loads(pickle.dumps(layer)))
    outside = nn.ModuleList([layer, net])

    partition = decide(outside, degree=3)
    ranks = {p: r for p, r in partition.rank_of.items() if p.startswith("1.")}
    assert set(ranks.values()) == {1}
    assert set(decide(copy.deepcopy(net), degree=3).ranks) == {1}


def test_a_context_ends_and_concerns_its_own_thread_only():
    plain = nn.Module.__init__, nn.Module.__setstate__
    made = []
    with smp.partition(1):
        thread = threading.Thread(target=lambda: made.append(nn.Linear(8, 8)))
        thread.start()
        thread.join()
    made.append(nn.Linear(8, 8))

    assert (nn.Module.__init__, nn.Module.__setstate__) == plain
    for module in made:
        assert decide(module, degree=1).ranks.tolist() == [0]
        assert "_smp_partition" not in module.__dict__


def test_without_auto_partition_the_rest_goes_to_the_default():
    """A module not placed in any smp.partition context is in the default partition."""
    outside = nn.Linear(8, 8)
    with smp.partition(2):
        inside = nn.Sequential(nn.Linear(8, 8))
    inside.append(outside)
    net = nn.Sequential(inside, Stack(2))
    set_partition(net[1].layers, 0)

    partition = decide(net, degree=3, auto=False, default=1)
    assert (
        draw(partition)
        == """\
root 1
  0 2
    0 2
    1 1
  1 1
    layers 0
      0 0
      1 0
    act 1"""
    )


def test_pins_that_contradict_a_tie_name_both_modules():
    net = Tied()
    set_partition(net.embed, 0)
    set_partition(net.head, 1)
    with pytest.raises(PartitionError) as error:
        decide(net)
    assert str(error.value).startswith(
        "smp: modules 'embed' (pinned to partition 0) and 'head' (pinned to partition 1) "
        "share the parameter 'embed.weight'"
    )


def test_an_inherited_pin_that_contradicts_a_tie_names_where_it_comes_from():
    net = nn.Module()
    net.tied, net.embed = Tied(), nn.Linear(8, 8)
    net.tied.head.weight = net.embed.weight
    set_partition(net.tied, 1)
    set_partition(net.embed, 0)
    with pytest.raises(PartitionError, match=r"'tied.head' \(pinned to .* 1 with 'tied'\)"):
        decide(net)


class Lends(nn.Module):
    """Passes a parameter of one child to another, which has one of its own."""

    @module_of(lambda: {"own": nn.Linear(8, 8)})
    def Borrows(self, x, weight):
        return self.own(nn.functional.linear(x, weight))

    def __init__(self):
        super().__init__()
        self.lender, self.borrower = nn.Linear(8, 8), self.Borrows()

    def forward(self, x):
        return self.borrower(self.lender(x), self.lender.weight)


def test_a_pin_is_stronger_than_the_use_of_a_parameter_that_is_passed():
    """Without one the module that passes it is where it is."""
    x = torch.randn(2, 8)
    for rank in (0, 1):
        net = Lends()
        set_partition(net.lender, rank)
        assert decide(net, x).rank_of[""] == rank
        set_partition(net, 1 - rank)
        got = decide(net, x).rank_of
        assert (got[""], got["lender"], got["borrower.own"]) == (1 - rank, rank, 1 - rank)


@pytest.mark.parametrize("pin", [2, 5])
def test_a_pin_out_of_range_names_module_and_values(pin):
    net = Stack()
    set_partition(net.layers[2], pin)
    with pytest.raises(
        PartitionError, match=rf"'layers\.2' is pinned to partition {pin}, .*degree is 2"
    ):
        decide(net)


@pytest.mark.parametrize("wrong", [-1, "0", 1.0, True, None])
def test_what_is_no_partition_is_refused(wrong):
    with pytest.raises((TypeError, ValueError), match="partition"):
        set_partition(nn.Linear(1, 1), wrong)
    with (
        pytest.raises((TypeError, ValueError), match="partition"),
        smp.partition(wrong),
    ):
        pass
    with pytest.raises(TypeError, match="pins a torch.nn.Module, got a str"):
        set_partition("fc", 0)


def test_idle_ranks_are_named():
    with pytest.warns(UserWarning, match="no module of Stack is on partition 2, 3 of 4"):
        partition = decide(Stack(2), degree=4)
    assert set(partition.ranks) == {0, 1}


# ------------------------------------------------------------------------- to other ranks


def test_a_partition_travels_as_plain_numbers_and_strings():
    partition = decide(Tied(), torch.randint(0, 10, (2, 3)), degree=3, memory_weight=0.3)
    data = partition.to_bytes()
    arrived = Partition.from_bytes(memoryview(data))

    assert arrived.__dict__ == partition.__dict__
    assert b"pickle" not in data and data.isascii()


def test_a_damaged_partition_is_refused():
    data = decide(Stack()).to_bytes()
    with pytest.raises(ValueError, match="no partition"):
        Partition.from_bytes(b"{}")
    with pytest.raises(ValueError, match="damaged"):
        Partition.from_bytes(data[:-10])
    with pytest.raises(ValueError, match="damaged: its hash"):
        Partition.from_bytes(data.replace(b'"ranks":[0,0,0', b'"ranks":[0,0,1'))
    with pytest.raises(ValueError, match="damaged: its hash"):
        Partition.from_bytes(data.replace(b'"layers.0', b'"layerz.0'))
    with pytest.raises(ValueError, match="damaged"):
        Partition.from_bytes(data.replace(b'"degree"', b'"degrees"'))


def test_the_hash_tells_models_and_decisions_apart():
    hashes = {
        decide(Stack(4)).hash,
        decide(Stack(4), degree=3).hash,
        decide(Stack(5)).hash,
        decide(nn.Sequential(*Stack(4).layers)).hash,
    }
    assert len(hashes) == 4
    assert decide(Stack(4)).hash == decide(Stack(4)).hash


@on_ranks(2)
def test_a_pin_after_the_partition_is_refused():
    smp.init({"pipeline_parallel_degree": 2})
    model = smp.DistributedModel(Stack())
    set_partition(model.module.layers[3], 1)
    smp.step(lambda model, x: model.backward(model(x).sum()))(model, torch.ones(2, 8))

    for module in (model.module.layers[3], model.module):
        path, owner = ("layers.3", 1) if module is not model.module else ("", 0)
        with pytest.raises(PartitionError) as error:
            set_partition(module, 0)
        assert str(error.value) == (
            f"smp.set_partition: too late to pin module '{path}' ({type(module).__name__}) to "
            f"partition 0: its model was partitioned in its first step, and it is on partition "
            f"{owner}; call it before the first step"
        )
    set_partition(nn.Linear(1, 1), 0)


class Headed(nn.Module):
    """Four equal layers, and a head of many classes."""

    def __init__(self, uncounted: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 800)
        if uncounted:
            self.scale = nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x * self.scale if hasattr(self, "scale") else x)


@pytest.mark.parametrize(
    "kind", ["known", "a matrix without a formula", "a formula that fails"]
)
def test_an_outlier_weighs_as_much_as_its_flops_where_all_are_known(kind, monkeypatch):
    def fails(*args, **kwargs):
        raise AssertionError("of a formula")

    if kind.endswith("fails"):
        for name in ("addmm", "mm"):
            monkeypatch.setitem(flop_registry, getattr(torch.ops.aten, name), fails)
    report = smp.plan(
        Headed(kind.startswith("a matrix")),
        torch.zeros(8, 8),
        pipeline_parallel_degree=2,
        memory_weight=0.0,
    )
    assert (report.costs[report.rank_of("head")] > 0.5) == (kind == "known")
