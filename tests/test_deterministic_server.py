"""Spec: tensor.md 1.7: with ``deterministic_server`` modules that call collectives of their own
over data-parallel ranks give what one process gives, and other programs on other ranks are an
error."""

import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

import smp
from smp import _core
from smp.tensor_parallel.backward import sequence
from tests.models.modules import module_of
from tests.models.partition import distributed
from tests.models.steps import model_outputs
from tests.ranks import SEEDS, on_ranks
from tests.reference.compare import assert_close, gradients

WIDTH = 3
MICROBATCHES = 4
ROWS = 3  # a microbatch of dp_rank 0 has; of the next one more


def summed(x: torch.Tensor) -> torch.Tensor:
    """The sum over the DP_GROUP, by a collective that holds the baton."""
    out = x.clone()
    dist.all_reduce(out, group=smp.get_dp_process_group())
    return out


class SumOverReplicas(torch.autograd.Function):
    """The loss is the mean of the replicas' losses, so gradients are summed, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return summed(gradient)


class SharedNorm(nn.Module):
    """What nn.SyncBatchNorm does, which refuses tensors of the CPU."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width, dtype=torch.float64) + 0.5)
        self.register_buffer("running_mean", torch.zeros(width, dtype=torch.float64))
        self.shares = True

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return SumOverReplicas.apply(x) if self.shares else x

    def forward(self, x):
        count = torch.full((1,), float(len(x)), dtype=torch.float64)
        count = self.total(count)
        mean = self.total(x.sum(0)) / count
        var = self.total((x - mean).square().sum(0)) / count
        with torch.no_grad():
            self.running_mean.mul_(0.9).add_(mean, alpha=0.1)
        return (x - mean) * torch.rsqrt(var + 1e-5) * self.weight


@module_of(
    lambda: {"linear": nn.Linear(WIDTH, WIDTH, dtype=torch.float64), "norm": SharedNorm()}
)
def Block(self, x):
    return torch.tanh(self.norm(self.linear(x)))


@module_of(
    lambda: {
        "near": Block(),
        "far": Block(),
        "quiet": nn.Linear(WIDTH, WIDTH, dtype=torch.float64),
        "again": Block(),
    }
)
def Net(self, x):
    """Modules with collectives on both stages, called forth and back between them."""
    x = x + self.far(self.near(x))
    x = x + self.quiet(x)
    return self.again(x) + self.far(x)


def make(kind: type[Net] = Net) -> Any:
    torch.manual_seed(7)
    return kind()


def on_two_stages(net: Net) -> smp.DistributedModel:
    owners = {"": 0, "near": 0, "far": 1, "quiet": 1, "again": 1}
    # A bucket for each parameter: none goes among the modules' collectives.
    return distributed(net, owners, bucket_cap_mb=1e-6, broadcast_buffers=False)


def data_of(dp_rank: int, step: int = 0) -> torch.Tensor:
    """Samples of the replica, other numbers of them."""
    torch.manual_seed(50 + dp_rank + 10 * step)
    return torch.randn((ROWS + dp_rank) * MICROBATCHES, WIDTH, dtype=torch.float64)


train = smp.step(model_outputs)


@smp.step
def forward(model, x):
    return model(x)


class Reference:
    """All replicas' samples in one process, microbatch by microbatch."""

    def __init__(self) -> None:
        self.net = make()
        for module in self.net.modules():
            if isinstance(module, SharedNorm):
                module.shares = False

    def train(self, step: int, dp_size: int) -> list[torch.Tensor]:
        """Gradients of the mean loss; the replicas' outputs."""
        self.net.zero_grad()
        pieces = [data_of(dp, step).chunk(MICROBATCHES) for dp in range(dp_size)]
        outputs: list[list[torch.Tensor]] = [[] for _ in range(dp_size)]
        for xs in zip(*pieces, strict=True):
            ys = self.net(torch.cat(xs)).split([len(x) for x in xs])
            loss = sum(y.square().mean() for y in ys) / (dp_size * MICROBATCHES)
            loss.backward()
            for output, y in zip(outputs, ys, strict=True):
                output.append(y.detach())
        return [torch.cat(output) for output in outputs]


