"""Tensor parallelism beside what else there is: buffers, scalers, small sizes, many steps."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from smp.tensor_parallel import group
from smp.tensor_parallel.splits import replacement
from tests import test_distributed_transformer as transformers_of_ours
from tests import test_tensor_parallel_modules as modules
from tests.models import families
from tests.models.modules import module_of
from tests.models.real import REAL
from tests.ranks import on_ranks
from tests.reference import transformer as plain_transformer
from tests.reference.whole_job import (
    WholeJob,
    assert_near,
    in_float64,
    own,
    split_over_all_ranks,
)
from tests.test_tensor_parallel_modules import Gate, SplitGate, marked, rows_of, squares

# -------------------------------------------------------------------------- buffers


@module_of(
    lambda: {"first": nn.Linear(5, 7), "norm": nn.BatchNorm1d(7), "last": nn.Linear(7, 3)}
)
def Normalised(self, x: Tensor) -> Tensor:
    """Split linears with statistics between them."""
    return self.last(torch.tanh(self.norm(self.first(x))))


class OwnStatistics(WholeJob):
    """In the reference, too, each rank's samples meet rank 0's statistics of the last step."""

    def train(self, step: int) -> None:
        buffers = dict(self.plain.named_buffers())
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        after: list[dict[str, Tensor]] = []
        loss = self.loss

        def noting(model: nn.Module, *batch: Tensor) -> Tensor:
            if model is not self.plain:
                return loss(model, *batch)
            give(before)
            value = loss(model, *batch)
            after.append({name: buffer.clone() for name, buffer in buffers.items()})
            return value

        def give(values: dict[str, Tensor]) -> None:
            for name, buffer in buffers.items():
                buffer.data.copy_(values[name])

        self.loss = noting
        super().train(step)
        self.loss = loss
        for name, buffer in self.net.named_buffers():
            assert_near(buffer, after[smp.dp_rank()][name], f"{name} after step {step}")
        give(after[0])


@on_ranks(2, 3)
def test_statistics_that_training_changes_beside_split_linears():
    split_over_all_ranks()
    job = OwnStatistics(
        marked(Normalised),
        squares,
        lambda rank, step: (rows_of(10 * step + rank, 3 + rank, 5),),
    )
    assert not job.model.is_distributed_parameter(job.net.norm.weight)
    for step in range(3):
        job.step(step, max_norm=0.05)
    state = job.check_state()
    assert state["norm.num_batches_tracked"] == 3
    job.model.eval()
    job.plain.eval()
    if smp.rank() == 0:  # the others' statistics are their own until the next step
        assert state["norm.running_mean"].equal(job.net.norm.running_mean)


# ----------------------------------------------------------------- an overflow in one slice


@pytest.mark.parametrize("name", ["hidden.weight", "users.weight", "out.weight"])
@on_ranks(2)
def test_an_overflow_in_one_tp_ranks_slice_skips_the_step_on_all(name):
    split_over_all_ranks()
    torch.manual_seed(1)
    with smp.tensor_parallelism():
        net = modules.Recommender()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    scaler = smp.amp.GradScaler(init_scale=8.0)

    @smp.step
    def train(model: smp.DistributedModel, *batch: Tensor) -> Tensor:
        loss = model(*batch).square().mean()
        model.backward(scaler.scale(loss))
        return loss

    for overflow in (False, True, False):
        optimizer.zero_grad()
        before = [own(p).clone() for p in model.local_parameters()]
        train(model, *modules.picks(smp.dp_rank(), 0))
        if overflow and smp.tp_rank() == 1:
            net.get_parameter(name).grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        stood = [
            own(p).equal(old) for p, old in zip(model.local_parameters(), before, strict=True)
        ]
        assert all(stood) if overflow else not any(stood)
    assert scaler.get_scale() == 4.0
    whole = [p for p in model.local_parameters() if not model.is_distributed_parameter(p)]
    everyones = smp.allgather([p.detach() for p in whole], smp.TP_GROUP)
    assert whole and all(
        torch.equal(a, b) for a, b in zip(everyones[0], everyones[1], strict=True)
    )


# ----------------------------------------------------------------- fewer of them than ranks


class Small(nn.Module):
    """Of everything 2; and something that can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(2, 7)
        self.columns = nn.Embedding(7, 2)
        self.first = nn.Linear(9, 5)
        self.inputs = nn.Linear(2, 5)
        self.outputs = nn.Linear(5, 2)
        self.tied = nn.Linear(7, 2)
        self.tied.weight = self.rows.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(torch.cat([self.rows(ids % 2), self.columns(ids % 7)], -1))
        x = self.inputs(torch.tanh(self.outputs(torch.tanh(x))))
        return self.tied(torch.cat([x, x[..., :2]], -1))


