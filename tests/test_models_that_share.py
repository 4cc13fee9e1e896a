"""Several DistributedModels that have modules or parameters in common: each is on one rank,
and trains as in one process."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.models.modules import module_of
from tests.ranks import on_ranks
from tests.reference.compare import assert_close, gradients

WIDTH = 8


@module_of(lambda: {"first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)})
def Encoder(self, x):
    return torch.tanh(self.second(torch.tanh(self.first(x))))


class Head(nn.Module):
    """A model: what it shares, and a part of its own."""

    def __init__(self, encoder: nn.Module, weight: nn.Parameter | None = None):
        super().__init__()
        self.encoder, self.last = encoder, nn.Linear(WIDTH, WIDTH)
        if weight is not None:
            self.last.weight = weight

    def forward(self, x):
        return self.last(self.encoder(x))


def init(**config) -> None:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **config})


def batch(seed: int) -> Tensor:
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.manual_seed(seed))


def loss_of(models, x) -> Tensor:
    return sum((i + 1) * m(x).square().mean() for i, m in enumerate(models))


def with_all(models, x):
    loss = loss_of(models, x)
    models[0].backward(loss)
    return loss


train = smp.step(with_all)


def train_plain(models, x) -> Tensor:
    losses = [loss_of(models, part) / 2 for part in x.chunk(2)]
    for loss in losses:
        loss.backward()
    return sum(losses).detach()


def check(models, plain, steps: int = 2, run: Callable = train) -> None:
    """Losses and gradients of some steps, and the state at their end; they add up in .grad."""
    for seed in range(steps):
        x = batch(seed)
        torch.testing.assert_close(run(models, x).reduce_mean(), train_plain(plain, x))
        for model, alone in zip(models, plain, strict=True):
            assert_close(gradients(model), gradients(alone), relative=1e-12)
    for model, alone in zip(models, plain, strict=True):
        torch.testing.assert_close(model.state_dict(), alone.state_dict())


def pair(make=Encoder) -> tuple[list[nn.Module], list[nn.Module]]:
    """Two models that share a module, and copies that do, too."""
    encoder = make()
    nets = [Head(encoder).double(), Head(encoder).double()]
    return nets, copy.deepcopy(nets)


def place_of(model, path: str) -> int:
    return model.get_module_partition(path)


def pin_nothing(nets) -> None:
    pass


def pin_alike(nets) -> None:
    for net in nets:
        smp.set_partition(net, 0)
    smp.set_partition(nets[0].encoder, 1)


def pin_the_second(nets) -> None:
    smp.set_partition(nets[1], 1)


def pin_the_parts(nets) -> None:
    smp.set_partition(nets[0].encoder.first, 1)
    smp.set_partition(nets[1].encoder.second, 0)


PINS = [pin_nothing, pin_alike, pin_the_second, pin_the_parts]


@on_ranks(2)
@pytest.mark.sample(4)
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
@pytest.mark.parametrize("pin", PINS)
def test_a_module_of_two_models_is_on_one_rank_and_trains_as_in_one_process(pin, pipeline):
    init(pipeline=pipeline)
    nets, plain = pair()
    pin(nets)
    models = [smp.DistributedModel(net) for net in nets]
    check(models, plain)
    for path in ("encoder", "encoder.first", "encoder.second"):
        assert place_of(models[0], path) == place_of(models[1], path)


@on_ranks(2)
@pytest.mark.parametrize("traced", [True, False])
def test_models_that_share_a_parameter_have_its_modules_on_one_rank(traced):
    init(skip_tracing=not traced)
    first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    second = Head(nn.Linear(WIDTH, WIDTH).double(), first[1].weight).double()
    plain = copy.deepcopy([first, second])
    models = [smp.DistributedModel(first), smp.DistributedModel(second)]
    check(models, plain)
    assert place_of(models[0], "1") == place_of(models[1], "last")


@on_ranks(2)
def test_a_model_that_comes_later_has_a_shared_module_where_it_is():
    init()
    nets, plain = pair()
    smp.set_partition(nets[0], 0)
    smp.set_partition(nets[0].encoder, 1)
    first = smp.DistributedModel(nets[0])
    check([first], plain[:1], steps=1)
    models = [first, smp.DistributedModel(nets[1])]
    check(models, plain)
    assert place_of(models[1], "encoder") == 1


@on_ranks(2)
def test_a_model_that_comes_later_is_trained_beside_one_that_has_its_partition():
    init()
    nets = [Head(Encoder()).double() for _ in range(2)]
    plain = copy.deepcopy(nets)
    first = smp.DistributedModel(nets[0])
    check([first], plain[:1], steps=1)
    check([first, smp.DistributedModel(nets[1])], plain)


@on_ranks(2)
@pytest.mark.parametrize("pinned", [False, True])
def test_one_net_may_be_wrapped_twice(pinned):
    init()
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
    plain = copy.deepcopy(net)
    if pinned:
        for i, layer in enumerate(net):
            smp.set_partition(layer, i // 2)
    check([smp.DistributedModel(net), smp.DistributedModel(net)], [plain, plain])


@on_ranks(2)
@pytest.mark.parametrize("alike", [True, False])
def test_an_activation_of_two_models_runs_where_it_is_called(alike):
    init()
    nets, plain = pair(nn.GELU)
    smp.set_partition(nets[0], 0)
    smp.set_partition(nets[1], 0 if alike else 1)
    check([smp.DistributedModel(net) for net in nets], plain)


@on_ranks(2)
@pytest.mark.parametrize("late", [False, True])
def test_a_shared_module_that_models_are_pinned_apart_with_is_named(late):
    init()
    nets, plain = pair()
    smp.set_partition(nets[0], 0)
    smp.set_partition(nets[1], 1)
    models = [smp.DistributedModel(nets[0])]
    if late:
        check(models, plain[:1], steps=1)
    models.append(smp.DistributedModel(nets[1]))
    here, there = (1, "on partition 0") if late else (0, "pinned to partition 1")
    told = (
        rf"'encoder' \(pinned to partition {here} with ''\) is the module 'encoder' of a Head "
        f"in another DistributedModel, {there}: .* pin it"
    )
    with pytest.raises(smp.PartitionError, match=told):
        train(models, batch(0))


@on_ranks(2)
def test_a_shared_parameter_that_models_are_pinned_apart_with_is_named():
    init()
    first = nn.Linear(WIDTH, WIDTH).double()
    second = Head(nn.Identity(), first.weight).double()
    smp.set_partition(first, 1)
    smp.set_partition(second.last, 0)
    models = [smp.DistributedModel(first), smp.DistributedModel(second)]
    told = (
        r"module '' \(pinned to partition 1\) has the parameter 'last.weight' of a Head in "
        "another DistributedModel, pinned to partition 0"
    )
    with pytest.raises(smp.PartitionError, match=told):
        train(models, batch(0))


@module_of(lambda: {"linear": nn.Linear(WIDTH, WIDTH), "calls": nn.Buffer(torch.zeros(()))})
def Counting(self, x):
    """Counts its calls in a buffer, which no microbatch may mix up."""
    self.calls += 1
    return torch.tanh(self.linear(x)) * self.calls.clone()


def once_each(models, x):
    for i, model in enumerate(models):
        model.backward(model(x).square().mean() * (i + 1))
    return x.mean()


@on_ranks(2)
@pytest.mark.parametrize("pin", [pin_nothing, pin_alike])
def test_buffers_of_a_shared_module_change_as_in_one_process(pin):
    init()
    nets, plain = pair(Counting)
    pin(nets)
    check([smp.DistributedModel(net) for net in nets], plain)


class Twice(Head):
    """Calls what it shares a second time."""

    def forward(self, x):
        return super().forward(self.encoder(x))


@on_ranks(2)
def test_a_shared_module_that_models_call_differently_often_has_its_buffers_in_order():
    """Each is traced by itself, so that nobody knows how often a microbatch calls it."""
    init()
    encoder = Counting()
    nets = [Head(encoder).double(), Twice(encoder).double()]
    plain = copy.deepcopy(nets)
    for net in nets:
        smp.set_partition(net, 0)
    smp.set_partition(encoder, 1)
    models = [smp.DistributedModel(nets[0])]
    check(models, plain[:1], steps=1)
    models.append(smp.DistributedModel(nets[1]))
    check(models[1:], plain[1:], steps=1)
    check(models, plain)


@module_of(lambda: {"linear": nn.Linear(WIDTH, WIDTH), "seen": None})
def SetsOnes(self, x):
    """Its forward sets an attribute."""
    self.seen = 1.0
    return self.linear(x)


class Reads(Head):
    reads = False

    def forward(self, x):
        y = super().forward(x)
        return y + self.encoder.seen if self.reads else y


@on_ranks(2)
def test_what_a_shared_module_sets_is_an_error_to_read_elsewhere_whichever_model_came_last():
    """... also where the last one's traced run did not call it."""
    init()
    encoder = SetsOnes()
    nets = [Reads(encoder).double(), Head(encoder).double()]
    smp.set_partition(nets[0], 0)
    smp.set_partition(encoder, 1)
    models = [smp.DistributedModel(nets[0])]
    train(models, batch(0))
    models.append(smp.DistributedModel(nets[1]))
    smp.step(lambda models, x: x.sum())(models, batch(0))
    nets[0].reads = True
    with pytest.raises(RuntimeError, match="'encoder.seen' changes when its module runs"):
        train(models[:1], batch(0))


