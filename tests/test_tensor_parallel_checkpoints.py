"""Partial checkpoints of models that are split over the TP_GROUP: each rank loads its slices.

A run that resumes goes on with the bits of one that was never interrupted.  Under another
pipeline degree the slices go to the ranks that own them there; under another
tensor_parallel_degree the checkpoint is refused.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.slicing.slices import slices_of
from tests.models.steps import own_loss
from tests.models.trained import assert_same, snapshot, two_groups
from tests.ranks import call_on_ranks, on_ranks
from tests.reference.whole_job import assert_near, in_float64
from tests.test_tensor_parallel import small_gpt2

VOCABULARY = 23
MICROBATCHES = 2


class Odd(nn.Module):
    """Linears and tables that do not divide, cut along either axis, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 7)
        self.first = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(5, 7)
        self.head = nn.Linear(7, VOCABULARY, bias=False)
        self.head.weight = self.table.weight
        for module in (self.table, self.first, self.head):
            smp.set_tensor_parallelism(module)
        smp.set_tensor_parallelism(self.second, by_outputs=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).mean(1)
        x = x + self.second(torch.tanh(self.norm(self.first(x))))
        return self.head(x).square().mean()


class Gpt2(nn.Module):
    """Transformers' model, with other weights for each seed."""

    def __init__(self, **marks: Any) -> None:
        super().__init__()
        seed = torch.initial_seed()
        self.net = small_gpt2(marks=marks)  # whose weights are always the same
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(input_ids=ids, labels=ids).loss


class Own(nn.Module):
    """A transformer of ``smp.nn``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = smp.nn.DistributedTransformerLMHead(
            num_layers=2, num_attention_heads=3, attention_head_size=2, hidden_size=6,
            intermediate_size=7, vocab_size=VOCABULARY, num_positions=16, causal_mask_size=16,
            pre_layernorm=True, post_layernorm=False, attention_dropout_prob=0.0,
            hidden_dropout_prob=0.0, embedding_dropout_prob=0.0,
        )  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        return self.net((ids, None, None, None, ids))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linears": Odd,
    "in place": lambda: Gpt2(distribute_embedding=True),
    "own": Own,
    "replaced": lambda: Gpt2(replace=True),
}


def ids_of(step: int) -> Tensor:
    """This dp_rank's tokens of a step."""
    generator = torch.Generator().manual_seed(100 * step + smp.dp_rank())
    return torch.randint(0, VOCABULARY, (2 * MICROBATCHES, 6), generator=generator)


