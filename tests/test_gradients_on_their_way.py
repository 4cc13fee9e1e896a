"""What the exchange of gradients holds: their dtype, and how much memory.

The reference is each replica by itself in this process; gradients are summed in rank order
and divided once.
"""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import smp
from smp.data_parallel import reduction
from smp.runtime_state import CurrentStep
from tests.models.modules import module_of
from tests.models.steps import mean_square, train_mean_square
from tests.ranks import on_ranks
from tests.reference.compare import assert_close, assert_same_bits, gradients
from tests.test_data_parallel import averaged, batch_of, of_replicas

WIDTH = 6
OPTIONS = [
    {"bucket_cap_mb": 1e-4},
    {"bucket_cap_mb": 1e-4, "overlapping_allreduce": False},
    {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True},
]
NAMES = ["overlapping", "after backward", "views"]


class _Widened(torch.autograd.Function):
    """A weight in float32, whose gradient stays so."""

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        return weight.float()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class HalfLinear(nn.Module):
    """Weights of bfloat16, gradients of float32."""

    def __init__(self, rows: int, columns: int, told: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns).bfloat16())
        self.weight.grad_dtype = torch.float32 if told else None

    def forward(self, x: Tensor) -> Tensor:
        return x @ _Widened.apply(self.weight).t()


def half_model() -> nn.Module:
    """Parameters of bfloat16 and of float32; all gradients are float32."""
    torch.manual_seed(4)
    return nn.Sequential(HalfLinear(7, WIDTH), nn.Tanh(), nn.Linear(7, 5), HalfLinear(3, 5))


def sums_of_replicas(make_model, step: int = 0) -> dict[str, Tensor | None]:
    replicas = [make_model() for _ in range(smp.dp_size())]
    for rank, replica in enumerate(replicas):
        for x in batch_of(rank, step).split(2):
            (replica(x).square().mean() / 2).backward()
    with torch.no_grad():
        for replica in replicas:
            for parameter in replica.parameters():
                assert parameter.grad.dtype == torch.float32
    return {
        name: sum(replica.get_parameter(name).grad for replica in replicas) / smp.dp_size()
        for name, _ in replicas[0].named_parameters()
    }


# ------------------------------------------------------------------------------------ dtype


@pytest.mark.parametrize("backend", ["gloo", "smddp"])
@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@on_ranks(2, 4)
def test_wide_gradients_of_half_parameters_keep_their_bits(options, backend):
    smp.init(
        {
            "pipeline_parallel_degree": smp.job.bootstrap.mpi_size() // 2,
            "ddp": True,
            "ddp_dist_backend": backend,
            "microbatches": 2,
        }
    )
    model = smp.DistributedModel(half_model(), **options)
    step = smp.step(mean_square)
    for number in range(2):  # the second one sends in backward
        model.zero_grad()
        step(model, batch_of(smp.dp_rank(), number))
        want = sums_of_replicas(half_model, number)
        assert_same_bits(gradients(model), {name: want[name] for name in gradients(model)})


@on_ranks(2)
def test_a_hook_gets_buckets_of_the_gradients_dtype():
    smp.init({"ddp": True, "microbatches": 2})
    model = smp.DistributedModel(half_model(), bucket_cap_mb=1e-4)
    seen = []

    def hook(state, bucket):
        seen.append(bucket.buffer().dtype)
        assert all(g.dtype == torch.float32 for g in bucket.gradients())
        return default_hooks.allreduce_hook(smp.get_dp_process_group(), bucket)

    model.register_comm_hook(None, hook)
    smp.step(mean_square)(model, batch_of(smp.dp_rank()))
    assert set(seen) == {torch.float32} and len(seen) > 1
    assert_same_bits(gradients(model), sums_of_replicas(half_model))


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@on_ranks(2)
def test_a_gradient_wider_than_was_told_is_an_error_on_all(options):
    """Not rounded without a word; a replica without that gradient cannot know of it."""
    smp.init({"ddp": True})
    net = nn.Sequential(nn.Linear(WIDTH, 4), HalfLinear(5, 4, told=False), nn.Linear(5, 2))
    if smp.rank() == 1:
        net[1].weight.grad_dtype = torch.bfloat16
    model = smp.DistributedModel(net, **options)
    with pytest.raises(TypeError, match="'1.weight' has a gradient of torch.float32"):
        smp.step(mean_square)(model, batch_of(smp.dp_rank()))
    assert all(p.grad is None for p in model.parameters())
    net[1].weight.grad_dtype = torch.float32  # what the error says to do
    smp.step(mean_square)(model, batch_of(smp.dp_rank()))
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@on_ranks(2)
def test_replicas_whose_gradients_have_other_dtypes_are_refused():
    smp.init({"ddp": True})
    net = nn.Sequential(HalfLinear(5, WIDTH, told=smp.rank() == 1))
    with pytest.raises(
        RuntimeError, match="bfloat16 with gradients of float32, not '0.weight'"
    ):
        smp.DistributedModel(net)


