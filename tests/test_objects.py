"""Spec: object communication (api section 2), with the payloads that scripts send."""

import collections
import os
import re
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import smp
from smp import _core
from smp.collectives import objects
from smp.collectives.objects import Parcel, Spec
from smp.job import bootstrap, collective_calls
from tests.ranks import on_ranks

Pair = collections.namedtuple("Pair", "first second")


def payloads(rank: int) -> list:
    """What clients.md lists, made to differ by rank."""
    torch.manual_seed(rank)
    return [
        0.5 + rank,
        torch.randn(3, 2),
        torch.tensor(1.5 + rank),
        [torch.randn(2), torch.arange(rank + 1)],
        {"loss": torch.tensor(2.0), "step": rank, "nested": {"x": [None, torch.ones(1)]}},
        rank % 2 == 0,
        torch.randn(2 + rank, 4),
        None,
        "text",
        Pair(torch.ones(2, dtype=torch.bool), (rank,)),
        torch.randn(4, 3).t(),
        torch.empty(0, 5),
        torch.randn(2, 2).to(torch.bfloat16),
        torch.complex(torch.ones(2), torch.ones(2)),
        torch.randn(1, 3).expand(4, 3),
        torch.randn(8)[::2],
        torch.randn(8)[3::5][:1],
        torch.randn(3, 4)[1:2, 2:3],
        torch.randn(3, 4).t()[1:2, :0],
        nn.Parameter(torch.randn(2), requires_grad=False),
        nn.Parameter(torch.randn(2)),
        torch.randn(3, requires_grad=True),
        torch.randn(3, 2).t().requires_grad_(),
        torch.eye(2).to_sparse(),
        nn.Linear(2, 3),
    ]


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            type(a) is type(b)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.requires_grad == b.requires_grad
            and a.is_leaf
            and bool(torch.equal(a.to_dense(), b.to_dense()))
        )
    if isinstance(a, nn.Module):
        return type(a) is type(b) and same(a.state_dict(), b.state_dict())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@on_ranks(2, 4)
def test_allgather_gives_every_object_by_rank():
    smp.init()

    for i, mine in enumerate(payloads(smp.rank())):
        gathered = smp.allgather(mine, smp.WORLD)
        assert len(gathered) == smp.size()
        for rank, theirs in enumerate(gathered):
            assert same(theirs, payloads(rank)[i]), (rank, mine)


@on_ranks(2)
def test_the_default_device_is_the_scripts_own():
    """What carries objects is in host memory whatever torch.set_default_device says."""
    smp.init()
    mine = {"rank": smp.rank(), "tensor": torch.full((2, 3), float(smp.rank()))}

    with torch.device("meta"):
        gathered = smp.allgather(mine, smp.WORLD)

    for rank, theirs in enumerate(gathered):
        assert same(theirs, {"rank": rank, "tensor": torch.full((2, 3), float(rank))})


@on_ranks(2, 4)
def test_broadcast_reaches_every_other_member():
    smp.init()
    received = payloads(0)

    for i, obj in enumerate(payloads(0)):
        if smp.rank() == 0:
            smp.broadcast(obj, smp.WORLD)
        else:
            received[i] = smp.recv_from(0, smp.RankType.WORLD_RANK)

    assert all(map(same, received, payloads(0)))


@on_ranks(4)
def test_groups_are_apart_from_each_other():
    smp.init({"pipeline_parallel_degree": 2})
    rank = smp.rank()

    assert smp.allgather(rank, smp.PP_GROUP) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert smp.allgather(rank, smp.MP_GROUP) == smp.allgather(rank, smp.PP_GROUP)
    assert smp.allgather(rank, smp.CommGroup.DP_GROUP) == [rank % 2, rank % 2 + 2]
    assert smp.allgather(rank, smp.RDP_GROUP) == smp.allgather(rank, smp.DP_GROUP)
    assert smp.allgather(rank, smp.TP_GROUP) == [rank]
    if smp.pp_rank() == 1:
        smp.broadcast(("from", rank), smp.PP_GROUP)
    else:
        assert smp.recv_from(1, smp.RankType.PP_RANK) == ("from", rank + 1)
    if smp.dp_rank() == 0:
        smp.send(rank, 1, smp.RankType.RDP_RANK)
    else:
        assert smp.recv_from(0, smp.RankType.DP_RANK) == rank - 2


