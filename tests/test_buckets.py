"""Buckets of gradients: which parameters share one, and parameters of odd forms in them."""

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.data_parallel.buckets import MEGABYTE, Bucket, Memory, make_buckets
from smp.data_parallel.group import Holders, Layout, Replicas, ReplicasDiffer
from smp.slicing.slices import Slices, mark, slices_of
from tests.ranks import on_ranks
from tests.test_data_parallel import BACKENDS, averaged, gradients


class Odd(nn.Module):
    """Parameters of every form: transposed, a number, empty, other dtypes, channels last."""

    def __init__(self, seed: int = 8) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        forms = [
            torch.randn(4, 3, generator=draw).t(),
            torch.randn((), generator=draw),
            torch.empty(0, 3),
            torch.randn(5, generator=draw).double(),
            torch.randn(2, 2, 2, 3, generator=draw).permute(0, 3, 1, 2),
            torch.randn(5, generator=draw).bfloat16(),
            torch.randn(6, generator=draw),
            torch.randn(2, 2, generator=draw).double().t(),
            torch.randn(1, 3, generator=draw)[:, 1:2],
        ]
        self.forms = nn.ParameterList(nn.Parameter(form) for form in forms)

    def forward(self, x: Tensor) -> Tensor:
        terms = [(p.float() * x[0]).sin().sum() * x[1] for p in self.forms]
        # One whose elements have different gradients in a transposed order.
        return sum(terms) + (self.forms[0] @ x).square().sum()


def inputs(rank: int) -> Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(rank))


@pytest.mark.sample(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 1e-5}, {"gradient_as_bucket_view": True}],
    ids=["one of a kind", "small", "views"],
)
@on_ranks(2)
def test_parameters_of_every_form_begin_alike_and_get_the_average(options, backend):
    """In two steps, of which the second adds to the first's gradients."""
    smp.init({"ddp": True, "ddp_dist_backend": backend})
    model = smp.DistributedModel(Odd(seed=8 + smp.rank()), **options)
    replicas = [Odd(), Odd()]
    for (name, mine), first in zip(
        model.named_parameters(), replicas[0].parameters(), strict=True
    ):
        assert torch.equal(mine, first) and mine.stride() == first.stride(), name
    for number in range(2):
        model(inputs(smp.rank() + 2 * number)).backward()
        for rank, replica in enumerate(replicas):
            replica(inputs(rank + 2 * number)).backward()
        want = averaged(replicas)
        for name, got in gradients(model).items():
            torch.testing.assert_close(got, want[name], rtol=1e-2, atol=1e-5, msg=name)
            for replica in replicas:
                replica.get_parameter(name).grad = want[name].clone()


@on_ranks(2)
def test_buckets_hold_one_kind_and_no_more_than_their_cap():
    """Last parameters first; a parameter that is larger has one of its own."""
    smp.init({"ddp": True})
    sizes = [10, 300, 20, 30, 40, 5]
    module = nn.ParameterList(
        nn.Parameter(torch.zeros(n, dtype=torch.float64 if n == 20 else torch.float32))
        for n in sizes
    )
    seen = []

    def hook(state, bucket):
        seen.append([p.numel() for p in bucket.parameters()])
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = smp.DistributedModel(module, bucket_cap_mb=75 * 4 / MEGABYTE)
    model.register_comm_hook(None, hook)

    @smp.step
    def step(model: nn.Module) -> None:
        model.backward(sum(p.float().sum() for p in model.parameters()))

    step(model)
    # 5 + 40 + 30 of the floats are just the cap, and 20 doubles are of another kind.
    assert seen == [[5, 40, 30], [20], [300], [10]]


