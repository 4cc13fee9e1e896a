"""Spec: corners of csrc/python/modules: gradients that are added on the way, what a module of
another rank does to its arguments, and who may catch what it raises.
"""

import collections
import copy
import threading
from contextlib import suppress
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.models.modules import module_of
from tests.models.partition import distributed
from tests.ranks import on_ranks
from tests.reference.whole_job import WholeJob
from tests.test_tensor_parallel_modules import marked, rows_of

ROWS, WIDTH = 5, 3
WAYS = list(product(["sparse", "dense"], repeat=3))


@module_of(lambda: {"rows": nn.Embedding(ROWS, WIDTH, sparse=True)})
def Table(self, ids: Tensor, way: str) -> Tensor:
    """Rows of it have a sparse gradient, the whole of it a dense one."""
    if way == "sparse":
        return self.rows(ids)
    return self.rows.weight.tanh().sum() * ids.unsqueeze(-1).expand(-1, WIDTH).double()


@module_of(lambda: {"near": nn.Linear(WIDTH, WIDTH), "table": Table()})
def Head(self, ids: Tensor, way: str) -> Tensor:
    return self.near(self.table(ids, way))


@on_ranks(2)
@pytest.mark.parametrize("there", [0, 1])
def test_sparse_and_dense_gradients_of_one_table_are_added(there):
    """Of microbatches and of steps, in any order, whichever is first."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 3})
    net = Head().double()
    plain = copy.deepcopy(net)
    model = distributed(
        net, {"": 0, "near": 1 - there, "table": there}, average_grads_across_microbatches=False
    )
    ids = torch.arange(3)
    ways = dict(enumerate(WAYS[-1]))

    @smp.step
    def step(model: nn.Module, ids: Tensor) -> Tensor:
        loss = model(ids, ways[int(ids[0])]).square().sum()
        model.backward(loss)
        return loss

    for number, order in enumerate(WAYS):
        ways.update(enumerate(order))
        if number % 2 == 0:
            model.zero_grad()
            plain.zero_grad()
        step(model, ids)
        for i, way in enumerate(order):
            plain(ids[i : i + 1], way).square().sum().backward()
        for name, parameter in model.local_named_parameters():
            want = plain.get_parameter(name).grad
            assert parameter.grad.is_sparse == want.is_sparse, order
            got = parameter.grad.to_dense()
            torch.testing.assert_close(got, want.to_dense(), rtol=1e-12, atol=1e-12)


# ------------------------------------------------------- what a loss leaves out elsewhere


@module_of(
    lambda: {"first": nn.Linear(4, 3), "last": nn.Linear(3, 3), "other": nn.Linear(4, 3)}
)
def Ways(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """One goes over both ranks of a pipeline, one over its first alone."""
    return self.last(self.first(x)), self.other(x)


@on_ranks(4)
@pytest.mark.parametrize("far", ["first", "last"])
def test_zeros_of_what_no_loss_uses_are_dropped_on_every_rank_and_in_that_step_alone(far):
    """What all use, times zero, has zeros in the next step."""
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2})
    net = marked(Ways)
    smp.set_partition(net, 0)
    for name, module in net.named_children():
        smp.set_partition(module, int(name == far))

    def loss(model: nn.Module, x: Tensor, factors: tuple) -> Tensor:
        used = zip(factors, model(x), strict=True)
        return sum(factor * out.square().mean() for factor, out in used if factor is not None)

    def batch(rank: int, step: int) -> tuple:
        return rows_of(rank, 2, 4), [(None, 1), (0, 1), (1, None), (1, 0)][step]

    job = WholeJob(net, loss, batch)
    for step in range(4):
        job.step(step)
        job.check_gradients()


# ---------------------------------------------------------------- arguments that change


class Slotted:
    """It travels as a pickle, with its tensors beside it."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@module_of(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def Changer(self, x: Tensor, how: str, given: object) -> Tensor:
    CHANGES[how](given)
    return self.linear(x)


def rename(given: dict) -> None:
    given["new"] = given.pop("old")


def swap_keys(given: dict) -> None:
    """As many items, with the same values in the same order."""
    values = list(given.values())
    keys = list(given)[::-1]
    given.clear()
    given.update(zip(keys, values, strict=True))


def replace_tensor(given: Slotted) -> None:
    given.tensor = given.tensor.clone()


def change_tensor(given: Slotted) -> None:
    given.tensor.add_(1)


CHANGES = {
    "nothing": lambda given: None,
    "rename": rename,
    "swap keys": swap_keys,
    "swap items": lambda given: given.reverse(),
    "move to end": lambda given: given.move_to_end("old"),
    "replace a tensor": replace_tensor,
    "change a tensor": change_tensor,
}


def items_of(given: object) -> object:
    return list(given.items()) if isinstance(given, dict) else given