@on_ranks(2)
def test_messages_of_one_rank_arrive_in_order():
    smp.init()
    other = 1 - smp.rank()

    def send_all():
        for i in range(200):
            smp.send({"i": i, "t": torch.full((i % 5,), i)}, other, smp.RankType.WORLD_RANK)

    sender = threading.Thread(target=send_all)
    sender.start()
    for i in range(200):
        got = smp.recv_from(other, smp.RankType.WORLD_RANK)
        assert got["i"] == i and got["t"].tolist() == [i] * (i % 5)
    sender.join()


@on_ranks(2)
def test_a_script_may_send_tensors_itself_meanwhile():
    smp.init()
    import torch.distributed as dist

    if smp.rank() == 0:
        theirs = dist.isend(torch.full((4,), 7.0), 1)
        smp.send("ours", 1, smp.RankType.WORLD_RANK)
        theirs.wait()
    else:
        assert smp.recv_from(0, smp.RankType.WORLD_RANK) == "ours"
        tensor = torch.zeros(4)
        dist.recv(tensor, 0)
        assert tensor.tolist() == [7.0] * 4


@on_ranks(2)
def test_a_collective_and_a_message_in_two_threads_do_not_meet():
    smp.init()
    other = 1 - smp.rank()
    got = []

    def gather():
        for i in range(50):
            got.append(smp.allgather((smp.rank(), i), smp.WORLD))

    thread = threading.Thread(target=gather)
    thread.start()
    for i in range(50):
        if smp.rank() == 0:
            smp.send(i, other, smp.RankType.WORLD_RANK)
        else:
            assert smp.recv_from(other, smp.RankType.WORLD_RANK) == i
    thread.join()
    assert got == [[(0, i), (1, i)] for i in range(50)]


@on_ranks(2)
def test_send_returns_when_the_receiver_has_it():
    """All of them block until matched."""
    smp.init()
    if smp.rank() == 0:
        sent = threading.Event()

        def work():
            smp.send(torch.zeros(10), 1, smp.RankType.WORLD_RANK)
            sent.set()

        thread = threading.Thread(target=work)
        thread.start()
        smp.barrier()
        assert not sent.is_set()  # the other rank receives after the next barrier
        smp.barrier()
        thread.join()
    else:
        smp.barrier()
        smp.barrier()
        assert smp.recv_from(0, smp.RankType.WORLD_RANK).shape == (10,)


# So long a barrier has to let somebody go who should wait.
LEAVE_S = 0.02


def come_late(barrier, members: list[int], late: int, folder: Path, patch) -> None:
    """One barrier; a member comes to it when all others wait in it, or have left it."""
    folder.mkdir(exist_ok=True)
    mine = folder / str(smp.rank())
    place = _core.place

    def tell(doing: str | None) -> None:
        if doing is not None and "receiving from rank" in doing:
            mine.with_suffix(".waits").touch()
        place(doing)

    if smp.rank() == late:
        others = [folder / str(member) for member in members if member != late]
        deadline = time.monotonic() + 60
        while not all(
            other.with_suffix(".waits").exists() or other.with_suffix(".left").exists()
            for other in others
        ):
            os.sched_yield()
            assert time.monotonic() < deadline, "the others do not come to the barrier"
        threading.Event().wait(LEAVE_S)
        assert not [other for other in others if other.with_suffix(".left").exists()]
    mine.touch()
    with patch.context() as inside:
        inside.setattr(_core, "place", tell)
        barrier()
    missing = [member for member in members if not (folder / str(member)).exists()]
    mine.with_suffix(".left").touch()
    assert not missing


@on_ranks(2, 4)
def test_nobody_leaves_a_barrier_before_everybody_is_there(tmp_path, monkeypatch):
    smp.init()
    members = list(range(smp.size()))

    for late in members:
        come_late(smp.barrier, members, late, tmp_path / str(late), monkeypatch)


PIPELINES = [[0, 1], [2, 3]]
REPLICAS = [[0, 2], [1, 3]]


@on_ranks(4)
@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("mp_barrier", PIPELINES),
        ("pp_barrier", PIPELINES),
        ("dp_barrier", REPLICAS),
        ("rdp_barrier", REPLICAS),
        ("tp_barrier", [[0], [1], [2], [3]]),
    ],
)
def test_barriers_of_groups(name, groups, tmp_path, monkeypatch):
    """All members are waited for, and nobody else: who is in another group is already in
    another call of all, which refuses to meet a barrier."""
    smp.init({"pipeline_parallel_degree": 2})

    for members in groups:
        for late in members:
            if smp.rank() in members:
                folder = tmp_path / f"{members} {late}"
                come_late(getattr(smp, name), members, late, folder, monkeypatch)
            smp.allgather(late, smp.WORLD)