@on_ranks(2)
def test_impossible_options_are_refused():
    smp.init({"ddp": True})
    for options, said in (
        ({"backward_passes_per_step": 0}, "backward_passes_per_step is at least 1, not 0"),
        ({"backward_passes_per_step": -2}, "backward_passes_per_step is at least 1, not -2"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb is above 0, not 0"),
        ({"bucket_cap_mb": -0.5}, "bucket_cap_mb is above 0, not -0.5"),
    ):
        with pytest.raises(ValueError, match=said):
            smp.DistributedModel(nn.Linear(2, 2), **options)


@on_ranks(2)
def test_how_replicas_differ_is_said_whichever_has_more():
    """Longer, other dtypes, buffers; what is the same on both is not named."""
    smp.init({"ddp": True})
    other = smp.rank() == 1
    longer = nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + other)))
    with pytest.raises(ReplicasDiffer, match=r"dp_rank 1 .* '1.weight' \[2, 2\] float32, w"):
        smp.DistributedModel(longer)
    biased = nn.Linear(2, 3, bias=not other)
    with pytest.raises(ReplicasDiffer, match=r"dp_rank 1 .* no 'bias' \[3\] float32"):
        smp.DistributedModel(biased)
    wide = nn.Linear(2, 2, dtype=torch.float64 if other else torch.float32)
    with pytest.raises(ReplicasDiffer, match=r"'weight' \[2, 2\] float64, not 'weight'.*32$"):
        smp.DistributedModel(wide)
    statistics = nn.BatchNorm1d(2, track_running_stats=other)
    with pytest.raises(ReplicasDiffer, match=r"'running_mean' \[2\] float32, which is one too"):
        smp.DistributedModel(statistics)
    smp.DistributedModel(nn.Linear(2, 2))


def test_a_layout_survives_its_bytes_and_its_signature_tells_it_from_others():
    tensors = [
        ("a.weight", torch.zeros(3, 4)),
        ("b", torch.zeros(())),
        ("c", torch.zeros(0, 2, dtype=torch.int64)),
    ]
    layout = Layout.of(tensors)
    assert Layout.from_bytes(layout.to_bytes()) == layout
    others = [
        Layout.of(tensors[:2]),
        Layout.of([("a.weight", torch.zeros(4, 3)), *tensors[1:]]),
        Layout.of([("a.bias", torch.zeros(3, 4)), *tensors[1:]]),
        Layout.of([("a.weight", torch.zeros(3, 4).double()), *tensors[1:]]),
    ]
    assert len({one.signature() for one in [layout, *others]}) == 5
    assert all(layout.first_difference(one) for one in others)
    assert layout.first_difference(Layout.of(tensors)) == ""


def test_a_layout_says_how_a_parameter_is_cut_and_of_which_whole():
    """Two slices of one size may be of other wholes, or of other parts of one."""
    layouts = []
    for slices in (
        Slices.even(0, 8, 2),
        Slices.even(0, 8, 2, blocks=2),
        Slices.even(1, 6, 2),
        None,
    ):
        weight = nn.Parameter(torch.zeros(4, 3))
        if slices is not None:
            mark(weight, slices, False)
        layouts.append(Layout.of([("w", weight)]))
    assert [layouts[0].first_difference(one) for one in layouts] == [
        "",
        "'w' [8, 3] float32 cut along axis 0 in 2 blocks, "
        "not 'w' [8, 3] float32 cut along axis 0",
        "'w' [4, 6] float32 cut along axis 1, not 'w' [8, 3] float32 cut along axis 0",
        "'w' [4, 3] float32, not 'w' [8, 3] float32 cut along axis 0",
    ]