@on_ranks(2)
@pytest.mark.parametrize("graph", [True, False], ids=["with a graph", "without"])
def test_what_a_far_module_does_to_its_arguments_is_done_here(graph):
    smp.init({"pipeline_parallel_degree": 2})
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Changer())
    model = distributed(net, [0, 1])
    given: list = []

    @smp.step
    def step(model: nn.Module, x: Tensor, how: str) -> Tensor:
        given[:] = [make()]
        with torch.set_grad_enabled(graph):
            y = model.module[1](model.module[0](x), how, given[0])
        if graph:
            model.backward(y.sum())
        return y.sum()

    def both() -> dict:
        return {"old": "text", "other": "words", "last": 3}

    x = torch.ones(2, WIDTH)
    for make, how in (
        (both, "nothing"),
        (both, "rename"),
        (both, "swap keys"),
        (lambda: collections.OrderedDict(both()), "rename"),
        (lambda: collections.OrderedDict(both()), "swap keys"),
        (lambda: collections.OrderedDict(both()), "move to end"),
        (lambda: ["a", ["b"], 3], "swap items"),
    ):
        step(model, x, how)
        if smp.pp_rank() == 0:
            want = make()
            CHANGES[how](want)
            assert items_of(given[0]) == items_of(want), how

    def make() -> Slotted:
        return Slotted(torch.ones(2))

    step(model, x, "change a tensor")
    if smp.pp_rank() == 0:
        assert given[0].tensor.tolist() == [2, 2]
    said = "module '1' on pp_rank 1 changed an argument of type .*Slotted in place"
    with pytest.raises(TypeError, match=said):
        step(model, x, "replace a tensor")
    step(model, x, "nothing")


# ----------------------------------------------------------------- what nobody can catch


class Final(BaseException):
    """Like Ctrl-C."""


class Far(nn.Module):
    raises: type[BaseException] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.raises is not None:
            raise self.raises("of the far module")
        return self.linear(x)


@on_ranks(2)
@pytest.mark.parametrize("error", [RuntimeError, Final])
def test_a_caller_can_catch_errors_of_a_far_module_and_not_what_ends_a_program(error):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Far())
    model = distributed(net, [0, 1])
    caught = []

    @smp.step
    def step(model: nn.Module, x: Tensor) -> Tensor:
        y = model.module[0](x)
        try:
            y = model.module[1](y)
        except BaseException as one:
            caught.append(type(one))
        model.backward(y.sum())
        return y.sum()

    x = torch.ones(4, WIDTH)
    step(model, x)
    net[1].raises = error
    if error is Final:
        with pytest.raises(Final, match="of the far module"):
            step(model, x)
        assert Final not in caught
    else:
        step(model, x)
        assert caught == ([RuntimeError] * 2 if smp.pp_rank() == 0 else [])
    net[1].raises = None
    step(model, x)


@on_ranks(2)
def test_a_result_that_cannot_travel_fails_that_step_on_every_rank():
    """It is found when all have come to the end; no gradient is left of it."""
    smp.init({"pipeline_parallel_degree": 2})
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Far())
    plain = copy.deepcopy(net)
    model = distributed(net, [0, 1])

    @smp.step
    def step(model: nn.Module, x: Tensor, travels: bool) -> object:
        loss = model(x).square().sum()
        model.backward(loss)
        return loss if travels else threading.Lock()

    x = torch.ones(2, WIDTH)
    step(model, x, True)
    model.zero_grad()
    for _ in range(2):
        with pytest.raises(TypeError, match="cannot pickle '_thread.lock' object"):
            step(model, x, False)
        assert all(p.grad is None for p in model.local_parameters())
    step(model, x, True)
    plain(x).square().sum().backward()
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


@module_of(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def Refusing(self, x: Tensor, refuses: bool) -> Tensor:
    if refuses:
        raise RuntimeError("refused")
    return self.linear(x)


@on_ranks(2)
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_a_far_module_that_raises_without_gradients_has_them_in_its_next_call(pipeline):
    """The thread that ran it is as it was before."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "pipeline": pipeline})
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Refusing())
    plain = copy.deepcopy(net)
    model = distributed(net, [0, 1], average_grads_across_microbatches=False)

    def compute(module: nn.Module, x: Tensor) -> Tensor:
        y = module[0](x)
        for _ in range(3):
            with torch.no_grad(), suppress(RuntimeError):
                module[1](y, True)
            y = module[1](y, False)
            assert y.requires_grad
        return y.square().sum()

    @smp.step
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = compute(model.module, x)
        model.backward(loss)
        return loss

    x = torch.randn(4, WIDTH)
    for _ in range(2):
        model.zero_grad()
        step(model, x)
    compute(plain, x).backward()
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