@on_ranks(3, 4)
def test_what_has_fewer_of_an_axis_than_there_are_ranks_stays_whole():
    split_over_all_ranks()
    net = marked(Small)
    smp.set_tensor_parallelism(net.outputs, by_outputs=True)
    job = WholeJob(net, squares, modules.repeated)
    reasons = {one.path: one.reason for one in job.model._smp_split}
    small = f"it is too small for tensor_parallel_degree={group.size()}"
    whole = ("rows", "columns", "inputs", "outputs", "tied")
    assert reasons == {"first": "", **dict.fromkeys(whole, small)}
    report = str(job.model.partition_report())
    assert all(f"{path}" in report for path in whole) and small in report
    job.run(2, max_norm=0.05)


SMALL_REGIONS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mlp": (
        lambda: families.made("gpt2", n_inner=2),
        "'transformer.h.0.mlp' of class GPT2MLP",
    ),
    "feed-forward": (
        lambda: families.made("bert", intermediate_size=2),
        "'bert.encoder.layer.0' of class BertLayer",
    ),
    "heads": (
        lambda: families.made("llama", num_attention_heads=2, num_key_value_heads=2),
        "'model.layers.0.self_attn' of class LlamaAttention",
    ),
    "queries": (
        lambda: families.made("llama", num_attention_heads=2, num_key_value_heads=1),
        "'model.layers.0.self_attn' of class LlamaAttention",
    ),
    "experts": (
        lambda: families.made("mixtral", intermediate_size=2),
        "'model.layers.0.mlp.experts' of class MixtralExperts",
    ),
}


@pytest.mark.parametrize("kind", SMALL_REGIONS)
@on_ranks(3)
def test_a_region_with_fewer_of_them_than_ranks_is_named(kind):
    split_over_all_ranks()
    make, where = SMALL_REGIONS[kind]
    words = rf"{where}.* is too short to be split over tensor_parallel_degree=3 ranks: leave it"
    with pytest.raises(ValueError, match=words):
        smp.DistributedModel(marked(make))


@on_ranks(3)
def test_a_region_that_is_told_to_stay_whole_may_be_small(monkeypatch):
    families.compute_in_float64(monkeypatch, "gpt2")
    split_over_all_ranks()
    net = families.made("gpt2", n_inner=2)
    for block in net.transformer.h:
        smp.set_tensor_parallelism(block.mlp, False)
    job = families.whole_job("gpt2", net)
    job.step(0)


# --------------------------------------------------------------------- registered classes


@module_of(lambda width: {"gate": nn.Linear(width, width)})
def Late(self, x: Tensor) -> Tensor:
    return self.gate(x)


class LateThere(Late, smp.nn.DistributedModule):
    pass


@on_ranks(1, 2)
def test_what_was_made_before_its_class_was_registered_stays_whole(monkeypatch):
    monkeypatch.setattr(replacement, "_registered", {})
    monkeypatch.setattr(Late, "__init__", Late.__init__)  # which registering replaces
    split_over_all_ranks()
    early = marked(lambda: Late(3))
    smp.tp_register_with_module(Late, LateThere)
    net = nn.Sequential(early, marked(lambda: Late(3)))
    model = smp.DistributedModel(net)
    assert type(net[0]) is Late and type(net[1]) is LateThere
    assert type(net[0].gate) is nn.Linear
    report = str(model.partition_report())
    assert "it was made before Late was registered" in report
    plain = copy.deepcopy(net[0])
    x = rows_of(smp.rank(), 2, 3)
    assert torch.equal(net[0](x), plain(x))


@on_ranks(2)
def test_hooks_that_cannot_be_used_are_named(monkeypatch):
    monkeypatch.setattr(replacement, "_registered", {})
    split_over_all_ranks()
    register = smp.tp_register_with_module
    for name in ("init_hook", "forward_hook", "return_hook"):
        with pytest.raises(TypeError, match=rf"smp.tp_register: {name} of Gate .* not 'x'"):
            register(Gate, SplitGate, **{name: "x"})
    with pytest.raises(TypeError, match=r"return_hook of Gate takes \(\); .* one argument"):
        register(Gate, SplitGate, return_hook=lambda: None)
    with pytest.raises(TypeError, match=r"return_hook of Gate takes \(a, b\)"):
        register(Gate, SplitGate, return_hook=lambda a, b: None)
    register(Gate, SplitGate, return_hook=lambda y, more=None: y)

    def unusable(x: Tensor, scale: float = 1.0) -> Any:
        return x, scale

    register(Gate, SplitGate, modules.arguments, unusable)
    model = smp.DistributedModel(nn.Sequential(marked(lambda: Gate(5))))
    with pytest.raises(TypeError, match=r"forward_hook of Gate returns \(args, kwargs\), a tu"):
        model(rows_of(smp.rank(), 2, 5))


# ------------------------------------------------------------------------ tables by hand


