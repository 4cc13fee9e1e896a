"""Modules that are put into a model after its partition."""

import gc
from inspect import getattr_static
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types

import smp
from tests.models.partition import distributed
from tests.models.steps import total
from tests.ranks import call_on_ranks, on_ranks

X = torch.ones(2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.near, self.act, self.far = nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            self.now = block  # another name for it
            x = self.now(x)
        return self.far(self.act(self.near(x)))


class HasBuffer(nn.Module):
    def __init__(self, buffer: Tensor | None = X) -> None:
        super().__init__()
        self.register_parameter("weight", None)
        self.register_buffer("buffer", buffer)


REFUSED = {
    "replaced": (
        lambda m: setattr(m.module, "far", nn.Linear(3, 3)),
        "'far' (Linear) cannot be replaced by a Linear",
    ),
    "a wrapper": (
        lambda m: setattr(m.module, "far", nn.Sequential(m.module.far)),
        "'far' (Linear) cannot be replaced by a Sequential",
    ),
    "taken out": (
        lambda m: setattr(m.module, "near", None),
        "'near' (Linear) cannot be replaced by None",
    ),
    "into a list": (
        lambda m: m.module.blocks.append(nn.BatchNorm1d(3)),
        "'blocks.2' (BatchNorm1d) cannot be added",
    ),
    "on the wrapper": (
        lambda m: setattr(m, "more", nn.Linear(1, 1)),
        "'more' (Linear) cannot be added",
    ),
    "on the module": (
        lambda m: m.get_module().add_module("more", nn.Linear(1, 1)),
        "'more' (Linear) cannot be added",
    ),
    "with a buffer alone": (
        lambda m: m.get_module().add_module("more", HasBuffer()),
        "'more' (HasBuffer) cannot be added",
    ),
    "with parameters inside": (
        lambda m: m.get_module().add_module("more", nn.Sequential(nn.Linear(1, 1))),
        "'more' (Sequential) cannot be added",
    ),
    "taken out with what is inside": (
        lambda m: setattr(m.module, "blocks", nn.ModuleList()),
        "'blocks' (ModuleList) cannot be replaced by a ModuleList",
    ),
    "moved": (
        lambda m: setattr(m.module, "far", m.module.near),
        "'far' (Linear) cannot be replaced by a Linear",
    ),
}

LET_THROUGH = {
    "without parameters": lambda m: setattr(m.module, "act", nn.Tanh()),
    "new, without parameters": lambda m: setattr(m.module, "more", nn.Tanh()),
    "with None for them": lambda m: m.get_module().add_module("more", HasBuffer(None)),
    "the same": lambda m: setattr(m.module, "far", m.module.far),
    "another name": lambda m: setattr(m.module, "alias", m.module.far),
    "another model": lambda m: nn.Sequential().add_module("far", m.module.far),
}


step = smp.step(total)


def partitioned() -> smp.DistributedModel:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = distributed(Net(), {"far": 1, "act": 1, "blocks.1": 1})
    model.register_buffer("before", torch.ones(1))
    step(model, torch.ones(2, 3))
    return model


@on_ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_nobody_decided_about_is_refused(name):
    """On every rank, by its path; and the model goes on as it was."""
    change, told = REFUSED[name]
    model = partitioned()
    before = list(model.state_dict())

    with pytest.raises(RuntimeError) as error:
        change(model)

    assert str(error.value) == (
        f"smp: module {told} after the partition, which decided about the modules that the "
        "model had: change it before its first step"
    )
    step(model, torch.ones(2, 3))
    assert list(model.state_dict()) == before


@on_ranks(2)
def test_a_parameter_put_in_between_steps_is_named():
    model = partitioned()
    model.module.near.register_parameter("more", nn.Parameter(torch.ones(1)))
    with pytest.raises(RuntimeError, match=r"'near.more' \[1\] cannot be added after the part"):
        list(model.local_parameters())


@on_ranks(2)
@pytest.mark.parametrize("name", LET_THROUGH)
def test_what_needs_no_decision_is_let_through(name):
    model = partitioned()
    before = {n: p.detach().clone() for n, p in model.local_named_parameters()}

    LET_THROUGH[name](model)

    step(model, torch.ones(2, 3))
    assert dict(model.local_named_parameters()).keys() == before.keys()
    assert list(model.local_buffers()) in ([], [model.module.before])
    assert [path for path, _ in model.local_named_modules()]
    if "without" in name:
        attribute = "more" if "new" in name else "act"
        assert isinstance(getattr(model.module, attribute), nn.Tanh)


@on_ranks(2)
def test_modules_are_free_again_after_the_end():
    model = partitioned()
    net = model.get_module()
    smp.shutdown()
    net.more = nn.Linear(1, 1)
    again = partitioned()  # of another job, in which the first model is a plain one
    net.far = nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="'far' .* cannot be replaced"):
        again.module.far = nn.Linear(3, 3)


