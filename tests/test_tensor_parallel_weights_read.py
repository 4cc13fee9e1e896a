"""Weights of split modules that are used without these modules' calls.

The reference is ``tests/reference/whole_job.py``, in float64.
"""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import smp
from tests.models.modules import module_of
from tests.ranks import on_ranks
from tests.reference.whole_job import WholeJob, assert_near, split_over_all_ranks

WORDS, WIDTH, INNER = 11, 7, 9


class Net(nn.Module):
    """All of it is marked; ``read`` uses weights, and changes the output by them."""

    def __init__(self, read: Callable[..., Tensor], **config: Any) -> None:
        super().__init__()
        with smp.tensor_parallelism(**config):
            self.words = nn.Embedding(WORDS, WIDTH)
            self.first = nn.Linear(WIDTH, INNER)
            self.second = nn.Linear(INNER, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)
        self.read = read

    def forward(self, ids: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(self.words(ids))))
        return self.read(self, x)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def by_hand(net: Net, x: Tensor) -> Tensor:
    return F.linear(x, net.words.weight) @ net.words.weight


def transposed(net: Net, x: Tensor) -> Tensor:
    return x @ net.first.weight.T @ net.second.weight.t() + net.second.bias


def penalty(net: Net, x: Tensor) -> Tensor:
    return x + net.first.weight.norm() + net.words.weight.pow(2).mean()


def joined(net: Net, x: Tensor) -> Tensor:
    both = torch.cat([net.first.weight, net.second.weight.t()])
    return x + both.sum(0) * both[3]


def sizes(net: Net, x: Tensor) -> Tensor:
    rows, columns = net.first.weight.shape
    assert (rows, columns) == (INNER, WIDTH) == tuple(net.first.weight.size())
    assert net.words.weight.numel() == WORDS * WIDTH and len(net.words.weight) == WORDS
    return x * net.first.weight.reshape(rows * columns).mean()


def without_gradient(net: Net, x: Tensor) -> Tensor:
    scale = net.first.weight.detach().abs().max() + net.second.weight.data.std()
    with torch.no_grad():
        scale = scale * net.words.weight.sum() + sum(row.norm() for row in net.first.weight)
    return x * scale


def given_to_modules(net: Net, x: Tensor) -> Tensor:
    table = net.words.weight
    return x + net.norm(table).sum(0) + net.second(net.first(table)).mean(0)


def of_rank_one(net: Net, x: Tensor) -> Tensor:
    """As DoRA scales a linear by the norms of its rows."""
    rows = torch.linalg.norm(net.second.weight + 0.5, dim=1)
    inner = x @ net.first.weight.t()
    return x / rows.detach() + F.linear(inner, net.second.weight, net.second.bias)