def check_step(model: smp.DistributedModel, reference: Reference, step: int) -> None:
    """One step gives what one process gives."""
    model.zero_grad()
    got = train(model, data_of(smp.dp_rank(), step)).concat()
    want = reference.train(step, smp.dp_size())
    torch.testing.assert_close(got, want[smp.dp_rank()], rtol=1e-10, atol=1e-10)
    check_state(model, reference)


def check_state(model: smp.DistributedModel, reference: Reference) -> None:
    assert_close(gradients(model), gradients(reference.net), relative=1e-10)
    buffers = dict(reference.net.named_buffers())
    assert_close(dict(model.local_named_buffers()), buffers, relative=1e-10)


def begin(**config: Any) -> None:
    os.environ["SMP_JITTER"] = str(11 + int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": MICROBATCHES,
            "active_microbatches": MICROBATCHES,
            "deterministic_server": True,
            "ddp": True,
            **config,
        }
    )


@on_ranks(4)
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
@pytest.mark.parametrize("tp", [1, 2])
def test_statistics_are_those_of_all_replicas(pipeline, tp):
    begin(pipeline=pipeline, tensor_parallel_degree=tp)
    model, reference = on_two_stages(make()), Reference()
    for step in range(6):
        check_step(model, reference, step)


# ----------------------------------------------------------------------------- failures


class Moody(Net):
    """A net that goes another way in one call on one replica, or raises there."""

    dp_rank = -1  # of the mood
    mood = ""
    at = 0  # in the forward of this number of the step
    forwards = 0

    def forward(self, x):
        now = smp.dp_rank() == self.dp_rank and self.forwards == self.at
        self.forwards += 1
        if now and self.mood == "raises":
            raise ValueError("not today")
        x = x + self.far(self.near(x))
        if not (now and self.mood == "leaves out"):
            x = x + self.quiet(x)
        if now and self.mood == "calls another":
            return self.quiet(x) + self.far(x)
        return self.again(x) + self.far(x)

    def become(self, dp_rank: int, mood: str, at: int = 0) -> None:
        self.dp_rank, self.mood, self.at, self.forwards = dp_rank, mood, at, 0


def moody(**config: Any) -> tuple[Moody, smp.DistributedModel, Reference]:
    begin(**config)
    net = make(Moody)
    model, reference = on_two_stages(net), Reference()
    check_step(model, reference, 0)
    return net, model, reference


def check_next(model: smp.DistributedModel, reference: Reference) -> None:
    """The step that failed has left nothing: the next one is as if it had not been."""
    for step in (1, 2):
        check_step(model, reference, step)


@on_ranks(4)
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("dp_rank", [0, 1])
@pytest.mark.parametrize("mood", ["leaves out", "calls another"])
@pytest.mark.sample(4)
def test_other_programs_are_an_error_that_names_both(mood, dp_rank, trains):
    net, model, reference = moody()
    for at in (0, MICROBATCHES - 1):
        net.become(dp_rank, mood, at)
        with pytest.raises(RuntimeError, match=r"\[SMP_ERR_MISMATCH\]") as caught:
            (train if trains else forward)(model, data_of(smp.dp_rank()))
        said = str(caught.value)
        assert re.search(
            r"rank \d \(dp_rank 0, pp_rank (\d)\): microbatch .*; "
            r"rank \d \(dp_rank 1, pp_rank \1\): microbatch",
            said,
        ), said
        assert "module 'quiet'" in said and "module 'again'" in said
    net.become(-1, "")
    check_next(model, reference)


@on_ranks(4)
@pytest.mark.parametrize("dp_rank", [0, 1])
def test_after_a_failure_of_one_replica_the_next_step_works(dp_rank):
    net, model, reference = moody()
    for at in range(MICROBATCHES):
        net.become(dp_rank, "raises", at)
        with pytest.raises(ValueError, match="not today"):
            train(model, data_of(smp.dp_rank()))
        with pytest.raises(ValueError, match="not today"), torch.no_grad():
            net.become(dp_rank, "raises", at)
            forward(model, data_of(smp.dp_rank()))
    net.become(-1, "")
    check_next(model, reference)