@on_ranks(2)
def test_a_tensor_that_occurs_twice_arrives_as_one():
    smp.init()
    tensor = torch.ones(2)

    for first, second in smp.allgather([tensor, tensor], smp.WORLD):
        assert first is second


@on_ranks(2)
def test_what_this_rank_gave_comes_back_as_a_copy():
    smp.init()
    mine = torch.zeros(2)

    gathered = smp.allgather(mine, smp.WORLD)
    gathered[smp.rank()] += 1

    assert mine.tolist() == [0, 0]


@on_ranks(2)
def test_wrong_arguments_are_named():
    smp.init()
    itself, kind = smp.rank(), smp.RankType.WORLD_RANK

    with pytest.raises(ValueError, match="no WORLD_RANK 2; the group has 2 ranks, from 0"):
        smp.send(1, 2, kind)
    with pytest.raises(ValueError, match="no WORLD_RANK -1"):
        smp.recv_from(-1, kind)
    with pytest.raises(ValueError, match="no WORLD_RANK True"):
        smp.send(1, True, kind)
    with pytest.raises(ValueError, match="this rank itself, which would wait for ever"):
        smp.recv_from(itself, kind)
    with pytest.raises(TypeError, match=r"a type such as smp.RankType.PP_RANK, got 'PP'"):
        smp.send(1, 0, "PP")
    with pytest.raises(TypeError, match="a group such as smp.PP_GROUP, got 3"):
        smp.allgather(1, 3)
    with pytest.raises(TypeError, match="cannot pickle"):
        smp.send(threading.Lock(), 1 - itself, kind)
    smp.barrier()  # a refused object has sent nothing: the ranks still match


@pytest.mark.parametrize(
    "call",
    [
        lambda: smp.send(1, 0, smp.RankType.WORLD_RANK),
        lambda: smp.recv_from(0, smp.RankType.WORLD_RANK),
        lambda: smp.broadcast(1, smp.WORLD),
        lambda: smp.allgather(1, smp.WORLD),
        lambda: smp.barrier(),
    ],
    ids=["send", "recv_from", "broadcast", "allgather", "barrier"],
)
def test_before_init_the_missing_call_is_named(call, request):
    smp.reset()
    name = request.node.callspec.id

    with pytest.raises(RuntimeError, match=rf"smp\.{name}\(\) needs smp\.init\(\)"):
        call()


def test_one_rank_is_a_group_too():
    smp.reset()
    smp.init()

    assert smp.allgather({"a": 1}, smp.WORLD) == [{"a": 1}]
    smp.broadcast(1, smp.PP_GROUP)
    smp.barrier()
    smp.reset()


@st.composite
def tensors(draw) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.int16, torch.bool, torch.bfloat16]))
    tensor = torch.arange(int(torch.Size(shape).numel())).reshape(shape).to(dtype)
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor[:: draw(st.integers(1, 3))]
    return tensor


@given(st.recursive(tensors() | st.integers() | st.text(), st.lists, max_leaves=6))
def test_a_parcel_opens_to_what_was_put_in(obj):
    assert same(Parcel.of(obj).copy().open(), obj)


@given(tensors())
def test_a_dense_tensor_keeps_its_strides(tensor):
    got = Parcel.of(tensor).copy().open()

    dense = tensor.numel() > 1 and tensor.untyped_storage().nbytes() == (
        tensor.numel() * tensor.element_size()
    )
    wide = [i for i in range(tensor.dim()) if tensor.shape[i] > 1]
    if dense:
        assert [got.stride(i) for i in wide] == [tensor.stride(i) for i in wide]


def scaled_step(model: smp.DistributedModel) -> None:
    """One of smp.amp.GradScaler with gradients that are finite."""
    scaler = smp.amp.GradScaler("cpu")
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    with_gradients(model)
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))


def with_gradients(model: smp.DistributedModel) -> list[torch.nn.Parameter]:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return list(model.parameters())