# ----------------------------------------------------------------------------------- memory

LAYERS, SIDE = 10, 32


def deep_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(LAYERS)))


class Watch:
    """What the exchange holds at each of its collectives: ``.bytes``, ``.in_backward``."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch):
        self.bytes: list[int] = []
        self.in_backward: list[bool] = []
        # Held, so that nothing new lies there: Gloo's thread may let go of the last step's
        # buckets at any later time.
        self._before = self._live(model)
        all_reduce = dist.all_reduce

        def watched(tensor: Tensor, *args, **kwargs):
            if tensor.is_floating_point():
                live = self._live(model)
                self.bytes.append(
                    sum(s.nbytes() for place, s in live.items() if place not in self._before)
                )
                self.in_backward.append(any(p.grad is None for p in model.parameters()))
            return all_reduce(tensor, *args, **kwargs)

        monkeypatch.setattr(reduction.dist, "all_reduce", watched)

    def _live(self, model: nn.Module) -> dict[int, torch.UntypedStorage]:
        """Memory by address, of tensors that are no parameters, gradients or activations."""
        own = {
            t.untyped_storage().data_ptr()
            for p in model.parameters()
            for t in (p, p.grad)
            if t is not None
        }
        live = {}
        for one in gc.get_objects():
            if type(one) is Tensor and one.grad_fn is None and one.numel() >= SIDE:
                storage = one.untyped_storage()
                if storage.data_ptr() not in own:
                    live[storage.data_ptr()] = storage
        return live


@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@on_ranks(2)
def test_at_most_two_buckets_are_on_their_way(overlap, in_step, monkeypatch):
    """Besides them nothing is copied; the exchange still begins in backward."""
    smp.init({"ddp": True})
    cap = 2 * 4 * (SIDE + 1) * SIDE
    model = smp.DistributedModel(
        deep_model(), bucket_cap_mb=cap / 2**20, overlapping_allreduce=overlap
    )

    inputs = torch.randn(2, 4, SIDE)

    train_mean_square(model, inputs[0], in_step)
    model.zero_grad()
    watch = Watch(model, monkeypatch)
    train_mean_square(model, inputs[1], in_step)
    assert len(watch.bytes) == LAYERS / 2
    assert cap <= max(watch.bytes) <= 2 * cap
    assert any(watch.in_backward) == overlap
    assert watch.in_backward[:2] == [overlap] * 2


@pytest.mark.parametrize("in_step", [True, False])
@on_ranks(2)
def test_gradients_that_are_views_are_not_copied(in_step, monkeypatch):
    """One that backward has made is at once moved to its place in the bucket."""
    smp.init({"ddp": True, "microbatches": 2})
    model = smp.DistributedModel(
        deep_model(), bucket_cap_mb=3 * 4 * SIDE**2 / 2**20, gradient_as_bucket_view=True
    )
    step, x = smp.step(mean_square), torch.randn(4, SIDE)
    step(model, x)
    buckets = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    assert 1 < len(buckets) < LAYERS
    model.zero_grad()
    elsewhere = []

    def look(_: Tensor) -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        elsewhere.append(sum(g.untyped_storage().data_ptr() not in buckets for g in grads))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    watch = Watch(model, monkeypatch)
    if in_step:
        step(model, x)
    else:
        model(x).square().mean().backward()
    assert elsewhere and not any(elsewhere)
    assert watch.bytes and not any(watch.bytes)
    assert {p.grad.untyped_storage().data_ptr() for p in model.parameters()} == buckets


@on_ranks(2)
def test_gradients_that_were_there_before_stay_the_same_tensors():
    smp.init({"ddp": True})
    model = smp.DistributedModel(deep_model(), bucket_cap_mb=1e-4)
    step = smp.step(mean_square)
    step(model, torch.randn(4, SIDE))
    before = {name: (id(p.grad), p.grad) for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=False)
    step(model, torch.randn(4, SIDE))
    assert {name: (id(p.grad), p.grad) for name, p in model.named_parameters()} == before


# ----------------------------------------------------------- backward that is still running


@module_of(lambda: {"weight": nn.Parameter(torch.randn(WIDTH))})
def Positions(self, x: Tensor) -> Tensor:
    """With one sample, its gradient is a view of that of the layer before it."""
    return x + self.weight[None]


def model_with_positions() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Positions(), nn.Tanh(), nn.Linear(WIDTH, 3))


@on_ranks(2)
def test_results_do_not_go_where_backward_still_reads(monkeypatch):
    """Memory of a gradient that was just made may be an activation's gradient, too."""
    smp.init({"ddp": True})
    monkeypatch.setattr(reduction.Reduction, "_send", send_and_take_in)
    model = smp.DistributedModel(model_with_positions(), bucket_cap_mb=1e-6)
    step = smp.step(mean_square)
    for number in range(3):
        model.zero_grad()
        step(model, batch_of(smp.dp_rank(), number, rows=1))
        want = of_replicas(model_with_positions, number, rows=1)
        assert_same_bits(gradients(model), want)