class Skipping(SharedNorm):
    """Leaves out its last collective in a forward, as data may decide."""

    skips_at = -1  # in the call of this number
    calls = 0

    def total(self, x):
        self.calls += 1
        if self.calls == 3 * self.skips_at:
            return x
        return super().total(x)


class SkippingNet(Net):
    def __init__(self):
        super().__init__()
        self.far.norm.__class__ = Skipping


@on_ranks(4)
@pytest.mark.parametrize("dp_rank", [0, 1])
@pytest.mark.parametrize("at", [1, 2 * MICROBATCHES], ids=["first", "last"])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.sample(4)
def test_a_collective_that_one_replica_leaves_out_is_an_error(dp_rank, at, trains):
    begin()
    net = make(SkippingNet)
    model, reference = on_two_stages(net), Reference()
    check_step(model, reference, 0)
    net.far.norm.calls, net.far.norm.skips_at = 0, at if smp.dp_rank() == dp_rank else -1
    with pytest.raises(RuntimeError, match=r"\[SMP_ERR_MISMATCH\]") as caught:
        (train if trains else forward)(model, data_of(smp.dp_rank()))
    said = str(caught.value)
    # Who comes later says which: the other has called another, or has ended its step already.
    ended = " has ended the step without"
    for other in (0, 1):
        at_once = rf"\(dp_rank {other}, pp_rank 1\)(.{{,60}}microbatch|{ended})"
        assert re.search(at_once, said), said[:400]
    assert "'torch.distributed' (microbatch" in said
    assert ended in said or "module 'far" in said
    net.far.norm.skips_at = -1
    check_next(model, reference)


class Faulty(Block):
    """Raises between its collectives, on one rank, while the others wait in them."""

    raises = False
    calls = 0

    def forward(self, x):
        self.calls = call = self.calls + 1
        x = self.norm(self.linear(x))
        if self.raises and call == 3:
            raise ValueError("not in here")
        return torch.tanh(self.norm(x))


class FaultyNet(Net):
    def __init__(self):
        super().__init__()
        self.far = Faulty()


@on_ranks(4)
@pytest.mark.parametrize("dp_rank", [0, 1])
def test_who_waits_in_a_collective_of_a_module_that_failed_fails_with_it(dp_rank):
    begin()
    net = make(FaultyNet)
    model = on_two_stages(net)
    x = data_of(smp.dp_rank())
    want = forward(model, x).concat()
    for _ in range(3):
        net.far.raises, net.far.calls = smp.dp_rank() == dp_rank, 0
        with pytest.raises(ValueError, match="not in here"):
            train(model, x)
        net.far.raises = False
        torch.testing.assert_close(forward(model, x).concat(), want)


@on_ranks(4)
def test_the_traced_run_fails_on_all_ranks():
    begin()
    net = make(FaultyNet)
    model = on_two_stages(net)
    net.far.raises, net.far.calls = smp.dp_rank() == 1, 1
    with pytest.raises(ValueError, match="not in here"):
        train(model, data_of(smp.dp_rank()))
    net.far.raises = False
    train(model, data_of(smp.dp_rank()))


@on_ranks(4)
@pytest.mark.parametrize("backend", ["smddp", "gloo"])
@pytest.mark.parametrize("tp", [1, 2])
def test_without_the_option_a_module_that_calls_a_collective_says_what_to_set(tp, backend):
    begin(deterministic_server=False, tensor_parallel_degree=tp, ddp_dist_backend=backend)
    model = on_two_stages(make())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"module 'near\.norm' \(SharedNorm\)") as caught:
            train(model, data_of(smp.dp_rank()))
        assert "over ranks 0, " in str(caught.value)
        assert "set 'deterministic_server': True" in str(caught.value)
        assert not model.partitioned
    for module in model.module.modules():
        module.shares = False
    train(model, data_of(smp.dp_rank()))


