"""The pool of memory for messages: how large it is, and that nothing drains it."""

import contextlib
import gc
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import smp
from smp import _core
from smp.partitioning.tracing import trace
from smp.runtime import pool
from tests import accelerator
from tests.devices import DEVICES, use
from tests.models.modules import in_backward, module_of
from tests.models.partition import distributed
from tests.models.steps import model_outputs
from tests.ranks import on_ranks

WIDTH = 1024
SAMPLES = 16
ONE = 4 * WIDTH * SAMPLES  # bytes of one activation of a microbatch


@module_of(
    lambda: {
        "near": nn.Linear(WIDTH, WIDTH),
        "far": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
    }
)
def Chain(self, x):
    """One layer here, two there."""
    return self.far(torch.relu(self.near(x)))


def begin(microbatches: int = 4, **config) -> smp.DistributedModel:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": microbatches, **config})
    return wrapped()


def wrapped() -> smp.DistributedModel:
    torch.manual_seed(0)
    net = Chain()
    return distributed(net, {"": 0, "far": 1})


train = smp.step(model_outputs)


def in_use_on_both() -> list[int]:
    """Bytes of each rank's pool that somebody holds; taken when no step is under way."""
    gc.collect()
    smp.barrier()
    return smp.allgather(_core.counters()["pool_in_use"], smp.WORLD)


@on_ranks(2)
def test_outputs_that_are_kept_do_not_stay_in_the_pool():
    model = begin()
    kept = [train(model, torch.randn(4 * SAMPLES, WIDTH)) for _ in range(5)]

    assert in_use_on_both() == [0, 0]
    assert all(torch.isfinite(y.concat()).all() for y in kept)


@on_ranks(2)
def test_after_the_first_step_the_pool_is_large_enough_and_no_larger():
    model = begin(microbatches=8, active_microbatches=3)
    counters = []
    for _ in range(4):
        train(model, torch.randn(8 * SAMPLES, WIDTH))
        counters.append(_core.counters())

    assert [c["pool_fallbacks"] for c in counters] == [0] * 4
    assert counters[-1]["pool_high"] >= ONE
    assert counters[-1]["pool_made"] <= (1 + 3 + 1) * ONE + (4 << 20)
    last = counters[-1]
    assert last["pool_in_use"] <= last["pool_high"] <= last["pool_made"] <= last["pool_size"]
    assert last["pool_blocks"] > counters[0]["pool_blocks"] > 0 == last["device_tensors"]
    sent = [(messages, size) for _, messages, size in _core.peers()]
    assert sent[smp.pp_rank()] == (0, 0)
    assert tuple(map(sum, zip(*sent, strict=True))) == (last["messages"], last["bytes"])


@on_ranks(2)
@pytest.mark.parametrize("device", DEVICES[1:])
def test_no_pages_are_made_ahead_for_tensors_of_a_device(device):
    if device == accelerator.NAME:
        accelerator.use_driver()
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 8, "comm_pool_bytes": 64 << 20})
    on = use(device)
    model = distributed(Chain().to(on), {"": 0, "far": 1})
    for _ in range(2):
        train(model, torch.randn(256 * SAMPLES, WIDTH).to(on))  # 16 MiB

    counters = _core.counters()
    ahead = counters["pool_made"] - counters["pool_high"]
    assert ahead <= counters["pinned_bytes"] + (4 << 20)


@on_ranks(2)
def test_shapes_that_grow_after_the_first_step_fit():
    model = begin()
    for factor in (1, 2, 16):
        train(model, torch.randn(4 * SAMPLES * factor, WIDTH))

    assert _core.counters()["pool_fallbacks"] == 0


@on_ranks(2)
def test_a_limit_is_kept_and_what_does_not_fit_is_counted():
    model = begin(comm_pool_bytes=1 << 20)
    for _ in range(2):
        y = train(model, torch.randn(4 * 512, WIDTH))

    assert y.concat().shape == (4 * 512, WIDTH)
    counters = _core.counters()
    assert counters["pool_fallbacks"] > 0
    assert counters["pool_made"] <= counters["pool_size"] == 1 << 20