def of_torch() -> dict[str, Any]:
    """What smp changes of PyTorch while it has a need, as it is now."""
    names = {
        nn.Module: (
            "__init__", "__setstate__", "__getattribute__", "__setattr__", "_apply",
            "register_forward_hook", "register_forward_pre_hook",
        ),
        torch.amp.GradScaler: ("_check_scale_growth_tracker", "_unscale_grads_"),
        torch.autograd.Function: ("apply",),
        Tensor: ("data", "register_hook", "requires_grad", "requires_grad_"),
    }  # fmt: skip
    now = {f"{o.__name__}.{n}": getattr_static(o, n) for o in names for n in names[o]}
    for function in (nn.utils.clip_grad_norm_, nn.utils.get_total_norm):
        for i, cell in enumerate(function.__closure__):
            now[f"{function.__name__}, {i}"] = cell.cell_contents
    kinds = {kind.__name__: kind for kind in _foreach_supported_types}
    now["foreach SplitParameter"] = kinds.get("SplitParameter")
    for name, hooks in vars(torch.nn.modules.module).items():
        if name.startswith("_global_") and isinstance(hooks, dict):
            now |= {
                f"{name} {i}": hook for i, hook in enumerate(hooks.values()) if callable(hook)
            }
    return now


def changed(before: dict[str, Any]) -> set[str]:
    now = of_torch()
    return {name for name in now.keys() | before if now.get(name) is not before.get(name)}


CHANGED = {
    "_get_total_norm, 0",
    "clip_grad_norm_, 0",
    "GradScaler._check_scale_growth_tracker",
    "GradScaler._unscale_grads_",
    "_global_module_registration_hooks 0",
    "_global_parameter_registration_hooks 0",
}
CHANGED_BY = {
    "pipeline": {"Module.register_forward_hook", "Module.register_forward_pre_hook"},
    "tensor": {"Module._apply", "foreach SplitParameter"},
}


@pytest.mark.parametrize("kind", CHANGED_BY)
def test_torch_is_changed_only_while_a_model_lives(kind):
    """... in processes without models of other tests."""
    call_on_ranks(2, _change_torch, kind, team="without models")


def _change_torch(kind: str) -> None:
    before = of_torch()
    files = [v.__code__.co_filename for v in before.values() if hasattr(v, "__code__")]
    assert files and not any("smp" in Path(file).parts for file in files)
    smp.init({f"{kind}_parallel_degree": 2})
    assert not changed(before)
    with smp.delay_param_initialization(), smp.tensor_parallelism():
        assert changed(before) == {"Module.__init__", "Module.__setstate__", "Module._apply"}
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert changed(before) == {"Module._apply"}
    model = smp.DistributedModel(net)
    smp.step(lambda model, x: model.backward(model(x).sum()))(model, torch.ones(2, 4))
    assert changed(before) == CHANGED | CHANGED_BY[kind]
    del net, model
    smp.state.model = None
    gc.collect()
    assert not changed(before)
    smp.shutdown()


class Delegating(nn.Module):
    """As many libraries' wrappers are: what it lacks is its module's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


class Equal(nn.Module):
    """Of a class that cannot be hashed."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)


@on_ranks(2)
@pytest.mark.parametrize("wrap", [Delegating, Equal, torch.compile])
def test_modules_that_smp_never_saw_are_made_moved_and_clipped_as_ever(wrap):
    """... whatever hooks and patches a partitioned model has left in the process."""
    smp.init({"pipeline_parallel_degree": 2, "tensor_parallel_degree": 1})
    with smp.delay_param_initialization():
        net = Net()
    model = smp.DistributedModel(net)
    smp.step(lambda model, x: model.backward(model(x).sum()))(model, X)
    other = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2))
    made = wrap(other)
    other(X).sum().backward()
    made.double()
    made.to(torch.device("meta"))
    made = wrap(nn.Linear(3, 3))
    made.extra = wrap(nn.Linear(3, 3))
    norm = nn.utils.clip_grad_norm_(other[0].bias, 1.0)
    assert norm.is_meta and hasattr(made, "extra")
