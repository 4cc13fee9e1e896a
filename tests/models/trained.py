"""A small model that is trained the same way with smp and by the cut loop.

Its embedding and output share a weight, it has buffers that training changes, and its
parameters are given to the optimizer in two groups of another order than the module's.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from tests.reference.cut_loop import cut_loop

MICROBATCHES = 2


class Trained(nn.Module):
    """Embedding, layers with BatchNorm, and an output tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.first = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.output = nn.Linear(6, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.second(self.first(self.embedding(tokens))))


def rank_of(ranks: int) -> dict[str, int]:
    """The root, embedding and output on 0, ``first`` and ``second`` on other ranks."""
    far = {"first": 1 % ranks, "second": (ranks - 1)}
    return {path: far.get(path.split(".")[0], 0) for path, _ in Trained().named_modules()}


def make_model(seed: int = 0, pin: bool = True) -> Trained:
    """The same weights on every rank; its parts pinned as ``rank_of`` says."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Trained()
    if pin:
        for path, module in model.named_modules():
            smp.set_partition(module, rank_of(smp.pp_size())[path])
    return model


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases apart, the later ones first."""
    named = list(model.named_parameters())[::-1]
    return [
        {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0, "lr": 0.02},
        {"params": [p for n, p in named if "bias" not in n]},
    ]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=0.01, weight_decay=0.1, amsgrad=True)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adam": adam,
    "adamw": adamw,
}


def batch_of(number: int) -> Tensor:
    """Step ``number``'s tokens, ``[4]``."""
    return torch.randint(11, (4,), generator=torch.Generator().manual_seed(number))


def train_step(model: Any, tokens: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens), (tokens + 1) % 11)
    model.backward(loss)
    return loss


class Run:
    """Training with smp: model, optimizer and scheduler, wrapped."""

    def __init__(
        self,
        name: str = "adamw",
        seed: int = 0,
        before_wrapping: bool = False,
        state: dict[str, Any] | None = None,
    ):
        module = make_model(seed)
        plain = OPTIMIZERS[name](module) if before_wrapping else None
        if plain is not None and state is not None:
            plain.load_state_dict(state)
        self.model = smp.DistributedModel(module)
        self.optimizer = smp.DistributedOptimizer(plain or OPTIMIZERS[name](self.model))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.step = smp.step(train_step)

    def train(self, first: int, end: int) -> None:
        for number in range(first, end):
            self.optimizer.zero_grad()
            self.step(self.model, batch_of(number + 100 * smp.dp_rank()))
            self.optimizer.step()
            self.scheduler.step()

    def evaluate(self) -> None:
        """A first step without training, which makes the partition."""
        self.model.eval()
        with torch.no_grad():
            smp.step(lambda model, tokens: model(tokens))(self.model, batch_of(0))
        self.model.train()


class PlainRun:
    """The same training by the cut loop, in this process alone."""

    def __init__(self, name: str = "adamw", seed: int = 0):
        self.model = make_model(seed, pin=False)
        self.optimizer = OPTIMIZERS[name](self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def train(self, first: int, end: int) -> None:
        for number in range(first, end):
            self.optimizer.zero_grad()
            cut_loop(
                train_step,
                self.model,
                (batch_of(number),),
                rank_of=rank_of(smp.pp_size()),
                ranks=smp.pp_size(),
                microbatches=MICROBATCHES,
            )
            self.optimizer.step()
            self.scheduler.step()


def init(ranks: int) -> None:
    smp.init({"pipeline_parallel_degree": ranks, "microbatches": MICROBATCHES})


def trained(name: str, steps: int = 1) -> Run:
    """A run on two ranks, after so many steps."""
    init(2)
    run = Run(name)
    run.train(0, steps)
    return run


def snapshot(value: Any) -> Any:
    """A copy that later steps do not change."""
    return copy.deepcopy(value)


def assert_same(got: Any, want: Any, where: str = "") -> None:
    """Containers with the same keys in order, and tensors of the same bits."""
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor), f"{where}: {got!r} is no tensor"
        assert (got.shape, got.dtype) == (want.shape, want.dtype), where
        assert torch.equal(got, want), f"{where}: {got} is not {want}"
    elif isinstance(want, dict):
        assert list(got) == list(want), f"{where}: {list(got)} are not {list(want)}"
        for key in want:
            assert_same(got[key], want[key], f"{where}.{key}")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), where
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    else:
        assert got == want, f"{where}: {got!r} is not {want!r}"