@on_ranks(2)
def test_sequences_of_modules_go_on_when_an_earlier_model_is_gone():
    """Requests for children of an ``nn.Sequential`` are by number, which changes then."""
    init()

    def made() -> tuple[nn.Module, nn.Module]:
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5))).double()
        for i, layer in enumerate(net):
            smp.set_partition(layer, int(i > 1))
        return net, copy.deepcopy(net)

    (gone, _), (net, plain) = made(), made()
    models = [smp.DistributedModel(gone), smp.DistributedModel(net)]
    train(models, batch(0))
    net.zero_grad()
    del gone
    models[0] = smp.DistributedModel(made()[0])
    check(models[1:], [plain])


@on_ranks(4)
@pytest.mark.parametrize("view", [False, True])
def test_replicas_average_the_gradients_of_a_shared_module_once(view):
    """Each with its own half of the batch."""
    init(ddp=True)
    nets, plain = pair()
    models = [smp.DistributedModel(net, gradient_as_bucket_view=view) for net in nets]
    for seed in range(2):
        halves = batch(seed), batch(seed + 10)
        train(models, halves[smp.dp_rank()])
        for half in halves:
            for part in half.chunk(2):
                (loss_of(plain, part) / 4).backward()
    for model, alone in zip(models, plain, strict=True):
        assert_close(gradients(model), gradients(alone), relative=1e-12)