def test_buckets_of_uneven_slices_are_alike_on_all_tp_ranks():
    """Ranks that have 4 and 3 of 7 rows put the same parameters into each; also beside whole
    ones, which other ranks have, too."""
    slices, holders, made = Slices.even(0, 7, 2), Holders(None, [0, 1]), []
    everywhere = Holders(None, [0, 1, 2, 3])
    for part in range(2):
        rows = slices.local_size(part)
        module = nn.ParameterList(nn.Parameter(torch.zeros(rows, n)) for n in (2, 3, 5, 1, 8))
        for parameter in module:
            mark(parameter, slices, True)
        held = []
        for elements in range(3, 80):
            cap_mb = elements * 4 / MEGABYTE
            buckets = make_buckets(module, [*module], cap_mb, lambda _: holders)
            held.append([[p.shape[1] for p in bucket.parameters()] for bucket in buckets])
            assert [bucket.index() for bucket in buckets] == [*range(len(buckets))]
            assert [b.is_last() for b in buckets] == [False] * (len(buckets) - 1) + [True]
        whole = [nn.Parameter(torch.zeros(3, 10 + n)) for n in range(len(module))]
        both = nn.ParameterList(p for pair in zip(module, whole, strict=True) for p in pair)
        for elements in range(3, 80):
            buckets = make_buckets(
                both,
                [*both],
                elements * 4 / MEGABYTE,
                lambda p: holders if slices_of(p) else everywhere,
            )
            held.append([[p.shape[1] for p in bucket.parameters()] for bucket in buckets])
        made.append(held)
    assert made[0] == made[1] and made[0][0] == [[8], [1], [5], [3], [2]]
    assert made[0][76] == [[8, 1, 5, 3, 2]]


@on_ranks(4)
def test_replicas_exchange_bytes_and_tensors_and_go_by_their_ranks_in_the_job():
    smp.init({"pipeline_parallel_degree": 2, "ddp": True})
    replicas, mine = Replicas(), smp.dp_rank()
    members = smp.get_dp_group()
    assert replicas.gather_bytes(b"x" * 3 * mine) == [b"", b"xxx"]
    assert replicas.gather_bytes(b"") == [b"", b""]
    assert not replicas.have_one_rank and replicas.numbers(2, 3).tolist() == [[0] * 3] * 2
    for source in range(2):
        tensors = [
            torch.full((2, 3), 1.0 + mine).t(),
            torch.full((), 10 + mine),
            torch.full((3,), 100.0 + mine, requires_grad=True),
        ]
        replicas.broadcast(tensors, source)
        assert [t.reshape(-1)[-1].item() for t in tensors] == [
            1.0 + source,
            10 + source,
            100.0 + source,
        ]
    others = Layout.of([("w", torch.zeros(1 + mine))])
    with pytest.raises(ReplicasDiffer) as caught:
        replicas.check_alike(others)
    assert str(caught.value) == (
        f"smp: dp_rank 1 (rank {members[1]}) has another model than dp_rank 0 "
        f"(rank {members[0]}): it has 'w' [2] float32, not 'w' [1] float32"
    )


def test_a_sparse_bucket_has_a_copy_of_rows_each_once():
    """Whatever form the gradient has; none: no rows."""
    table = nn.Parameter(torch.zeros(3, 2))
    bucket = Bucket([table], torch.float32, True, Holders(None, [0]))
    rows = torch.tensor([[1.0, 2.0], [0.0, 0.0], [5.0, 6.0]])
    twice = torch.sparse_coo_tensor(
        [[0, 2, 2]], rows[[0, 0, 2]] / 2, (3, 2), check_invariants=True
    )
    once = twice.coalesce()
    for gradient in (rows, rows.to_sparse(), twice, once, None):
        bucket.fill([gradient], Memory())
        got = bucket.buffer()
        want = torch.zeros(3, 2) if gradient is None else gradient.to_dense().clone()
        assert got.is_coalesced() and (got.sparse_dim(), got.dense_dim()) == (1, 1)
        assert torch.equal(got.to_dense(), want) and bucket.gradients()[0] is got
        got.values().mul_(2)
        assert gradient is None or torch.equal(gradient.to_dense(), want)


def test_memory_of_buckets_is_used_again():
    """A spare one that is large enough; else a new one takes the place of a spare one."""
    memory, host = Memory(), torch.device("cpu")
    small, large = memory.take(100, host), memory.take(1000, host)
    memory.give_back(small)
    memory.give_back(large)
    assert memory.take(500, host) is large and memory.take(100, host) is small
    memory.give_back(small)
    larger = memory.take(2000, host)
    assert larger.numel() == 2000 and memory.take(100, host) is not small
    memory.give_back(torch.empty(500, dtype=torch.uint8, device="meta"))
    assert memory.take(100, host).device == host