def send_and_take_in(exchange: reduction.Reduction, place: int, zeros: bool) -> None:
    """As soon as a bucket was sent, its result is there."""
    send(exchange, place, zeros)
    exchange._take_in_all()


send = reduction.Reduction._send


class MoreAndMore(nn.Module):
    """Reentrant checkpoints, each of which adds to the layer's gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = self.stem(x)
        for _ in range(times):
            x = checkpoint(self.layer, torch.tanh(x), use_reentrant=True)
        return x


@pytest.mark.parametrize(
    ("arrives_at_once", "cap_mb"), [(False, 1e-6), (True, 1e-6), (False, 25)]
)
@pytest.mark.parametrize("in_step", [False, True])
@on_ranks(2)
def test_what_is_added_after_a_bucket_was_sent_counts(
    in_step, arrives_at_once, cap_mb, monkeypatch
):
    """Additions beyond those of earlier steps, on one replica or on both."""
    smp.init({"ddp": True})
    if arrives_at_once:
        monkeypatch.setattr(reduction.Reduction, "_send", send_and_take_in)
    model = smp.DistributedModel(MoreAndMore(), bucket_cap_mb=cap_mb)
    reference = [MoreAndMore(), MoreAndMore()]

    @smp.step
    def step(model: nn.Module, x: Tensor, times: int) -> None:
        model.backward(model(x, times).square().mean())

    for number, times in enumerate([(1, 1), (1, 3), (4, 4), (2, 5), (5, 0)]):
        if number != 3:
            model.zero_grad()
        replicas = copy.deepcopy(reference)
        for rank, replica in enumerate(replicas):
            if number == 3:  # gradients are there when the step begins
                for mine, p in zip(model.parameters(), replica.parameters(), strict=True):
                    p.grad = mine.grad.clone()
            replica(batch_of(rank, number), times[rank]).square().mean().backward()
        mine = times[smp.dp_rank()]
        if in_step:
            step(model, batch_of(smp.dp_rank(), number), mine)
        else:
            model(batch_of(smp.dp_rank(), number), mine).square().mean().backward()
        assert_close(gradients(model), averaged(replicas), 1e-5)
        everyones = smp.allgather(list(gradients(model).values()), smp.DP_GROUP)
        for one, other in zip(*everyones, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("microbatch", [0, 1, 2])
@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_the_last_backward_is_that_of_the_last_microbatch_as_far_as_known(microbatch, calls):
    """Of a step whose microbatches had two before; outside a step each is the last."""
    step = CurrentStep()
    step.weights, step.backwards = [1 / 3] * 3, 2
    step.microbatch, step.backward_calls = microbatch, calls
    step.begin()
    assert step.in_last_backward() == (microbatch == 2 and calls >= 2)
    step.end()
    assert step.in_last_backward()