@module_of(lambda call: {"call": call, "linear": nn.Linear(WIDTH, WIDTH)})
def Calling(self, x):
    """Calls one of torch.distributed's collectives."""
    x = self.linear(x)
    self.call(x.detach().clone())
    return x


CALLS = {
    "all_reduce": lambda x, group: dist.all_reduce(x, group=group),
    "async": lambda x, group: dist.all_reduce(x, group=group, async_op=True).wait(),
    "functional": lambda x, group: functional.all_reduce(x, "sum", group) + 1,
    "all_gather": lambda x, group: dist.all_gather([x.clone(), x.clone()], x, group=group),
    "barrier": lambda x, group: dist.barrier(group),
    "monitored_barrier": lambda x, group: group.monitored_barrier(),
    "object": lambda x, group: dist.all_gather_object([None, None], 1, group=group),
    "recv": lambda x, group: dist.recv(x, group=group),
}


@on_ranks(4)
@pytest.mark.parametrize("backend", ["smddp", "gloo"])
@pytest.mark.parametrize("call", CALLS)
def test_whatever_a_module_calls_is_refused(call, backend):
    begin(deterministic_server=False, ddp_dist_backend=backend)
    group = smp.get_dp_process_group()
    with smp.delay_param_initialization(enabled=call == "all_reduce"):
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Calling(lambda x: CALLS[call](x, group)))
    model = smp.DistributedModel(net)
    with pytest.raises(RuntimeError, match=r"module '1' \(Calling\) calls a collective"):
        forward(model, torch.ones(8, WIDTH))


@on_ranks(4)
@pytest.mark.parametrize("option", [False, True])
def test_a_collective_with_ranks_that_run_other_parts_is_refused(option):
    begin(deterministic_server=option)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Calling(dist.all_reduce))
    model = smp.DistributedModel(net)
    with pytest.raises(RuntimeError, match="over ranks 0, 1, 2, 3, of which some run other"):
        forward(model, torch.ones(8, WIDTH))


@on_ranks(2)
def test_a_collective_of_this_rank_alone_is_let_be():
    begin(deterministic_server=False)
    groups = [dist.new_group([rank]) for rank in range(2)]
    net = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Calling(lambda x: dist.all_reduce(x, group=groups[smp.rank()]))
    )
    model = smp.DistributedModel(net)
    forward(model, torch.ones(8, WIDTH))


@on_ranks(4)
def test_a_collective_of_the_step_function_is_refused():
    begin(deterministic_server=False)

    @smp.step
    def average(model, x):
        y = model(x).mean()
        dist.all_reduce(y, group=smp.get_dp_process_group())
        return y

    model = smp.DistributedModel(nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)))
    with pytest.raises(RuntimeError, match="the step function calls a collective") as caught:
        average(model, torch.ones(8, WIDTH))
    assert "'deterministic_server': True" in str(caught.value)


# ---------------------------------------------------------------------- nn.SyncBatchNorm


@module_of(lambda: {"linear": nn.Linear(WIDTH, WIDTH), "norm": nn.SyncBatchNorm(WIDTH)})
def WithSyncBatchNorm(self, x):
    return self.norm(self.linear(x))


class OwnSyncBatchNorm(nn.SyncBatchNorm):
    pass


def split_sync_batch_norm() -> tuple[WithSyncBatchNorm, smp.DistributedModel]:
    net = WithSyncBatchNorm()
    return net, distributed(net, {"linear": 0, "norm": 1})


@on_ranks(4)
@pytest.mark.parametrize("kind", [nn.SyncBatchNorm, OwnSyncBatchNorm])
def test_sync_batch_norm_in_a_pipeline_says_what_to_set(kind):
    begin(deterministic_server=False)
    net = WithSyncBatchNorm()
    net.norm = kind(WIDTH)
    model = smp.DistributedModel(net)
    with pytest.raises(RuntimeError, match=rf"module 'norm' \({kind.__name__}\)") as caught:
        forward(model, torch.ones(8, WIDTH))
    assert "'deterministic_server': True" in str(caught.value)


