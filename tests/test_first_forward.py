"""Modules and parameters that a model makes in its first forward: the partition decides about
them, and each rank has them, as one process would."""

import copy

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.models.modules import module_of
from tests.models.partition import distributed
from tests.ranks import on_ranks
from tests.reference.whole_job import in_float64

WIDTH = 4


@module_of(lambda: {"query": nn.Linear(WIDTH, WIDTH)})
def Sparse(self, x: Tensor) -> Tensor:
    return torch.relu(self.query(x))


class Full(Sparse):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.query(x))


class Layer(nn.Module):
    """Its kinds are below."""

    kind = "sparse"

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = Sparse(), nn.Linear(WIDTH, WIDTH)

    def make(self) -> None:
        self.attention = Full()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "sparse":
            self.make()
            self.kind = "full"
        return self.out(self.attention(x))


class OldWeights(Layer):
    """As BigBird does."""

    def make(self) -> None:
        full = Full()
        full.query = self.attention.query
        self.attention = full


class NewWeights(Layer):
    """They are in no optimizer, and the old ones stay in theirs."""

    def make(self) -> None:
        super().make()
        nn.init.constant_(self.attention.query.weight, 0.5)
        nn.init.constant_(self.attention.query.bias, 0.1)


class NoWeights(Layer):
    def make(self) -> None:
        self.attention = nn.Tanh()


class Counting(Layer):
    """What it has counted in the traced runs is put back."""

    def make(self) -> None:
        self.attention = nn.Sequential(self.attention, nn.BatchNorm1d(WIDTH))


class Parameter(Layer):
    scale: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.scale = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        return self.out(x) * self.scale


class Again(Layer):
    """Each time."""

    def forward(self, x: Tensor) -> Tensor:
        self.make()
        return self.out(self.attention(x))


class Initialized(Layer):
    """By the first samples, too."""

    def make(self) -> None:
        super().make()
        with torch.no_grad():
            self.out.weight.mul_(2)


class Unnamed(Layer):
    def make(self) -> None:
        self.attention = type("Unheard", (Full,), {})()


class ByParent(nn.Sequential):
    is_full = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_full:
            for layer in self:
                OldWeights.make(layer)
                layer.kind = "full"
            self.is_full = True
        return super().forward(x)


def forward(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    loss = y.square().mean()
    model.backward(loss) if isinstance(model, smp.DistributedModel) else (loss / 2).backward()
    return y.detach()


def make(kind: type[Layer], of: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    in_float64(1)
    return of(kind(), kind())


@pytest.mark.parametrize("home", [0, 1])
@pytest.mark.parametrize(
    ("kind", "of"),
    [
        (OldWeights, nn.Sequential),
        (OldWeights, ByParent),
        (NewWeights, nn.Sequential),
        (NoWeights, nn.Sequential),
        (Counting, nn.Sequential),
        (Parameter, nn.Sequential),
    ],
)
@on_ranks(2)
def test_what_the_first_forward_makes_is_there_as_in_one_process(kind, of, home):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = make(kind, of)
    plain = copy.deepcopy(net)
    model = distributed(net, [(home + number) % 2 for number in range(len(net))])
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    step = smp.step(forward)
    for number in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        model.zero_grad()
        plain.zero_grad()
        want = torch.cat([forward(plain, part) for part in x.chunk(2)])
        torch.testing.assert_close(step(model, x).concat(), want)
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
        optimizer.step()
        plain_optimizer.step()
    for name, value in (*model.local_named_parameters(), *model.local_named_buffers()):
        torch.testing.assert_close(value, plain.state_dict()[name], msg=name)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert len(list(model.local_named_parameters())) == len(list(plain[0].parameters()))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Again, r"'0.attention' \(Sparse\) is replaced by a Full .* and in the next"),
        (Initialized, r"first forward, which changes parameter '0.out.weight' otherwise"),
        (Unnamed, r"Unheard in the first forward, which other ranks cannot be given"),
    ],
)
@on_ranks(2)
def test_what_the_next_forward_would_not_find_is_refused(kind, said):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(make(kind))
    with pytest.raises(RuntimeError, match=said):
        smp.step(forward)(model, torch.ones(4, WIDTH))


class Late(Parameter):
    is_late = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.is_late else self.out(x)


@on_ranks(2)
def test_a_parameter_that_a_later_step_makes_is_refused():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = make(Late)
    model, step, x = distributed(net, {"1": 1}), smp.step(forward), torch.ones(4, WIDTH)
    step(model, x)
    for layer in net:
        layer.is_late = True
    with pytest.raises(RuntimeError, match=r"parameter '[01].scale' \[4\] cannot be added"):
        step(model, x)
