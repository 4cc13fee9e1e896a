"""Spec: what scripts ask a DistributedModel, and a DistributedOptimizer, before the partition
and after it."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.models.modules import module_of
from tests.ranks import on_ranks


@module_of(lambda: {"linear": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3)})
def Block(self, x: Tensor) -> Tensor:
    return self.norm(self.linear(x))


class Net(nn.Module):
    """``far`` is on the last rank of a pipeline; one weight is tied, one buffer missing."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = Block(), Block()
        self.last = nn.Linear(3, 3)
        self.last.weight = self.near.linear.weight
        self.register_buffer("table", torch.ones(2))
        self.register_buffer("missing", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.far(self.near(x)))


def init(pipelined: bool) -> int:
    """The pipeline's degree: all ranks in one, or each a replica of the whole model."""
    size = smp.job.bootstrap.mpi_size()
    degree = size if pipelined else 1
    smp.init({"pipeline_parallel_degree": degree, "ddp": degree < size})
    return degree


def wrapped(degree: int, **options: Any) -> smp.DistributedModel:
    net = Net()
    for path, module in net.named_modules():
        smp.set_partition(module, degree - 1 if path.startswith("far") else 0)
    return smp.DistributedModel(net, **options)


@smp.step
def train(model: smp.DistributedModel, x: Tensor, fails: bool = False) -> None:
    if fails:
        raise ArithmeticError("told to")
    model.backward(model(x).sum())


@on_ranks(1, 2)
@pytest.mark.parametrize("pipelined", [False, True])
def test_hooks_after_the_partition_run_once_before_the_first_step_computes(pipelined):
    """With the model and the newest optimizer; not what was removed."""
    degree = init(pipelined)
    model = wrapped(degree)
    heard: list[tuple] = []
    parts: list[tuple] = []
    net = model.get_module()
    net.near.linear.register_forward_pre_hook(
        lambda *call: parts.append((len(heard), smp.is_tracing()))
    )

    def hook(*given: Any) -> None:
        heard.append((*given, model.partitioned, len(list(model.local_modules()))))

    model.register_post_partition_hook(hook)
    model.register_post_partition_hook(lambda *given: heard.append("removed")).remove()
    smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(2):
        train(model, torch.randn(4, 3))

    mine = len(list(model.local_modules()))
    assert mine == (8 if degree == 1 else (3 if smp.pp_rank() else 5))
    assert heard == [(model, optimizer, degree > 1, mine)]
    assert all(tracing or before == 1 for before, tracing in parts)


@on_ranks(1, 2)
@pytest.mark.parametrize("pipelined", [False, True])
def test_hooks_after_a_step_wait_for_one_that_ends(pipelined):
    degree = init(pipelined)
    model, other = wrapped(degree), wrapped(degree)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    heard: list[Any] = []
    model.register_post_step_hook(lambda *given: heard.append(given))
    other.register_post_step_hook(lambda *given: heard.append(given))

    with pytest.raises(ArithmeticError):
        train(model, torch.randn(4, 3), fails=True)
    assert heard == []

    def both(x: Tensor) -> None:
        model.backward(model(x).sum() + other(x).sum())

    smp.step(both)(torch.randn(4, 3))
    assert heard == [(model, optimizer), (other, optimizer)]


@on_ranks(1, 2)
@pytest.mark.parametrize("pipelined", [False, True])
def test_a_hook_after_a_step_may_ask_for_the_next_one(pipelined):
    degree = init(pipelined)
    model = wrapped(degree)
    heard: list[int] = []

    def again(model: smp.DistributedModel, optimizer: Any) -> None:
        heard.append(len(heard))
        model.register_post_step_hook(again)

    again(model, None)
    for _ in range(3):
        train(model, torch.randn(4, 3))
    assert heard == [0, 1, 2, 3]


@on_ranks(2)
@pytest.mark.parametrize("pipelined", [False, True])
def test_what_is_local_is_all_until_the_partition_and_then_this_ranks(pipelined):
    degree = init(pipelined)
    model = wrapped(degree)
    net = model.get_module()
    for partitioned in (False, True):
        if partitioned:
            train(model, torch.randn(4, 3))
        assert model.partitioned is (partitioned and degree > 1)

        whole = not partitioned or degree == 1
        for local, every, values in (
            (model.local_named_modules(), net.named_modules(), model.local_modules()),
            (model.local_named_buffers(), net.named_buffers(), model.local_buffers()),
            (
                model.local_named_parameters(),
                net.named_parameters(),
                model.local_parameters(),
            ),
        ):
            want = {
                name: value
                for name, value in every
                if whole or name.startswith("far") == (smp.pp_rank() == 1)
            }
            got = dict(local)
            assert list(got) == list(want)
            assert all(got[name] is value for name, value in want.items())
            values = list(values)
            assert len(values) == len(got)
            assert all(a is b for a, b in zip(values, got.values(), strict=True))
        assert model.num_parameters() == sum(p.numel() for p in net.parameters()) == 39