@on_ranks(4)
@pytest.mark.parametrize("prescaled", [False, True])
def test_sync_batch_norm_is_over_the_ranks_of_its_stage(prescaled):
    begin(tensor_parallel_degree=2 if prescaled else 1, prescaled_batch=prescaled)
    net, model = split_sync_batch_norm()
    model.eval()  # in training torch refuses tensors of the CPU
    x = torch.randn(8, WIDTH)
    forward(model, x)
    group = smp.get_rdp_process_group() if prescaled else smp.get_dp_process_group()
    assert net.norm.process_group is group


@on_ranks(4)
@pytest.mark.parametrize("delayed", [False, True])
def test_sync_batch_norm_is_traced_by_itself(delayed):
    """What then refuses tensors of the CPU is the stage that runs it."""
    begin()
    with smp.delay_param_initialization(enabled=delayed):
        _, model = split_sync_batch_norm()
    with pytest.raises(ValueError, match="to be on GPU") as caught:
        forward(model, torch.ones(8, WIDTH))
    assert model.partitioned
    assert any("in module 'norm', microbatch" in note for note in caught.value.__notes__)


@on_ranks(4)
def test_join_is_refused():
    begin()
    model = on_two_stages(make())
    with pytest.raises(NotImplementedError, match="as many batches"), model.join():
        pass


@on_ranks(4)
def test_a_group_of_other_stages_is_an_error():
    begin()
    net = WithSyncBatchNorm()
    net.norm = nn.SyncBatchNorm(WIDTH, process_group=smp.get_pp_process_group())
    model = smp.DistributedModel(net)
    with pytest.raises(ValueError, match="module 'norm' .* run other parts of the model"):
        forward(model, torch.ones(8, WIDTH))


@on_ranks(2)
@pytest.mark.parametrize("given", [False, True])
def test_one_replica_needs_no_order(given):
    """Its group is the stage's also where the script has named all ranks."""
    begin(deterministic_server=False)
    net, model = split_sync_batch_norm()
    if given:
        net.norm.process_group = dist.group.WORLD
    model.eval()
    forward(model, torch.ones(8, WIDTH))
    assert net.norm.process_group is smp.get_dp_process_group()


@on_ranks(2)
def test_without_a_pipeline_nothing_is_to_be_set():
    begin(pipeline_parallel_degree=1, deterministic_server=False)
    model, reference = smp.DistributedModel(make(), broadcast_buffers=False), Reference()
    for step in range(2):
        check_step(model, reference, step)


# ------------------------------------------------------------------------------- at length


@on_ranks(6, timeout_s=300)
@pytest.mark.stress
@pytest.mark.parametrize("placement", ["cluster", "spread", "PDT"])
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_three_replicas_and_two_stages(pipeline, placement):
    begin(pipeline=pipeline, placement_strategy=placement)
    model, reference = on_two_stages(make()), Reference()
    for step in range(15 * SEEDS):
        check_step(model, reference, step)


def test_collectives_of_a_backend_that_cannot_end_them_are_the_jobs_end(monkeypatch):
    """Unless this rank has begun as many as the others; what those raise is over."""
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    waited = []

    def wait() -> None:
        waited.append(None)
        raise RuntimeError("two that differ")

    group = sequence._Group.__new__(sequence._Group)
    group.group, group.begun = object(), 3
    group._works = [SimpleNamespace(wait=wait), SimpleNamespace(wait=wait)]
    group.make_up(3)
    assert len(waited) == 2
    with pytest.raises(RuntimeError, match="the backend 'gloo' cannot end: this job cannot go"):
        group.make_up(4)


@pytest.mark.parametrize("lost", [0, 1])
def test_with_a_rank_that_is_gone_no_collective_is_waited_for(lost, monkeypatch):
    monkeypatch.setattr(_core, "counters", lambda: {"lost": lost})
    monkeypatch.setattr(sequence, "_process_groups", lambda: pytest.fail("asked for groups"))
    assert sequence.finish_failed_step() is None
