"""Names of the user's own modules, parameters, buffers and attributes beside those of
``DistributedModel``."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.ranks import on_ranks

# What DistributedModel adds to a module, some of its arguments, and any other names.
ADDED = set(dir(smp.DistributedModel)) - set(dir(nn.Module))
NAMES = sorted(
    {name for name in ADDED if name[0] != "_"}
    | {"partition", "data_parallel", "trace_device", "average_grads", "smp", "owners"}
)


class Named(nn.Module):
    """Has something of every name, which it uses."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(3, 3), nn.Linear(3, 3)
        for number, name in enumerate(NAMES):
            value = torch.full((3,), 0.9 + number / 100)
            if kind == "module":
                self.add_module(name, nn.Linear(3, 3))
            elif kind == "parameter":
                self.register_parameter(name, nn.Parameter(value))
            elif kind == "buffer":
                self.register_buffer(name, value)
            else:
                self.__dict__[name] = value

    def forward(self, x: Tensor) -> Tensor:
        x = self.far(self.near(x))
        for name in NAMES:
            own = getattr(self, name)
            x = own(x) if isinstance(own, nn.Module) else own * x
        return x


def test_what_a_distributed_model_keeps_has_names_of_its_own():
    """What an instance has beside what every module has begins with ``_smp_``."""
    smp.reset()
    smp.init()
    model = smp.DistributedModel(nn.Linear(1, 1))
    smp.reset()

    kept = vars(model).keys() - vars(nn.Module()).keys()
    private = {name for name in ADDED if name[0] == "_"} - {"__getattr__"}

    assert kept and [n for n in kept | private if not n.startswith(("_smp_", "__"))] == []


@on_ranks(2)
@pytest.mark.parametrize("kind", ["module", "parameter", "buffer", "attribute"])
def test_the_users_names_are_the_users(kind):
    """A step, state dicts and look-ups are those of the plain module, whatever the names."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    plain, net = Named(kind), Named(kind)
    net.load_state_dict(plain.state_dict())
    smp.set_partition(net.far, 1)
    model = smp.DistributedModel(net)
    x = torch.randn(4, 3)

    @smp.step
    def step(model: smp.DistributedModel, x: Tensor) -> Tensor:
        loss = model(x).sum()
        model.backward(loss)
        return loss

    torch.testing.assert_close(step(model, x).reduce_sum(), plain(x).sum())
    want, full = plain.state_dict(), model.state_dict()
    assert list(full) == list(want)
    assert all(torch.equal(full[key], value) for key, value in want.items())
    assert model.load_state_dict(full).missing_keys == []
    assert [name for name, _ in model.named_children()] == list(plain._modules)
    look_up = {
        "module": model.get_submodule,
        "parameter": model.get_parameter,
        "buffer": model.get_buffer,
    }
    for name in NAMES:
        own = getattr(net, name)
        assert kind not in look_up or look_up[kind](name) is own
        assert name in ADDED or getattr(model, name) is own


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.far(self.near(x))

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x))


def unwrapped(model: Any) -> Any:
    """As frameworks take wrappers off."""
    while hasattr(model, "module"):
        model = model.module
    return model


@on_ranks(2)
@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_wrapped_module_by_each_of_its_names(root, checkpointed):
    """``model.module`` and ``model.module.module``, and what a loop over them ends with."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    plain, net = Net(), Net()
    net.load_state_dict(plain.state_dict())
    model = smp.DistributedModel(net)
    smp.set_partition(model.module, root)
    smp.set_partition(model.module.module.far, 1)
    if checkpointed:
        smp.set_activation_checkpointing(model.module)

    def check_names():
        assert model.module.module is model.get_module() is unwrapped(model) is net
        assert unwrapped(net) is net and not hasattr(net, "module")
        assert model.module == net == model.module and len({net, model.module}) == 1
        assert model.module is model.module and isinstance(model.module, Net)
        assert type(model.module).__name__ == "Net"
        assert model.module.far is net.far and vars(model.module) is vars(net)

    check_names()

    @smp.step
    def step(model: smp.DistributedModel, x: Tensor) -> list[Tensor]:
        x = x.requires_grad_()
        outs = [model(x), model.module(x), model.module.forward(x), model.module.twice(x)]
        model.backward(torch.stack(outs).sum())
        return outs

    x = torch.randn(4, 3)
    wanted = [plain(x), plain(x), plain(x), plain.twice(x)]
    for got, want in zip(step(model, x), wanted, strict=True):
        torch.testing.assert_close(got.concat(), want)

    check_names()
    assert model.get_module_partition(model.module) == root
    model.module.train(False)
    model.module.note = "seen"
    assert not net.training and net.note == "seen"
    assert list(model.module.state_dict(keep_vars=True)) == list(plain.state_dict())
    if smp.pp_rank() == 0:
        copied = copy.copy(model.module)
        assert type(copied) is Net and copied.far is net.far and not hasattr(copied, "module")


def test_a_wrapped_module_with_a_module_of_its_own():
    smp.reset()
    smp.init()
    net = nn.Sequential()
    net.module = nn.Linear(1, 1)

    model = smp.DistributedModel(net)

    assert model.module is net and unwrapped(model) is net.module
    smp.reset()