@on_ranks(2)
def test_a_module_is_on_the_rank_of_its_partition_by_path_or_by_itself():
    smp.init({"pipeline_parallel_degree": 2})
    model = wrapped(2)
    net = model.get_module()
    with pytest.raises(RuntimeError, match="partitioned in its first step, not before"):
        model.get_module_partition("far")
    with pytest.raises(RuntimeError, match=r"in its first step, not before; use smp.plan"):
        model.partition_report()
    train(model, torch.randn(4, 3))

    for path, module in net.named_modules():
        rank = int(path.startswith("far"))
        assert model.get_module_partition(path) == rank
        assert model.get_module_partition(module) == rank
    assert model.get_module_partition(net.module) == 0
    for unknown in ("nowhere", nn.Linear(1, 1)):
        told = re.escape(f"the model has no module {unknown!r}")
        with pytest.raises(KeyError, match=told.replace("'", ".")):
            model.get_module_partition(unknown)


@on_ranks(1)
def test_what_cannot_be_wrapped_says_what_it_is():
    with pytest.raises(RuntimeError, match=r"smp.DistributedModel needs smp.init\(\)"):
        smp.DistributedModel(nn.Linear(1, 1))
    smp.init({})
    for wrong in ([nn.Linear(1, 1)], nn.Linear, None):
        told = f"wraps a torch.nn.Module, not a {type(wrong).__name__}"
        with pytest.raises(TypeError, match=told):
            smp.DistributedModel(wrong)
    with pytest.raises(ValueError, match="trace_device='cuda': must be 'cpu' or 'gpu'"):
        smp.DistributedModel(nn.Linear(1, 1), trace_device="cuda")


@on_ranks(1)
def test_its_mode_is_that_of_the_module_and_its_calls_return_it():
    smp.init({})
    net = Net().eval()
    model = smp.DistributedModel(net)
    assert not model.training

    assert model.train() is model and model.training and net.far.norm.training
    assert model.eval() is model and not (model.training or net.far.norm.training)
    assert model.train(False) is model and not net.training
    assert model.requires_grad_(False) is model and not net.last.weight.requires_grad


@on_ranks(2)
@pytest.mark.parametrize("pipelined", [False, True])
def test_the_state_has_the_latest_model_and_optimizer_until_the_end(pipelined):
    degree = init(pipelined)
    assert smp.state.model is None and smp.state.optimizer is None
    models = [wrapped(degree) for _ in range(2)]
    optimizers = [
        smp.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=1.0)) for m in models
    ]
    smp.state.module_manager.translate_functions.append((len, len))
    assert smp.state.model is models[1] and smp.state.optimizer is optimizers[1]
    names = [name for name, _ in models[1].named_parameters()]
    assert smp.state.param_index_to_name_tp_group == [dict(enumerate(names))]
    assert smp.state.param_name_to_index_tp_group == [
        {name: index for index, name in enumerate(names)}
    ]
    core = smp.state.core
    assert core.local_rank() == core.rank() == smp.rank()
    assert core.local_size() == core.size() == smp.size()
    assert smp.utils.rmsg("told") == f"[rank {smp.rank()}] told"

    smp.shutdown()
    assert smp.state.model is None and smp.state.optimizer is None
    assert smp.state.module_manager.translate_functions == []
    assert not core.initialized()
    for name in ("rank", "size", "local_rank", "local_size"):
        with pytest.raises(RuntimeError, match=rf"^smp.core.{name}\(\) needs smp.init\(\)"):
            getattr(core, name)()
    with pytest.raises(RuntimeError, match=r"^utils.rmsg\(\) needs smp.init\(\)"):
        smp.utils.rmsg("told")


def test_an_optimizer_shows_the_one_that_it_wraps():
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)
    optimizer = smp.DistributedOptimizer(sgd)

    assert isinstance(optimizer, torch.optim.Optimizer) and optimizer.optimizer is sgd
    assert optimizer.overflow is False and optimizer.redefined_params is False
    assert repr(optimizer) == f"DistributedOptimizer({sgd!r})"
    assert optimizer.defaults is sgd.defaults and optimizer.state is sgd.state
    optimizer.overflow, optimizer.note = True, "mine"
    assert (optimizer.overflow, sgd.note, hasattr(sgd, "overflow")) == (True, "mine", False)
    optimizer.step = lambda: "a scheduler's"
    assert optimizer.step() == "a scheduler's" and "step" not in vars(sgd)
    with pytest.raises(AttributeError, match="'SGD' object has no attribute 'nothing'"):
        optimizer.nothing  # noqa: B018
    with pytest.raises(AttributeError):  # as of one that is being copied, and no recursion
        smp.DistributedOptimizer.__new__(smp.DistributedOptimizer).state  # noqa: B018
    smp.reset()