# What is called, and what the error calls it.
COLLECTIVES = {
    "barrier": (lambda model: smp.barrier(), "smp.barrier"),
    "broadcast": (lambda model: smp.broadcast(1, smp.WORLD), "smp.broadcast"),
    "allgather": (lambda model: smp.allgather(1, smp.WORLD), "smp.allgather"),
    "send": (lambda model: smp.send(1, 1 - smp.rank(), smp.RankType.WORLD_RANK), "smp.send"),
    "recv_from": (
        lambda model: smp.recv_from(1 - smp.rank(), smp.RankType.WORLD_RANK),
        "smp.recv_from",
    ),
    "step": (lambda model: smp.step(lambda x: x)(torch.ones(1)), "@smp.step function"),
    "norm": (lambda model: model.clip_grad_norm_(1.0), "norm of the model's gradients"),
    "lamb": (
        lambda model: smp.optimizers.FusedLAMB(with_gradients(model)).step(),
        "smp.optimizers.FusedLAMB.step",
    ),
    "scaler": (scaled_step, "smp.amp.GradScaler"),
    "forward": (lambda model: model(torch.ones(1, 2)), "smp.DistributedModel"),
    "another": (lambda model: smp.DistributedModel(torch.nn.Linear(1, 1)), "DistributedModel"),
    "split": (torch.no_grad()(lambda model: model(torch.ones(1, 2))), "module '0'"),
}
PIPELINE, REPLICAS, SPLIT = (
    {"pipeline_parallel_degree": 2},
    {"ddp": True},
    {"tensor_parallel_degree": 2},
)
ON_REPLICAS = ["forward", "another"]
CONFIGURATIONS = [
    *[(PIPELINE, name) for name in COLLECTIVES if name not in (*ON_REPLICAS, "split")],
    *[(REPLICAS, name) for name in ("step", *ON_REPLICAS)],
    (SPLIT, "split"),
]


@on_ranks(2)
@pytest.mark.sample(10)
@pytest.mark.parametrize("backend", ["smddp", "gloo"])
@pytest.mark.parametrize("config, name", CONFIGURATIONS)
def test_a_forked_child_is_no_rank(config, name, backend):
    """Nobody would answer it; what needs no other rank works there."""
    smp.init({**config, "ddp_dist_backend": backend})
    with smp.tensor_parallelism(enabled=name == "split"):
        model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert model.training
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        try:
            COLLECTIVES[name][0](model)
        except RuntimeError as error:
            os.write(writes, f"{smp.rank()}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)

    rank = smp.rank()
    called = COLLECTIVES[name][1]
    assert re.match(rf"{rank}: .*{called}.*: this process was forked from rank {rank}", said)
    assert smp.allgather(rank, smp.WORLD) == [0, 1]


class Tagged(torch.Tensor): ...


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)


def tagged(value: torch.Tensor) -> torch.Tensor:
    value.tag = "of the script"
    return value


@pytest.mark.parametrize(
    "made, apart",
    [
        (lambda: torch.ones(2), True),
        (lambda: nn.Parameter(torch.ones(2), False), True),
        (lambda: torch.complex(torch.ones(2), torch.ones(2)), True),
        (lambda: torch.complex(torch.ones(2), torch.ones(2)).conj(), False),
        (lambda: torch.complex(torch.ones(2), torch.ones(2)).conj().imag, False),
        (lambda: torch.eye(2).to_sparse(), False),
        (lambda: torch.ones(2, device="meta"), False),
        (quantized, False),
        (lambda: torch.ones(2).as_subclass(Tagged), False),
        (lambda: tagged(torch.ones(2)), False),
        (lambda: tagged(nn.Parameter(torch.ones(2))), False),
        (lambda: 2.0, False),
    ],
)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_what_is_more_than_a_tensor_with_memory_is_pickled_as_it_is(made, apart):
    given = made()
    assert objects.travels_apart(given) is apart
    (got,) = Parcel.of([given]).open()
    assert type(got) is type(given)
    if isinstance(given, torch.Tensor):
        assert (got.dtype, got.shape, got.device) == (given.dtype, given.shape, given.device)
        assert got.requires_grad == given.requires_grad
        assert vars(got) == vars(given)
        if not given.is_meta:
            plain = [one.dequantize() if one.is_quantized else one for one in (got, given)]
            assert torch.equal(*[one.to_dense() for one in plain])


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor])
def test_what_was_on_a_device_arrives_on_this_ranks_if_it_has_one(
    here, there, kind, monkeypatch
):
    spec = Spec(torch.float32, (3, 2), (1, 0), True, kind is nn.Parameter, there)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: here)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: "meta")
    got = spec.rebuild(torch.ones(3, 2))
    assert got.device.type == ("meta" if here and there else "cpu")
    assert type(got) is kind and got.requires_grad and got.shape == (2, 3)