@pytest.mark.parametrize("prescaled", [False, True], ids=["own samples", "same samples"])
@on_ranks(2, 3)
def test_a_slice_of_the_vectors_of_all_samples_and_its_gradient(prescaled):
    """Each rank's loss is of its slice, and so their sum is of the whole."""
    split_over_all_ranks(prescaled_batch=prescaled)
    weight = rows_of(1, 9, 5).requires_grad_(True)
    table = smp.nn.DistributedEmbedding(
        9, 5, weight=weight, dtype=torch.float64, skip_scatter_and_merge=True
    )
    everyones = [
        torch.tensor([[3, 8], [0, 3], [3, r]])[: 3 if prescaled else 1 + r]
        for r in range(group.size())
    ]
    mine = everyones[0 if prescaled else group.rank()]
    ids = mine if prescaled else torch.cat(everyones)
    own = weight.tensor_split(group.size(), 1)[group.rank()]
    got = table(mine)
    assert torch.equal(got, own[ids])
    seeds = rows_of(7, *got.shape)
    got.backward(seeds)
    (want,) = torch.autograd.grad(own[ids], own, seeds)
    assert_near(table.weight.grad, want, "gradient")


@on_ranks(2)
def test_a_slice_of_the_vectors_is_of_a_table_that_is_cut_along_the_dimension():
    split_over_all_ranks()
    with pytest.raises(ValueError, match="skip_scatter_and_merge=True .* vocab_parallel=True"):
        smp.nn.DistributedEmbedding(9, 5, skip_scatter_and_merge=True, vocab_parallel=True)


# --------------------------------------------------------------------------- many steps


def of_ours(optimize: str) -> tuple[nn.Module, nn.Module]:
    in_float64(3)
    sizes = {**transformers_of_ours.LM, **transformers_of_ours.GPT}
    no_dropout = transformers_of_ours.NO_DROPOUT
    net = smp.nn.DistributedTransformerLMHead(**sizes, **no_dropout, optimize=optimize)
    return net, plain_transformer.PlainLMHead(**sizes)


def by_rows() -> nn.Module:
    net = marked(lambda: modules.OneTable(lambda: nn.Embedding(11, 5)))
    smp.set_tensor_parallelism(net.table, vocab_parallel=True)
    smp.set_tensor_parallelism(net.out, by_outputs=True)
    return net


def language(model: nn.Module, _: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids, ids).flatten(0, -2), ids.flatten())


def gates(rank: int, step: int) -> tuple[Tensor]:
    return (rows_of(10 * step + rank, 4, 5),)


LAYOUTS: dict[str, Callable[[], WholeJob]] = {
    "by inputs, by dimension": lambda: WholeJob(
        marked(modules.Recommender), squares, modules.picks
    ),
    "tied": lambda: WholeJob(marked(modules.Tied), language, modules.picks),
    "by rows, by outputs": lambda: WholeJob(by_rows(), squares, modules.repeated),
    "registered": lambda: WholeJob(marked(modules.Gates), squares, gates),
    "region": lambda: families.whole_job("gpt2"),
    "heads of keys": lambda: families.whole_job("llama, 1 head of keys"),
    **{
        optimize: lambda optimize=optimize: of_language(*of_ours(optimize))
        for optimize in ("speed", "memory", "channels")
    },
}


def of_language(net: nn.Module, plain: nn.Module) -> WholeJob:
    batch = transformers_of_ours.texts("gpt")
    return WholeJob(net, transformers_of_ours.loss_of, batch, plain=plain)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2, timeout_s=120)
def test_ten_steps_equal_the_plain_models(layout, monkeypatch):
    split_over_all_ranks()
    if layout == "heads of keys":
        families.compute_in_float64(monkeypatch, "llama")
    if layout == "registered":
        monkeypatch.setattr(replacement, "_registered", {})
        smp.tp_register_with_module(
            Gate, SplitGate, modules.arguments, modules.inputs, lambda y: {"y": y}
        )
    job = LAYOUTS[layout]()
    before = {name: p.detach().clone() for name, p in job.plain.named_parameters()}
    job.run(10, max_norm=0.3)
    whole = job.model.state_dict()
    for name, value in job.plain.named_parameters():
        assert_near(whole[name], value, name, scale=max(0.1, value.abs().max().item()))
        assert not torch.equal(value, before[name]), name


# ------------------------------------------------------------------------------- retrieval


@pytest.mark.parametrize("marks", [("encoder",), ("encoder", "reader.network")])
@on_ranks(2)
def test_a_retrieval_model_that_is_split(marks):
    """What its transformer layers and its attention look at themselves stays whole."""
    split_over_all_ranks()
    torch.set_default_dtype(torch.float64)
    real = REAL["retrieval"](dtype=torch.float64)
    net = real.model.eval()  # without dropout
    for path in marks:
        smp.set_tensor_parallelism(net.get_submodule(path))

    def batch(rank: int, step: int) -> tuple[Tensor, ...]:
        return real.make_batch(2 + rank, torch.Generator().manual_seed(10 * step + rank))

    job = WholeJob(net, lambda model, *batch: model(*batch)[0], batch)
    split = {one.path for one in job.model._smp_split if not one.reason}
    assert "encoder.embedding" in split and ("reader.network.0" in split) == (len(marks) == 2)
    job.run(3, max_norm=0.05)