def checkpointed(net: Net, x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return torch.tanh(net.second(y @ net.first.weight.t())) * net.second.weight.mean()

    return checkpoint(inner, x, use_reentrant=False)


READS = [
    by_hand, transposed, penalty, joined, sizes, without_gradient, given_to_modules,
    of_rank_one, checkpointed,
]  # fmt: skip


def batch(rank: int, step: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (torch.randint(WORDS, (3 + 2 * rank, 4), generator=generator),)


def alike(rank: int, step: int) -> tuple[Tensor]:
    return batch(0, step)


def squares(model: nn.Module, ids: Tensor) -> Tensor:
    return (model(ids) - 1).square().mean()


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("by_rows", [False, True], ids=["by columns", "by rows"])
@pytest.mark.parametrize("prescaled", [False, True], ids=["own samples", "same samples"])
@pytest.mark.sample(24)
@on_ranks(2, 3, timeout_s=120)
def test_an_operator_gets_the_whole_weight(read, by_rows, prescaled):
    split_over_all_ranks(prescaled_batch=prescaled)
    torch.set_default_dtype(torch.float64)
    net = Net(read, by_outputs=by_rows, vocab_parallel=by_rows)
    job = WholeJob(net, squares, alike if prescaled else batch)
    assert job.model.is_distributed_parameter(net.first.weight)
    job.run(2)
    (ids,) = job.batch(smp.dp_rank(), 5)
    with torch.no_grad():
        assert_near(job.model(ids), job.plain(ids), "outputs of an evaluation")


def of_all_parameters(model: nn.Module, ids: Tensor) -> Tensor:
    vector = nn.utils.parameters_to_vector(model.parameters())
    of_all = sum(p.square().sum() for p in model.parameters())
    return squares(model, ids) + 0.1 * of_all + vector[3]


@pytest.mark.parametrize("prescaled", [False, True], ids=["own samples", "same samples"])
@on_ranks(2)
def test_a_penalty_in_the_step_is_of_whole_weights(prescaled):
    split_over_all_ranks(prescaled_batch=prescaled)
    torch.set_default_dtype(torch.float64)
    job = WholeJob(Net(plain), of_all_parameters, alike if prescaled else batch)
    for step in range(2):
        job.step(step)
    report = str(job.model.partition_report())
    assert "gathered 4 times, for uses without its module's call: first.weight" in report


def plain(net: Net, x: Tensor) -> Tensor:
    return x


def a_step_by_hand(net: Net) -> None:
    for parameter in net.parameters():
        parameter.data.mul_(0.99).sub_(0.1 * parameter.detach())
        parameter.add_(torch.ones_like(parameter), alpha=-0.1)


def an_average(net: Net) -> None:
    for parameter in net.parameters():
        average = parameter.detach().clone() * 2
        average.lerp_(parameter.data, 0.25)
        parameter.copy_(average)


def whole_values(net: Net) -> None:
    net.first.weight.copy_(torch.randn(INNER, WIDTH))
    net.second.weight.mul_(torch.rand(WIDTH, INNER) > 0.5)
    net.words.weight.data = torch.randn(WORDS, WIDTH)


def noise(net: Net) -> None:
    net.first.weight += 0.1 * torch.randn_like(net.first.weight)


def as_transformers_does(net: Net) -> None:
    for module in net.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.uniform_(-1, 1)


def made_again(net: Net) -> None:
    net.first.reset_parameters()
    net.words.reset_parameters()


WRITES = {
    function.__name__: function
    for function in (
        a_step_by_hand, an_average, whole_values, noise, as_transformers_does, made_again,
    )
}  # fmt: skip
INITIALIZERS = (
    "kaiming_normal_", "kaiming_uniform_", "normal_", "ones_", "orthogonal_",
    "uniform_", "xavier_normal_", "xavier_uniform_",
)  # fmt: skip


def initialized(net: Net, name: str) -> None:
    getattr(nn.init, name)(net.first.weight)
    getattr(nn.init, name)(tensor=net.words.weight)


@pytest.mark.parametrize("write", [*WRITES, *INITIALIZERS])
@pytest.mark.parametrize("by_rows", [False, True], ids=["by columns", "by rows"])
@pytest.mark.sample(28)
@on_ranks(2, 3)
def test_weights_that_are_changed_outside_of_steps(write, by_rows):
    """... are what one process has from the same generator."""
    split_over_all_ranks()
    net = Net(plain, by_outputs=by_rows, vocab_parallel=by_rows)
    whole = copy.deepcopy(net)
    model = smp.DistributedModel(net)
    for one in (whole, net):
        torch.manual_seed(3)
        with torch.set_grad_enabled(write not in WRITES):
            WRITES.get(write, partial(initialized, name=write))(one)
    state = model.state_dict()
    for name, value in whole.state_dict().items():
        assert torch.equal(state[name], value), name


def made_by_hand(read: Callable[..., Tensor], by_rows: bool) -> Net:
    """Of the modules of ``smp.nn``: there is no mark, and no whole weight before the wrap."""
    net = Net(read)
    net.words = smp.nn.DistributedEmbedding(WORDS, WIDTH, vocab_parallel=by_rows)
    net.first = smp.nn.DistributedLinear(WIDTH, INNER, by_outputs=by_rows)
    net.second = smp.nn.DistributedLinear(INNER, WIDTH, by_outputs=by_rows)
    return net


@pytest.mark.parametrize("by_rows", [False, True], ids=["by columns", "by rows"])
@on_ranks(2)
def test_weights_of_modules_made_by_hand_are_served_before_the_wrap_as_well(by_rows):
    split_over_all_ranks()
    torch.set_default_dtype(torch.float64)
    net, whole = made_by_hand(penalty, by_rows), Net(penalty)
    for one in (net, whole):
        torch.manual_seed(3)
        made_again(one)
        as_transformers_does(one)
        initialized(one, "xavier_normal_")
    with pytest.raises(RuntimeError, match="needs all of 'DistributedLinear.weight', of sh"):
        nn.utils.parametrizations.weight_norm(net.second)
    values = copy.deepcopy(whole.state_dict())
    job = WholeJob(net, squares, batch, plain=whole)
    state = job.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in values.items())
    job.run(2)
    with pytest.raises(RuntimeError, match=r"smp: norm needs all of 'first.weight'"):
        net.first.weight.norm()


@on_ranks(2)
def test_tied_modules_made_by_hand_are_cut_alike():
    split_over_all_ranks()
    table = smp.nn.DistributedEmbedding(WORDS, WIDTH)
    head = smp.nn.DistributedLinear(WIDTH, WORDS, bias=False, by_outputs=True)
    head.weight = table.weight
    with pytest.raises(ValueError, match="'1' cuts its 'weight' along axis 0, .*axis 1: have"):
        smp.DistributedModel(nn.Sequential(table, head))


def in_forward(net: Net, x: Tensor) -> Tensor:
    net.first.weight.clamp_(-0.3, 0.3)
    net.second.weight.data.mul_(0.9)
    net.second.weight -= torch.ones(WIDTH, INNER)
    net.words.weight.data.normal_()
    return x * net.words.weight.sum() + net.second.weight.norm()


@on_ranks(2)
def test_weights_that_a_forward_changes():
    split_over_all_ranks()
    torch.set_default_dtype(torch.float64)
    net = Net(in_forward)
    whole = copy.deepcopy(net)
    model = smp.DistributedModel(net)
    (ids,) = batch(smp.rank(), 0)
    with torch.no_grad():
        for _ in range(2):
            out = []
            for one in (whole, model):
                torch.manual_seed(3)
                out.append(one(ids))
            assert_near(out[1], out[0], "outputs")


def an_element(net: Net) -> None:
    with torch.no_grad():
        net.first.weight[2, 1] = 0.0


OUTSIDE = {
    "norm": lambda net: net.first.weight.norm(),
    "sum": lambda net: net.first.weight.data.sum().item(),
    "__setitem__": an_element,
    "eye_": lambda net: nn.init.eye_(net.first.weight),
    "equal": lambda net: torch.equal(net.first.weight, net.first.weight.clone()),
    "view": lambda net: nn.utils.parameters_to_vector(net.first.parameters()),
    "copying": lambda net: copy.deepcopy(net.first.weight),
    "pickling": lambda net: pickle.dumps(net.first.weight),
    "copy_": lambda net: net.first.weight.data.copy_(torch.zeros(INNER, 1)),
    "data": lambda net: setattr(net.first.weight, "data", torch.zeros(3)),
}


@torch.no_grad()
def rows_one_by_one(net: Net, x: Tensor) -> None:
    for row in net.first.weight:
        row.div_(row.norm())


@torch.no_grad()
def a_view_of_a_view(net: Net, x: Tensor) -> None:
    net.first.weight[1:].t()[0] += 1


INSIDE = {
    "__setitem__": lambda net, x: x + (an_element(net) or 0),
    "div_": rows_one_by_one,
    "add_": a_view_of_a_view,
    "fill_": lambda net, x: net.first.weight.data.view(-1)[3].fill_(0),
    "zero_": lambda net, x: x + net.first.weight.zero_().sum(),
    "Scale.apply": lambda net, x: x + Scale.apply(net.first.weight).sum(),
}


@pytest.mark.parametrize("name", OUTSIDE)
@on_ranks(2)
def test_what_would_take_a_slice_for_the_whole_outside_of_steps_is_refused(name):
    split_over_all_ranks()
    net = Net(plain)
    smp.DistributedModel(net)
    half = INNER, (4, 3)[smp.tp_rank()]
    message = rf"smp: {name} needs all of 'first.weight', of shape \[{INNER}, {WIDTH}\]"
    with pytest.raises(RuntimeError, match=message) as caught:
        OUTSIDE[name](net)
    assert f"this rank has {list(half)}" in str(caught.value)
    assert "smp.set_tensor_parallelism('first', False)" in str(caught.value)


@pytest.mark.parametrize("name", INSIDE)
@on_ranks(2)
def test_what_would_change_the_whole_in_a_forward_is_refused(name):
    split_over_all_ranks()
    model = smp.DistributedModel(Net(INSIDE[name]))
    with pytest.raises(RuntimeError, match=f"smp: {name} needs all of 'first.weight'"):
        model(*batch(0, 0))


@module_of(lambda: {"inner": nn.Linear(WIDTH, INNER)})
def Returning(self, x: Tensor) -> tuple[Tensor, Tensor]:
    return self.inner(x), self.inner.weight


@module_of(lambda: {"bias": nn.Parameter(torch.zeros(WORDS))})
def Given(self, x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight, self.bias)


class OverRanks(nn.Module):
    """Weights go to modules of another pp_rank, and come from one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.returning = Returning()
        self.given = Given()
        for module in (self.words, self.returning):
            smp.set_tensor_parallelism(module)
        for module in (self.returning, self.given):
            smp.set_partition(module, 1)

    def forward(self, ids: Tensor) -> Tensor:
        inner, weight = self.returning(self.words(ids))
        return self.given(torch.tanh(inner @ weight), self.words.weight)


@pytest.mark.parametrize("prescaled", [False, True], ids=["own samples", "same samples"])
@on_ranks(4)
def test_a_weight_goes_whole_to_another_stage(prescaled):
    smp.init(
        {
            "tensor_parallel_degree": 2,
            "pipeline_parallel_degree": 2,
            "prescaled_batch": prescaled,
        }
    )
    torch.set_default_dtype(torch.float64)
    WholeJob(OverRanks(), squares, alike if prescaled else batch).run(2)


@pytest.mark.parametrize("prescaled", [False, True], ids=["own samples", "same samples"])
@on_ranks(2)
def test_a_hook_multiplies_a_slice_of_the_gradient_by_a_slice_of_its_mask(prescaled):
    split_over_all_ranks(prescaled_batch=prescaled)
    torch.set_default_dtype(torch.float64)
    job = WholeJob(Net(plain), squares, alike if prescaled else batch)
    mask = (torch.arange(INNER * WIDTH) % 2.0).view(INNER, WIDTH)
    for one in (job.net, job.plain):
        one.first.weight.register_hook(lambda gradient: gradient * mask)
    job.step(0)
    job.net.first.weight.register_hook(lambda gradient: gradient / gradient.norm())
    with pytest.raises(RuntimeError, match="smp: norm needs all of 'first.weight'"):
        job.step(1)


@on_ranks(2)
def test_a_module_that_is_replaced_after_the_wrap_is_refused():
    split_over_all_ranks()
    net = Net(plain)
    model = smp.DistributedModel(net)
    net.norm = Wrapped(net.norm)
    model(*batch(0, 0))
    message = r"'words' \(DistributedEmbedding\) cannot be replaced by .* after smp.Distributed"
    with pytest.raises(RuntimeError, match=message):
        net.words = nn.Embedding(WORDS, WIDTH)


@module_of(lambda inside: {"inside": inside})
def Wrapped(self, x: Tensor) -> Tensor:
    return self.inside(x)


@module_of(
    lambda: {
        "words": nn.Embedding(WORDS, WIDTH),
        "linear": nn.Linear(WIDTH, INNER),
        "scale": nn.Parameter(torch.tensor(0.7)),
    }
)
def Scaled(self, ids: Tensor) -> Tensor:
    """Calls a linear with another weight in the place of its own."""
    x = self.words(ids)
    weights = {"weight": self.linear.weight * self.scale * x.detach().mean()}
    return torch.func.functional_call(self.linear, weights, (x,)) + self.linear(x)


@pytest.mark.parametrize("by_rows", [False, True], ids=["by columns", "by rows"])
@on_ranks(2, 3)
def test_a_call_with_another_weight_takes_its_slice(by_rows):
    split_over_all_ranks(prescaled_batch=True)
    torch.set_default_dtype(torch.float64)
    net = Scaled()
    smp.set_tensor_parallelism(net.linear, by_outputs=by_rows)
    WholeJob(net, squares, alike).run(2)


@on_ranks(2)
def test_a_call_with_another_weight_on_other_samples_is_refused():
    split_over_all_ranks()
    net = Scaled()
    smp.set_tensor_parallelism(net.linear)
    model = smp.DistributedModel(net)
    message = r"'linear' .* \[9, 7\] in the place of its 'weight'"
    with pytest.raises(NotImplementedError, match=message):
        model(*batch(smp.rank(), 0))