@pytest.mark.parametrize("said", ["Timed out waiting 1800000ms", "Connection closed by peer"])
def test_torchs_errors_with_another_rank_name_it(said, monkeypatch):
    """And what the rank was doing is told to nobody any more."""
    places = []
    monkeypatch.setattr(_core, "place", places.append)
    monkeypatch.setattr(bootstrap, "_misses_a_rank", False)
    late = "Timed" in said
    with pytest.raises(TimeoutError if late else objects.PeerLost) as caught:  # noqa: SIM117
        with objects.naming("smp.barrier()", 3):
            raise RuntimeError(said)
    told = f": {said}" if late else ": rank 3 is gone (its process ended or was killed)"
    assert str(caught.value).endswith(f"smp.barrier(){told}")
    assert bootstrap._misses_a_rank is not late
    assert places == ["smp.barrier()", None]
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_other_errors_of_an_exchange_are_what_they_are(monkeypatch):
    places = []
    monkeypatch.setattr(_core, "place", places.append)
    with pytest.raises(KeyboardInterrupt), objects.naming("smp.barrier()", 3):
        raise KeyboardInterrupt
    assert places == ["smp.barrier()", None]


def test_a_forked_child_of_a_rank_alone_needs_nobody(monkeypatch):
    smp.reset()
    smp.init()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert smp.allgather(3, smp.WORLD) == [3]
    smp.barrier()
    smp.broadcast(3, smp.TP_GROUP)
    monkeypatch.undo()
    smp.reset()


class Sent:
    """What is under way to a rank."""


@pytest.mark.parametrize("error", [None, "mismatch", "lost", "another"])
def test_who_leaves_a_call_tells_those_that_may_wait_for_it(error, monkeypatch):
    """Rank 1 of four, which has sent to rank 3; what nobody takes keeps its memory."""
    job = SimpleNamespace(
        boot=SimpleNamespace(rank=1),
        groups={"world": [0, 1, 2, 3]},
        calls=collective_calls.Calls(),
    )
    posted, waited, unmatched = [], [], []

    def post(job, parcel, member, tag, doing):
        posted.append((member, parcel.lost, parcel.call, tag))
        if member == 0:
            raise objects.PeerLost(doing, 0)
        return [Sent()]

    monkeypatch.setattr(objects, "_post", post)
    monkeypatch.setattr(objects, "_wait", lambda works, member, doing: waited.append(member))
    monkeypatch.setattr(objects, "_unmatched", unmatched)
    monkeypatch.setattr(bootstrap, "_misses_a_rank", False)
    call = objects._Together(job, "smp.barrier", smp.WORLD, "smp.barrier()")
    call.post(3, objects.NOTHING)
    raised = {
        None: None,
        "mismatch": collective_calls.CallMismatch("x"),
        "lost": objects.PeerLost("smp.barrier()", 2),
        "another": KeyboardInterrupt(),
    }[error]
    call.__exit__(type(raised), raised, None)

    lost = 2 if error == "lost" else None
    told = [0, 2] if error in ("mismatch", "lost") else []
    tag = objects.TAG_TOGETHER
    assert posted == [
        (3, None, call.call, tag),
        *[(member, lost, call.call, tag) for member in told],
    ]
    assert waited == ([3] if error is None else [])
    assert len(unmatched) == (0 if error is None else 1 + len(told[1:]))


def test_what_another_rank_is_lost_for_is_told_as_ones_own(monkeypatch):
    job = SimpleNamespace(
        boot=SimpleNamespace(rank=1), groups={"world": [0, 1]}, calls=collective_calls.Calls()
    )
    call = objects._Together(job, "smp.barrier", smp.WORLD, "smp.barrier()")
    lost = replace(objects.NOTHING, call=call.call, lost=7)
    monkeypatch.setattr(objects, "_take", lambda *_: lost)
    with pytest.raises(objects.PeerLost, match="rank 7 is gone") as caught:
        call.take(0)
    assert caught.value.rank == 7