@pytest.mark.parametrize("active", [1, 3])
def test_the_expected_bytes_are_those_that_cross_by_the_microbatches_under_way(active):
    """A Sequential sends consecutive children of one rank one request; gradients pass."""
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    seen = trace(net, lambda: net(torch.ones(2, 8)))
    rank_of = {"": 0, "0": 0, "1": 1, "2": 1, "3": 0}
    one = 2 * 8 * 4

    assert pool.expected_bytes(net, rank_of, seen, 2, active) == [
        active * one + one,
        active * one + one,
    ]


def test_what_goes_into_a_run_of_a_sequential_is_its_first_childs():
    net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2), nn.Linear(2, 16))
    seen = trace(net, lambda: net(torch.ones(2, 8)))
    into, out = 2 * 4 * 4, 2 * 16 * 4  # of the second and third, on rank 1

    got = pool.expected_bytes(net, {"": 0, "0": 0, "1": 1, "2": 1}, seen, 2, 1)
    assert got == [into + out, out + into]
    got = pool.expected_bytes(net, {"": 0, "0": 0, "1": 1, "2": 1}, seen, 2, 3)
    assert got == [3 * into + out, 3 * out + into]


@module_of(
    lambda: {"far": nn.Linear(8, 4), "beside": nn.Linear(8, 8), "unused": nn.Linear(8, 8)}
)
def Twice(self, x):
    """Calls one child twice, and one not at all."""
    return self.far(self.beside(x)) + self.far(x)


def test_each_call_counts_and_what_is_not_called_does_not():
    net = Twice()
    seen = trace(net, lambda: net(torch.ones(2, 8)))
    into, out = 2 * 8 * 4, 2 * 4 * 4

    got = pool.expected_bytes(net, {"": 0, "far": 1, "beside": 0, "unused": 1}, seen, 2, 3)
    assert got == [3 * 2 * into + 2 * out, 3 * 2 * out + 2 * into]


@on_ranks(2)
@pytest.mark.parametrize(
    ("microbatches", "active", "under_way"), [(4, {"active_microbatches": 1}, 1), (2, {}, 2)]
)
def test_models_expect_their_bytes_together(monkeypatch, microbatches, active, under_way):
    told: list[int] = []
    monkeypatch.setattr(_core, "expect_in_pool", told.append)
    models = [begin(microbatches, **active)]
    train(models[0], torch.randn(microbatches * SAMPLES, WIDTH))
    models.append(wrapped())
    train(models[1], torch.randn(microbatches * SAMPLES, WIDTH))

    assert told == [(under_way + 1) * ONE, 2 * (under_way + 1) * ONE]


class Trouble(Exception):
    pass


@on_ranks(2)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_failed_step_leaves_nothing_in_the_pool(phase):
    """What was on its way to other microbatches is given back; what comes after the step's
    end is, when the next one looks at its messages."""
    model = begin()
    train(model, torch.randn(4 * SAMPLES, WIDTH))
    calls = []

    def refuse(gradient):
        raise Trouble

    def fail_later(module, inputs, output):
        calls.append(None)
        if len(calls) < 3:
            return output
        return refuse(output) if phase == "forward" else in_backward(output, refuse)

    hook = model.module.far.register_forward_hook(fail_later)
    for _ in range(3):
        calls.clear()
        with pytest.raises(Trouble):
            train(model, torch.randn(4 * SAMPLES, WIDTH))
    hook.remove()

    train(model, torch.randn(4 * SAMPLES, WIDTH))
    assert in_use_on_both() == [0, 0]


@contextlib.contextmanager
def address_space_left(room: int) -> Iterator[None]:
    """Only so many bytes more can be mapped inside, as after ``ulimit -v``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@on_ranks(2)
def test_pools_fit_into_a_limited_address_space():
    """All that a rank maps, and leave room for its tensors."""
    room = 2 << 30
    with address_space_left(room):
        model = begin()
        smp.step(lambda model, x: model(x))(model, torch.ones(4 * SAMPLES, WIDTH))
        torch.distributed.all_reduce(torch.ones(1 << 20))

        assert 1 << 20 <= _core.counters()["pool_size"] <= room / 8 / 2


@on_ranks(2)
@pytest.mark.parametrize("mib, doing", [(3 << 20, "preparing"), (1400, "connecting")])
def test_a_pool_that_finds_no_room_is_named_with_its_size(mib, doing):
    told = rf"{doing} .* {mib} MiB here.*comm_pool_bytes"
    with address_space_left(2 << 30), pytest.raises(MemoryError, match=told):
        begin(comm_pool_bytes=mib << 20)
