"""Spec: csrc/server/lineup.h: modules' collectives in a step, and what becomes of them when the
ranks of a TP_GROUP do not make the same calls."""

import os
import re
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import smp
from smp import _core
from smp.tensor_parallel.backward import order
from tests.models.partition import distributed
from tests.ranks import SEEDS, on_ranks
from tests.reference.compare import assert_close, gradients

WIDTH = 3
MICROBATCHES = 4


class Sum(torch.autograd.Function):
    """The sum over the TP_GROUP; of gradients, too: the loss is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, path: str) -> torch.Tensor:
        ctx.call = order.Call.of_module(path)
        return summed(x, ctx.call)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return summed(gradient, ctx.call.backward()), None


def summed(x: torch.Tensor, call: order.Call) -> torch.Tensor:
    out = x.clone()
    if not smp.is_tracing():  # which one rank does alone
        group = smp.get_tp_process_group()
        call.run(lambda is_async: dist.all_reduce(out, group=group, async_op=is_async))
    return out


class Shared(nn.Module):
    """A linear module whose outputs are summed over the tp_ranks."""

    def __init__(self, path: str):
        super().__init__()
        self.path = path
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        return self.share(torch.tanh(self.linear(x)))

    def share(self, x):
        return Sum.apply(x, self.path)


class Net(nn.Module):
    """Modules with collectives on both ranks, one of them called from within another's rank."""

    def __init__(self):
        super().__init__()
        self.near = Shared("near")
        self.far = Shared("far")
        self.quiet = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.again = Shared("again")

    def forward(self, x):
        x = x + self.far(self.near(x))
        x = x + self.near(self.quiet(x))
        return self.again(x) + self.far(x)


def make() -> Net:
    torch.manual_seed(7)
    return Net()


def on_two_stages(net: Net) -> smp.DistributedModel:
    owners = {"": 0, "near": 0, "far": 1, "quiet": 1, "again": 1}
    # A bucket for each parameter: gradients are exchanged among the modules' collectives.
    return distributed(net, owners, bucket_cap_mb=1e-6)


def data_of(tp_rank: int) -> torch.Tensor:
    torch.manual_seed(50 + tp_rank)
    return torch.randn(2 * MICROBATCHES, WIDTH, dtype=torch.float64)