class Run:
    """A model that is split, and AdamW with two groups."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        in_float64(seed)
        self.model = smp.DistributedModel(MODELS[kind]())
        adamw = torch.optim.AdamW(two_groups(self.model), lr=0.01, weight_decay=0.1)
        self.optimizer = smp.DistributedOptimizer(adamw)
        self._step = smp.step(own_loss)

    def train(self, first: int, end: int) -> list[Tensor]:
        """The losses of these steps."""
        losses = []
        for number in range(first, end):
            self.optimizer.zero_grad()
            losses.append(self._step(self.model, ids_of(number)).reduce_mean())
            self.optimizer.step()
        return losses

    def evaluate(self) -> None:
        """A step that trains nothing, which makes the partition."""
        self.model.eval()
        with torch.no_grad():
            smp.step(lambda model, ids: model(ids))(self.model, ids_of(0))
        self.model.train()

    def save(self, path: Path, tag: str) -> None:
        smp.save_checkpoint(
            path, tag, model=self.model, optimizer=self.optimizer, user_content={"tag": tag}
        )

    def own(self) -> Any:
        """What this rank holds of the model and the optimizer."""
        return snapshot([self.model.local_state_dict(), self.optimizer.local_state_dict()])

    def full(self) -> Any:
        """What the plain model and optimizer have."""
        return snapshot([self.model.state_dict(), self.optimizer.state_dict()])

    def whole(self) -> bytes:
        """The same, as a rank can return it."""
        file = io.BytesIO()
        torch.save(self.full(), file)
        return file.getvalue()


def init(pp: int, tp: int = 2) -> None:
    smp.init(
        {
            "pipeline_parallel_degree": pp,
            "tensor_parallel_degree": tp,
            "microbatches": MICROBATCHES,
        }
    )


# ----------------------------------------------------------------------- the same degrees


def check_a_resumed_run(kind: str, when: str, path: Path) -> None:
    whole = Run(kind)
    whole.train(0, 3)
    whole.save(path, "three")
    saved, full = whole.own(), whole.full()
    losses = whole.train(3, 6)
    want = whole.own()  # the steps of another model share out this one's buffers, too

    resumed = Run(kind, seed=9)
    if when == "after":
        resumed.evaluate()
    assert smp.resume_from_checkpoint(path) == {"tag": "three"}
    if smp.rdp_rank() == 0:
        assert_same(resumed.full(), full)
    if when == "before":
        resumed.evaluate()
    if smp.rdp_rank() == 0:  # whose statistics were saved, and go to all at the next step
        assert_same(resumed.own(), saved)
    assert_same(resumed.train(3, 6), losses)
    assert_same(resumed.own(), want)
    parameters = [p for _, p in resumed.model.local_named_parameters()]
    cut = [p for p in parameters if slices_of(p) is not None]
    assert cut or smp.pp_size() > 1
    moments = resumed.optimizer.local_state_dict()["state"]
    assert len(moments) == len(parameters)


EVERY = (
    pytest.mark.parametrize("kind", MODELS),
    pytest.mark.parametrize("when", ["before", "after"]),
)


def every_model(function: Callable) -> Callable:
    """With each kind of model, resumed before its first step and after it."""
    for mark in EVERY:
        function = mark(function)
    return function


@pytest.mark.sample(5)
@on_ranks(2)
@every_model
def test_a_run_resumes_with_the_bits_of_an_uninterrupted_one(kind, when, tmp_path):
    init(pp=1)
    check_a_resumed_run(kind, when, tmp_path)


@pytest.mark.sample(3)
@on_ranks(4)
@every_model
@pytest.mark.parametrize("pp", [2, 1], ids=["2 stages", "2 replicas"])
def test_so_does_one_of_stages_or_of_replicas(pp, kind, when, tmp_path):
    init(pp)
    check_a_resumed_run(kind, when, tmp_path)


@on_ranks(4)
def test_each_pair_of_ranks_has_its_files(tmp_path):
    """A file of each kind for each pp_rank and tp_rank, with the slices of that rank."""
    init(pp=2)
    run = Run("in place")
    run.train(0, 1)
    run.save(tmp_path, "a")
    folder = tmp_path / "a_partial"
    kinds = ("model", "optimizer")
    parts = [f"{k}_{pp}_{tp}.pt" for k in kinds for pp in range(2) for tp in range(2)]
    named = (folder / "parts").read_text().splitlines()
    assert named == [*parts, "user_content.pt"]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*named, "parts"])
    file = folder / f"model_{smp.pp_rank()}_{smp.tp_rank()}.pt"
    assert_same(torch.load(file), run.model.local_state_dict())
    smp.barrier()
    if smp.rank() == 0:
        (folder / "optimizer_1_1.pt").unlink()
    smp.barrier()
    with pytest.raises(smp.CheckpointError, match=r"a_partial lacks optimizer_1_1\.pt"):
        smp.resume_from_checkpoint(tmp_path)


# ------------------------------------------------------------------------- other degrees


def save_and_go_on(path: Path, kind: str, pp: int) -> tuple[bytes, bytes]:
    """The whole states when it was saved, and two steps later."""
    init(pp)
    run = Run(kind)
    run.train(0, 2)
    run.save(path, "two")
    saved = run.whole()
    run.train(2, 4)
    return saved, run.whole()


def resume_and_go_on(path: Path, kind: str, pp: int, when: str) -> tuple[bytes, bytes]:
    init(pp)
    run = Run(kind, seed=9)
    if when == "after":
        run.evaluate()
    smp.resume_from_checkpoint(path)
    if when == "before":
        run.evaluate()
    saved = run.whole()
    run.train(2, 4)
    return saved, run.whole()


@pytest.mark.sample(4)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("saved, loaded", [(1, 2), (2, 1)])
def test_a_checkpoint_loads_under_another_pipeline_degree(saved, loaded, kind, when, tmp_path):
    """The bits that were saved, and then what the other run had but for rounding."""
    states = call_on_ranks(2 * saved, save_and_go_on, tmp_path, kind, saved)
    want = [torch.load(io.BytesIO(one)) for one in states[0]]
    for got in call_on_ranks(2 * loaded, resume_and_go_on, tmp_path, kind, loaded, when):
        then, later = (torch.load(io.BytesIO(one)) for one in got)
        assert_same(then, want[0])
        check_near(later, want[1])


def check_near(got: Any, want: Any) -> None:
    """States of a model and its optimizer, equal but for rounding."""
    for name, value in want[0].items():
        assert_near(got[0][name], value, name)
    for number, moments in want[1]["state"].items():
        for key, value in moments.items():
            assert_near(got[1]["state"][number][key], value, f"{key} of {number}")


def save_with(path: Path, tp: int) -> None:
    init(pp=1, tp=tp)
    run = Run("linears")
    run.train(0, 1)
    run.save(path, "a")


def check_it_is_refused(path: Path, saved: int, tp: int) -> None:
    """On every rank; the run goes on as it was."""
    init(pp=1, tp=tp)
    run, other = Run("linears"), Run("linears")
    before = run.own()
    refused = (
        rf"a_partial was saved with tensor_parallel_degree {saved}, and here it is {tp}: .* "
        "save a full checkpoint"
    )
    for load_optimizer in (True, False):
        with pytest.raises(smp.CheckpointError, match=refused):
            smp.resume_from_checkpoint(path, load_optimizer=load_optimizer)
    assert_same(run.own(), before)
    assert_same(run.train(0, 1), other.train(0, 1))


@pytest.mark.parametrize("saved, loaded", [(2, 1), (2, 3), (1, 2)])
def test_a_checkpoint_of_another_degree_is_refused(saved, loaded, tmp_path):
    call_on_ranks(2, save_with, tmp_path, saved)
    call_on_ranks(max(loaded, 2), check_it_is_refused, tmp_path, saved, loaded)
