"""``model.to(...)`` and the like, before and after the partition."""

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.modules.conversion import give_data
from tests.models.partition import distributed
from tests.ranks import on_ranks
from tests.reference.compare import gradients

CONVERSIONS = {
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.float(),
    "cpu": lambda m: m.cpu(),
    "to a dtype": lambda m: m.to(torch.float64),
    "to a device": lambda m: m.to("cpu"),
    "to both": lambda m: m.to("cpu", torch.bfloat16),
    "type": lambda m: m.type(torch.float64),
    "as a tensor": lambda m: m.to(torch.ones(1, dtype=torch.float64)),
    "to a layout": lambda m: m.to(memory_format=torch.channels_last),
    "back": lambda m: m.half().float(),
}


class Own(nn.Module):
    """Keeps a tensor of its own, and converts it in a method of an older signature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(4)
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def _apply(self, fn):
        super()._apply(fn)
        self.scale = fn(self.scale)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.mask


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.second = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
        self.recurrent, self.own = nn.LSTM(4, 4), Own()
        self.tied = nn.Linear(4, 4)
        self.tied.weight = nn.Parameter(torch.ones(4, 4))
        self.last = nn.Linear(4, 4)
        self.last.weight = self.tied.weight
        self.again = nn.ModuleList([self.first, self.recurrent])
        self.weight = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x)).mean((2, 3))
        x = self.own(self.recurrent(x)[0])
        return self.last(self.tied(x)) * self.weight


def kinds(module: nn.Module) -> dict[str, tuple]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: (t.dtype, t.device, tuple(t.shape), t.requires_grad) for name, t in named}


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after", "twice", "of the wrapped module"])
@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.sample(15)
def test_a_conversion_is_that_of_the_plain_model(name, when):
    """On all ranks, for parameters and buffers of all ranks; and the model trains on."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    plain, net = Net(), Net()
    net.load_state_dict(plain.state_dict())
    model = distributed(net, {"second.1": 1, "recurrent": 1, "own": 1})
    x = torch.randn(4, 3, 2, 2)

    @smp.step
    def step(model: smp.DistributedModel, x: Tensor) -> Tensor:
        loss = model(x).float().mean()
        model.backward(loss)
        return loss

    def train(x: Tensor) -> None:
        plain.zero_grad()
        model.zero_grad()
        for microbatch in x.split(2):
            (plain(microbatch).float().mean() / 2).backward()
        step(model, x)
        mine = gradients(model)
        for name, parameter in plain.named_parameters():
            assert name not in mine or torch.equal(mine[name], parameter.grad), name

    if when != "before":
        train(x)
    for _ in range(2 if when == "twice" else 1):
        CONVERSIONS[name](plain)
        given = net if when == "of the wrapped module" else model
        assert CONVERSIONS[name](given) is given
    assert kinds(model) == kinds(net) == kinds(plain)

    train(x.to(plain.weight.dtype))

    assert kinds(model) == kinds(plain)
    full = model.state_dict()
    for key, value in plain.state_dict().items():
        assert torch.equal(full[key], value), key


@on_ranks(2)
def test_buffers_without_memory_are_converted_too():
    """Delayed, and of another rank's module: they have a dtype alone."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    with smp.delay_param_initialization():
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = distributed(net, {"1": 1})
    smp.step(lambda model, x: model(x))(model, torch.randn(4, 3))
    assert net[1].running_mean.is_meta == (smp.pp_rank() == 0)

    model.double()

    dtypes = {name: buffer.dtype for name, buffer in net.named_buffers()}
    assert dtypes == {
        "1.running_mean": torch.float64,
        "1.running_var": torch.float64,
        "1.num_batches_tracked": torch.int64,
    }
    assert net[1].running_mean.is_meta == (smp.pp_rank() == 0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_who_is_given_data_of_any_device_stays_the_same(device):
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    for tensor in (nn.Parameter(torch.ones(2)), frozen, torch.ones(2)):
        kind, required, tensor.mark = type(tensor), tensor.requires_grad, "of the script"
        give_data(tensor, torch.zeros(3, dtype=torch.float64, device=device))
        now = (type(tensor), tensor.requires_grad, tensor.mark)
        assert now == (kind, required, "of the script")
        assert (tensor.device.type, tensor.dtype, len(tensor)) == (device, torch.float64, 3)