def run_together(net: Net, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """All tp_ranks' forwards in one process, side by side, with their sums."""

    def shared(module: Shared, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        total = torch.stack([torch.tanh(module.linear(x)) for x in xs]).sum(0)
        return [total for _ in xs]

    def added(xs: list[torch.Tensor], ys: list[torch.Tensor]) -> list[torch.Tensor]:
        return [x + y for x, y in zip(xs, ys, strict=True)]

    xs = added(xs, shared(net.far, shared(net.near, xs)))
    xs = added(xs, shared(net.near, [net.quiet(x) for x in xs]))
    return added(shared(net.again, xs), shared(net.far, xs))


def loss_of(y: torch.Tensor, tp_rank: int) -> torch.Tensor:
    return (y * (1 + tp_rank)).square().sum()


@smp.step
def train(model, x):
    y = model(x)
    model.backward(loss_of(y, smp.tp_rank()))
    return y


def check_against_one_process(model: smp.DistributedModel, steps: int) -> None:
    """Several steps give what one process gives in each of them."""
    mine, size = smp.tp_rank(), smp.tp_size()
    net = make()
    xs = [data_of(t) for t in range(size)]
    want = run_together(net, xs)
    # Means: over the microbatches, and over the tp_ranks, whose parameters are whole.
    losses = torch.stack([loss_of(y, t) for t, y in enumerate(want)])
    losses.sum().div(MICROBATCHES * size).backward()
    for _ in range(steps):
        model.zero_grad()
        got = train(model, xs[mine]).concat()
        torch.testing.assert_close(got, want[mine].detach(), rtol=1e-12, atol=1e-12)
        assert_close(gradients(model), gradients(net), relative=1e-10)


def begin(tp: int = 2, pp: int = 2, **config: Any) -> None:
    os.environ["SMP_JITTER"] = str(11 + dist_rank())
    smp.init(
        {
            "pipeline_parallel_degree": pp,
            "tensor_parallel_degree": tp,
            "microbatches": MICROBATCHES,
            "active_microbatches": MICROBATCHES,
            **config,
        }
    )


def dist_rank() -> int:
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


@on_ranks(4)
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
@pytest.mark.parametrize("backend", ["smddp", "gloo"])
@pytest.mark.sample(2)
def test_collectives_of_microbatches_do_not_mix(pipeline, backend):
    begin(pipeline=pipeline, ddp_dist_backend=backend)
    check_against_one_process(on_two_stages(make()), 6)


@on_ranks(4)
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_collectives_follow_the_order_of_all_that_runs(pipeline):
    begin(pipeline=pipeline, deterministic_server=True)
    check_against_one_process(on_two_stages(make()), 6)


@on_ranks(2)
def test_without_a_pipeline_the_order_is_the_programs():
    begin(pp=1)
    check_against_one_process(smp.DistributedModel(make()), 2)


@on_ranks(2)
def test_a_call_belongs_to_the_step_that_runs():
    """Of a thread of the script nobody knows when it calls; a step's backward is its own."""
    begin(tp=1)
    net = make()
    model = on_two_stages(net)
    train(model, data_of(0))  # is traced
    said: list[str] = []

    def call_elsewhere() -> None:
        try:
            net.near(torch.ones(1, WIDTH, dtype=torch.float64))
        except RuntimeError as error:
            said.append(str(error))

    @smp.step(detach_outputs=False)
    def step(model, x):
        thread = threading.Thread(target=call_elsewhere)
        thread.start()
        thread.join()
        return net.near(x)

    outputs = step(model, data_of(0)).outputs
    if smp.pp_rank() == 0:
        assert len(said) == MICROBATCHES and "'near' was called by a thread" in said[0]
        with pytest.raises(RuntimeError, match="module 'near', .* outside it; use model"):
            outputs[0].sum().backward()


@on_ranks(2)
def test_a_call_is_told_by_its_microbatch_its_phase_and_how_often_its_task_made_it():
    begin(tp=1)
    net = make()
    model = on_two_stages(net)
    train(model, data_of(0))  # is traced
    told: list[tuple] = []
    numbers: set[int] = set()

    def call(path: str) -> None:
        number, *rest = _core.distributed_call(path)
        numbers.add(number)
        told.append((_core.current(), path, *rest))

    @smp.step
    def step(model, x):
        for path in ("a", "b", "a"):
            call(path)
        model.backward(model(x).square().sum())
        call("a")

    step(model, data_of(0))
    if smp.pp_rank() == 0:
        for i in range(MICROBATCHES):
            mine = [(path, *rest) for at, path, *rest in told if at == i]
            forward = [("a", i, 0, 0), ("b", i, 0, 0), ("a", i, 0, 1)]
            assert mine == [*forward, ("a", i, 1, 2)]
        assert len(numbers) == 4 * MICROBATCHES


def test_each_backward_of_a_call_has_a_key_of_its_own():
    call = order.Call("near", (5, 0, 0, 0))
    numbers = {5, *(call.backward()._made[0] for _ in range(3))}
    assert len(numbers) == 4


# ----------------------------------------------------------------------------- failures


class Moody(Net):
    """A net that can be told to leave out a call, or to raise in one, on one tp_rank."""

    def __init__(self):
        super().__init__()
        self.calls = dict.fromkeys(("near", "far", "again"), 0)
        for name in self.calls:
            getattr(self, name).register_forward_pre_hook(self._meet)

    tp_rank = -1  # of the mood
    left_out = raises_in = ""
    when = 0

    def _meet(self, module: Shared, args: tuple) -> None:
        if smp.is_tracing() or smp.tp_rank() != self.tp_rank:
            return
        now = self.calls[module.path] == self.when
        self.calls[module.path] += 1
        module.alone = now and module.path == self.left_out
        if now and module.path == self.raises_in:
            raise ValueError(f"no {module.path} today")


class Alone(Shared):
    alone = False

    def share(self, x):
        return x if self.alone else super().share(x)


def moody() -> Moody:
    torch.manual_seed(7)
    net = Moody()
    for name in net.calls:
        getattr(net, name).__class__ = Alone
    return net


@smp.step
def forward(model, x):
    return model(x)


def error_of_a_call_left_out(
    step: Any, left_out: str, when: int, tp_rank: int, **config: Any
) -> str:
    """What a step fails with in which one tp_rank leaves out a call; those after it work."""
    begin(**config)
    net = moody()
    model = on_two_stages(net)
    check_against_one_process(model, 1)
    net.calls = dict.fromkeys(net.calls, 0)
    net.tp_rank, net.left_out, net.when = tp_rank, left_out, when
    with pytest.raises(RuntimeError, match=r"\[SMP_ERR_MISMATCH\]") as caught:
        step(model, data_of(smp.tp_rank()))
    net.tp_rank = -1
    for name in net.calls:
        getattr(net, name).alone = False
    check_against_one_process(model, 2)
    return str(caught.value)


@on_ranks(4)
@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize(("left_out", "when"), [("far", 1), ("again", 3), ("near", 7)])
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.sample(6)
def test_a_call_that_one_rank_leaves_out_fails_the_step(backward, left_out, when, tp_rank):
    said = error_of_a_call_left_out(train if backward else forward, left_out, when, tp_rank)
    phase, call = "\\w+" if backward else "forward", "0" if left_out == "again" else "[01]"
    which = rf"module '{left_out}' \(microbatch [0-3], {phase}, call {call}, collective 0\)"
    assert re.search(which, said), said
    assert len(set(re.findall(r"rank \d \(tp_rank (\d), pp_rank \d\) has", said))) == 2, said


@on_ranks(4)
@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize("left_out", ["far", "again", "near"])
def test_a_call_that_is_left_out_fails_the_step_in_the_order_of_all_that_runs(
    left_out, tp_rank
):
    said = error_of_a_call_left_out(train, left_out, 3, tp_rank, deterministic_server=True)
    assert f"module '{left_out}' (microbatch" in said
    assert re.search(
        r"rank \d \(dp_rank 0, pp_rank (\d)\): microbatch .*; "
        r"rank \d \(dp_rank 1, pp_rank \1\): microbatch",
        said,
    ), said


class Straying(Net):
    """A net that takes one module for another of equal sizes, on one tp_rank."""

    tp_rank = -1  # that strays

    def forward(self, x):
        far = self.again if smp.tp_rank() == self.tp_rank else self.far
        x = x + far(self.near(x))
        x = x + self.near(self.quiet(x))
        return self.again(x) + self.far(x)


class Confused(Shared):
    """It makes another module's collective, on one tp_rank."""

    tp_rank = -1

    def share(self, x):
        return Sum.apply(x, "again" if smp.tp_rank() == self.tp_rank else self.path)


@on_ranks(4)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.sample(4)
def test_another_module_in_the_place_of_one_fails_the_step(within, tp_rank, deterministic):
    """Where sizes are equal, too: by a request for another, or within a request."""
    begin(deterministic_server=deterministic)
    torch.manual_seed(7)
    net = Straying()
    net.far.__class__ = Confused
    model = on_two_stages(net)
    check_against_one_process(model, 1)
    (net.far if within else net).tp_rank = tp_rank
    with pytest.raises(RuntimeError, match=r"\[SMP_ERR_MISMATCH\]") as caught:
        train(model, data_of(smp.tp_rank()))
    said = str(caught.value)
    assert "module 'far'" in said and "module 'again'" in said and "microbatch" in said
    assert len(set(re.findall(r"rank \d \([td]p_rank (\d), pp_rank \d\)", said))) == 2, said
    net.far.tp_rank = net.tp_rank = -1
    check_against_one_process(model, 2)


@on_ranks(4)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize("raises_in", ["far", "near"])
@pytest.mark.sample(4)
def test_after_a_failure_on_one_rank_the_next_step_works(raises_in, tp_rank, deterministic):
    begin(deterministic_server=deterministic)
    net = moody()
    model = on_two_stages(net)
    check_against_one_process(model, 1)
    for when in range(2 * MICROBATCHES):
        net.calls = dict.fromkeys(net.calls, 0)
        net.tp_rank, net.raises_in, net.when = tp_rank, raises_in, when
        with pytest.raises(ValueError, match=f"no {raises_in} today"):
            train(model, data_of(smp.tp_rank()))
        net.tp_rank = -1
        check_against_one_process(model, 1)


@on_ranks(4)
def test_what_becomes_of_a_collective_is_told():
    """One that the ranks begin with other shapes fails the step: it gives no result."""
    begin()
    model = on_two_stages(make())
    check_against_one_process(model, 1)
    rows = MICROBATCHES * (1 + smp.tp_rank())
    with pytest.raises(RuntimeError, match="MISMATCH"):
        train(model, torch.ones(rows, WIDTH, dtype=torch.float64))
    check_against_one_process(model, 1)


# ------------------------------------------------------------------------------- at length


@on_ranks(6, timeout_s=300)
@pytest.mark.stress
@pytest.mark.parametrize("placement", ["cluster", "spread", "TDP"])
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_three_tp_ranks_and_two_stages(pipeline, placement):
    """Followers in collectives of two stages at once."""
    begin(tp=3, pipeline=pipeline, placement_strategy=placement)
    check_against_one_process(on_two_stages(make()), 15 * SEEDS)
