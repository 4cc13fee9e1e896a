"""Names of the user's own modules, parameters, buffers and attributes beside those of
``DistributedModel``."""

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.models.partition import distributed
from tests.models.steps import total
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
    model = distributed(net, {"far": 1})
    x = torch.randn(4, 3)

    step = smp.step(total)

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
