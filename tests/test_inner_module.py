"""``model.module.module`` is the wrapped module, too, to scripts of smdistributed.

Spec: clients.md, section 3: ``model.module`` is the wrapped module, and 2022's scripts walk
``model.module.module.transformer``.
"""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import smp
from tests.models.modules import module_of
from tests.ranks import on_ranks


@module_of(
    lambda: {
        "near": nn.Linear(3, 3),
        "far": nn.Linear(3, 3),
        "calls": nn.Buffer(torch.zeros(())),
        "scale": 2.0,
    }
)
def Net(self, x):
    """Says who was called, and has a buffer and a hook."""
    self.calls += 1
    return self.scale * self.far(self.near(x))


def unwrap(model):
    """As transformers' ``unwrap_model``."""
    return unwrap(model.module) if hasattr(model, "module") else model


def wrapped(net):
    smp.reset()
    smp.init()
    return smp.DistributedModel(net)


@pytest.fixture
def net():
    yield Net()
    smp.reset()


def test_it_stands_for_the_wrapped_module(net):
    model = wrapped(net)
    inner = model.module.module

    assert model.module is net and inner is net.module
    assert isinstance(inner, Net) and type(inner).__name__ == "Net"
    assert inner.near is net.near and list(inner.named_modules())[1:] == [
        ("near", net.near),
        ("far", net.far),
    ]
    assert [id(p) for p in inner.parameters()] == [id(p) for p in model.parameters()]
    assert unwrap(model) is inner and unwrap(net) is inner
    assert not hasattr(inner, "module") and not hasattr(type(net), "module")
    assert repr(inner) == repr(net) and list(inner.state_dict()) == list(net.state_dict())


def test_what_is_done_to_it_is_done_to_the_wrapped_module(net):
    model = wrapped(net)
    inner = model.module.module
    inner.scale = 3.0
    inner.eval()
    inner.extra = nn.Linear(1, 1)
    seen = []
    inner.register_forward_hook(lambda module, args, output: seen.append(module))
    x = torch.ones(2, 3)

    assert (net.scale, net.training, "extra" in net._modules) == (3.0, False, True)
    assert torch.equal(inner(x), net(x)) and torch.equal(inner.forward(x), net.forward(x))
    assert seen == [net, net] and net.calls == 4
    del inner.extra, inner.scale
    assert not hasattr(net, "extra") and not hasattr(net, "scale")


def test_copies_and_pickles_are_of_the_users_class(net):
    model = wrapped(net)
    for module in (model.module, model.module.module):
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        for got in (
            copy.copy(module),
            copy.deepcopy(module),
            pickle.loads(pickle.dumps(module)),
            torch.load(file, weights_only=False),
        ):
            assert type(got) is Net and not hasattr(got, "module")
            assert list(vars(got)) == list(vars(Net()))
            assert all(map(torch.equal, got.parameters(), net.parameters()))


@pytest.mark.parametrize("kind", ["child", "parameter", "buffer", "attribute", "property"])
def test_an_attribute_of_that_name_is_the_users(net, kind):
    value = nn.Linear(1, 1) if kind == "child" else nn.Parameter(torch.ones(3))
    if kind == "buffer":
        net.register_buffer("module", value)
    elif kind == "attribute":
        net.__dict__["module"] = value
    elif kind == "property":
        net.__class__ = type("Own", (Net,), {"module": property(lambda self: value)})
    else:
        net.module = value

    model = wrapped(net)

    assert model.module is net and net.module is value


@pytest.mark.parametrize("kind", ["child", "parameter", "buffer", "attribute"])
def test_an_attribute_that_gets_that_name_later_is_the_users(net, kind):
    value = {
        "child": nn.Linear(1, 1),
        "parameter": nn.Parameter(torch.ones(3)),
        "buffer": torch.ones(3),
        "attribute": "mine",
    }[kind]
    model = wrapped(net)
    register = {"parameter": net._parameters, "buffer": net._buffers}.get(kind)
    if register is None:
        net.module = value
    else:
        register["module"] = value  # torch's own methods refuse the name
    assert model.module is net and net.module is value


def test_it_goes_with_the_wrapped_module():
    model = wrapped(Net())
    inner = model.module.module
    seen = weakref.ref(model.module)
    smp.reset()
    smp.state.model = None
    del model
    gc.collect()
    assert seen() is not None
    gc.disable()
    try:
        del inner
        assert seen() is None
    finally:
        gc.enable()


def test_compiled_and_scripted_modules_stay_what_they_are(net):
    for module in (torch.compile(net, backend="eager"), torch.jit.script(nn.Linear(3, 3))):
        cls = type(module)
        model = wrapped(module)
        assert model.module is module and isinstance(module, cls)
        model(torch.ones(2, 3))
    assert type(net) is Net


@on_ranks(2)
@pytest.mark.parametrize("root", [0, 1])
def test_it_is_pinned_checkpointed_and_called_as_the_wrapped_module(root):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = Net()
    model = smp.DistributedModel(net)
    inner = net.module
    smp.set_partition(inner, root)
    smp.set_partition(inner.far, 1 - root)
    smp.set_activation_checkpointing(inner.near)
    plain = Net()
    plain.load_state_dict(net.state_dict())
    x = torch.randn(4, 3)

    @smp.step
    def step(model, x):
        loss = model.module.module(x).sum()
        model.backward(loss)
        return loss

    for _ in range(2):
        torch.testing.assert_close(step(model, x).reduce_sum(), plain(x).sum())
    assert net.module is inner and unwrap(model) is inner and isinstance(net, Net)
    assert model.get_module_partition(inner) == root
    assert [model.get_module_partition(m) for m in (inner.near, inner.far)] == [root, 1 - root]
    with pytest.raises(smp.PartitionError, match="too late"):
        smp.set_partition(inner, 0)
    with pytest.raises(RuntimeError, match="'late'.*cannot be added"):
        inner.register_module("late", nn.Linear(1, 1))
    assert list(model.state_dict()) == list(plain.state_dict())
