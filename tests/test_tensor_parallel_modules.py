"""Primitives, linears and embeddings by themselves, and users' own distributed modules."""

import copy
import functools
import gc
import os
import random
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import smp
from smp.compat import counterparts
from smp.data_parallel.reduction import Reduction
from smp.marks import REPLACES
from smp.modules import hooks
from smp.nn import utils as blocks
from smp.runtime import collective_chain
from smp.slicing import parameter_marks
from smp.slicing.slices import Slices, mark, slices_of
from smp.state_mod import state
from smp.tensor_parallel import group, primitives
from smp.tensor_parallel.backward import gradients, unused_collectives
from smp.tensor_parallel.rows import assumed_sizes
from smp.tensor_parallel.splits import replacement
from tests.models.modules import in_backward, module_of
from tests.ranks import on_ranks
from tests.reference.whole_job import (
    WholeJob,
    assert_near,
    compare_slice,
    in_float64,
    split_over_all_ranks,
)

# --------------------------------------------------------------------------- primitives


def rows_of(rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.fixture(params=[True, False], ids=["columns", "copies"])
def columns(request):
    """Whether slices along other axes than the first go straight to where they belong."""
    return request.param


def moving(columns: bool) -> Any:
    """The block's operations move columns, as on one host, or copy, as everywhere else."""
    assert group.moves_columns(torch.zeros(1))
    return mock.patch.object(group, "moves_columns", lambda tensor: columns)


def check_adjoint(operation, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """The operation gives this rank's of the outputs, and its backward is the transpose.

    Args:
        inputs, outputs: by rank; ``outputs`` is a function of ``inputs``, with grad.
    """
    rank = group.rank()
    mine = inputs[rank].detach().clone().requires_grad_(True)
    got = operation(mine)
    assert torch.equal(got, outputs[rank])
    seeds = [rows_of(100 + r, *out.shape) for r, out in enumerate(outputs)]
    want = torch.autograd.grad(outputs, inputs, seeds)[rank]
    got.backward(seeds[rank])
    assert_near(mine.grad, want, "gradient")


@pytest.mark.parametrize("axis", [0, 1, -1])
@on_ranks(2, 3)
def test_all_gather_and_its_adjoint(axis, columns):
    split_over_all_ranks()
    size = group.size()

    def shape(rank: int) -> list[int]:
        out = [2, 3, 4]
        out[axis] = rank + 1
        return out

    inputs = [rows_of(r, *shape(r)).requires_grad_(True) for r in range(size)]
    whole = torch.cat(inputs, axis)
    with moving(columns):
        check_adjoint(lambda x: blocks.fused_allgather_for_tp(x, axis), inputs, [whole] * size)


@pytest.mark.parametrize("axis", [0, 1, -1])
@on_ranks(2, 3)
def test_reduce_scatter_and_its_adjoint(axis, columns):
    split_over_all_ranks()
    size = group.size()
    inputs = [rows_of(r, 5, 5, 5).requires_grad_(True) for r in range(size)]
    outputs = list(torch.stack(inputs).sum(0).tensor_split(size, axis))
    with moving(columns):
        check_adjoint(lambda x: blocks.reduce_scatter_for_tp(x, axis), inputs, outputs)


@pytest.mark.parametrize(("split", "merge"), [(0, 1), (1, 0), (-1, 0), (0, 2)])
@on_ranks(2, 3)
def test_scatter_and_merge_and_its_adjoint(split, merge, columns):
    split_over_all_ranks()
    size = group.size()

    def shape(rank: int) -> list[int]:
        out = [5, 5, 5]
        out[merge] = 2 + rank
        return out

    inputs = [rows_of(r, *shape(r)).requires_grad_(True) for r in range(size)]
    outputs = [
        torch.cat([x.tensor_split(size, split)[r] for x in inputs], merge) for r in range(size)
    ]
    with moving(columns):
        check_adjoint(
            lambda x: blocks.scatter_and_merge_for_tp(x, split, merge), inputs, outputs
        )


@on_ranks(2)
def test_slices_along_any_axis_need_no_copy_on_the_way():
    """What arrives lies as it is used, and nothing is laid out in Python before."""
    split_over_all_ranks()
    x = torch.randn(4, 3, 6)
    with mock.patch.object(torch, "cat", side_effect=AssertionError("a copy")):
        for got in (
            blocks.fused_allgather_for_tp(x, 1),
            blocks.reduce_scatter_for_tp(x, 2),
            blocks.scatter_and_merge_for_tp(x, 2, 1),
            blocks.scatter_and_merge_for_tp(x, 0, 2),
        ):
            assert got.is_contiguous()


@pytest.mark.parametrize("empty", [0, 1])
@on_ranks(2)
def test_slices_of_nothing(empty, columns):
    """One rank has no samples, or all have none; the others' are as they are."""
    split_over_all_ranks()
    x = torch.ones(group.rank() * empty, 3, requires_grad=True)
    with moving(columns):
        got = blocks.scatter_and_merge_for_tp(x, 1, 0)
        assert got.shape == (empty, 2 - group.rank())
        back = blocks.scatter_and_merge_for_tp(got, 0, 1)
        gathered = blocks.fused_allgather_for_tp(got.new_ones(empty, group.rank()), 1)
    assert back.shape == ((1 - group.rank()) * empty, 3)
    assert gathered.shape == (empty, 1)
    (back.sum() + got.sum()).backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("axis", [1, -1])
@on_ranks(2, 3)
def test_a_slice_of_what_all_have_and_its_adjoint(axis):
    split_over_all_ranks()
    whole = rows_of(0, 2, 5, 4).requires_grad_(True)  # the same on all ranks
    mine = whole.detach().clone().requires_grad_(True)
    got = blocks.shard_sequence(mine, axis)
    parts = whole.tensor_split(group.size(), axis)
    assert torch.equal(got, parts[group.rank()])
    assert got.untyped_storage().nbytes() == got.nbytes  # it does not keep the whole
    seeds = [rows_of(100 + r, *part.shape) for r, part in enumerate(parts)]
    got.backward(seeds[group.rank()])
    assert torch.equal(mine.grad, torch.cat(seeds, axis))


@on_ranks(2, 3)
def test_all_reduces_are_a_pair():
    split_over_all_ranks()
    x = rows_of(7, 3, 3).requires_grad_(True)
    y = blocks.fwd_allreduce_for_tp(blocks.bwd_allreduce_for_tp(x) * (group.rank() + 1))
    factor = sum(range(1, group.size() + 1))
    assert_near(y, x * factor, "sum")
    assert torch.equal(x, rows_of(7, 3, 3))
    y.sum().backward()
    assert_near(x.grad, torch.full_like(x, factor), "gradient")


@on_ranks(2)
def test_integers_are_gathered_and_have_no_gradient():
    """Also where numbers of that length had one on the other rank."""
    split_over_all_ranks()
    x = torch.ones(3, requires_grad=group.rank() == 1)
    assert blocks.fused_allgather_for_tp(x, 0).requires_grad
    assert blocks.fused_allgather_for_tp(torch.arange(3), 0).tolist() == [0, 1, 2] * 2
    got = blocks.fused_allgather_for_tp(torch.arange(group.rank() + 1), 0)
    assert got.tolist() == [0, 0, 1] and not got.requires_grad
    with pytest.raises(ValueError, match="the same axis"):
        blocks.scatter_and_merge_for_tp(torch.zeros(2, 2), 1, -1)
    assert [blocks.get_local_channels(5), blocks.get_start_pos_for_slicing(5)] == (
        [3, 0] if group.rank() == 0 else [2, 3]
    )


# ----------------------------------------------------------------- linears and embeddings


@module_of(
    lambda sparse=False: {
        "users": nn.Embedding(11, 5, sparse=sparse),
        "items": nn.Embedding(7, 5, padding_idx=2, sparse=sparse),
        "hidden": nn.Linear(10, 7),
        "out": nn.Linear(7, 3, bias=False),
    }
)
def Recommender(self, user: Tensor, item: Tensor) -> Tensor:
    """Tables that are looked up, and a small MLP; another order of axes on the way."""
    both = torch.cat([self.users(user), self.items(item)], -1)
    return self.out(torch.tanh(self.hidden(both)))


def picks(rank: int, step: int) -> tuple:
    generator = torch.Generator().manual_seed(10 * step + rank)
    shape = (2 + rank, 3 + rank)
    return (
        torch.randint(0, 11, shape, generator=generator),
        torch.randint(0, 7, shape, generator=generator),
    )


def squares(model: nn.Module, *batch: Tensor) -> Tensor:
    return model(*batch).square().mean()


def marked(make) -> nn.Module:
    in_float64(1)
    with smp.tensor_parallelism():
        return make()


@on_ranks(2, 3)
def test_linears_and_embeddings_by_themselves():
    split_over_all_ranks()
    job = WholeJob(marked(Recommender), squares, picks)
    net = job.net
    assert isinstance(net.users, smp.nn.DistributedEmbedding)
    assert isinstance(net.hidden, smp.nn.DistributedLinear)
    assert isinstance(net.hidden, smp.nn.DistributedModule) and isinstance(
        net.hidden, nn.Linear
    )
    assert net.hidden.weight.size(1) == blocks.get_local_channels(10)
    job.run(3, max_norm=0.01)
    job.check_state()


@on_ranks(2)
def test_what_is_checkpointed_already_is_split():
    split_over_all_ranks()
    net = marked(Recommender)
    smp.set_activation_checkpointing(net.hidden)
    job = WholeJob(net, squares, picks)
    assert isinstance(net.hidden, smp.nn.DistributedLinear)
    assert hasattr(type(net.hidden), "_smp_checkpointed")
    for step in range(2):
        job.step(step)


@pytest.mark.parametrize("tied", [False, True], ids=["by themselves", "tied"])
@on_ranks(2, 3)
def test_ranks_that_are_fed_the_same_batch(tied):
    split_over_all_ranks(prescaled_batch=True)

    def loss(model: nn.Module, user: Tensor, item: Tensor) -> Tensor:
        return squares(model, user % 7, item)

    WholeJob(
        marked(Tied if tied else Recommender), loss, lambda rank, step: picks(1, step)
    ).run(3, max_norm=0.01)


@on_ranks(2, 4)
@pytest.mark.parametrize("late", [False, True])
def test_sparse_tables(late, monkeypatch):
    """Whether a bucket is sent during backward depends on the time; if late, on the rank."""
    smp.init({"tensor_parallel_degree": 2})
    if late:
        is_quick = smp.rank() in (0, 3)  # one of each TP_GROUP and of each RDP_GROUP
        monkeypatch.setattr(Reduction, "_has_room", lambda self: is_quick)
    job = WholeJob(
        marked(lambda: Recommender(sparse=True)),
        squares,
        picks,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    for step in range(2):
        job.optimizer.zero_grad()
        job.plain_optimizer.zero_grad()
        job.train(step)
        assert job.net.users.weight.grad.is_sparse
        for parameter in (*job.net.parameters(), *job.plain.parameters()):
            parameter.grad = parameter.grad.to_dense()
        job.check_gradients()
        job.optimizer.step()
        job.plain_optimizer.step()
    job.check_parameters()


@module_of(
    lambda width: {
        "base_layer": nn.Linear(width, width).requires_grad_(False),
        "lora_A": nn.Linear(width, 2, bias=False),
        "lora_B": nn.Linear(2, width),
    }
)
def Adapted(self, x: Tensor) -> Tensor:
    """A frozen linear, and a product of two small ones that trains; only some are split."""
    return self.base_layer(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("marks", [("base_layer",), ("base_layer", "lora_A", "lora_B")])
@on_ranks(2)
def test_adapters_of_linears_by_themselves(marks):
    split_over_all_ranks()
    in_float64(1)
    net = nn.Sequential(Adapted(5), Adapted(5))
    for module in net:
        for name in marks:
            smp.set_tensor_parallelism(getattr(module, name))
    WholeJob(net, squares, lambda rank, step: (rows_of(10 * step + rank, 2 + rank, 5),)).run(
        2, max_norm=0.05
    )


class Tied(nn.Module):
    """A language model in small: the head is the embedding."""

    def __init__(self, padding: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=padding)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, _: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(ids))))


@pytest.mark.parametrize("padding", [1, 5])
@on_ranks(2, 3)
def test_a_tied_vocabulary_is_cut_by_rows(padding):
    split_over_all_ranks()

    def loss(model: nn.Module, _: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids, ids).flatten(0, -2), ids.flatten())

    job = WholeJob(marked(lambda: Tied(padding)), loss, picks)
    assert job.net.head.weight is job.net.embedding.weight
    assert job.net.head.weight.size(0) == blocks.get_local_channels(7)
    job.run(3)
    assert job.model.state_dict()["head.weight"].shape == (7, 4)


@module_of(lambda table: {"table": table(), "out": nn.Linear(5, 3)})
def OneTable(self, ids: Tensor) -> Tensor:
    return self.out(torch.tanh(self.table(ids)))


class SeenTogether(WholeJob):
    """The plain model gets all ranks' samples in one call."""

    def train(self, step: int) -> None:
        batches = [self.batch(rank, step)[0] for rank in range(smp.dp_size())]
        loss = self._train(self.model, batches[smp.dp_rank()]).reduce_mean()
        outputs = self.plain(torch.cat(batches)).split([len(ids) for ids in batches])
        own = torch.stack([out.square().mean() for out in outputs])
        own.mean().backward()
        assert_near(loss, own[smp.dp_rank()], f"loss of step {step}")


def repeated(rank: int, step: int) -> tuple:
    """Indices that come several times, on several ranks; some do not come at all."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (torch.randint(0, 7, (5 + 2 * rank,), generator=generator),)


@pytest.mark.parametrize("by_rows", [False, True], ids=["by dimension", "by rows"])
@pytest.mark.parametrize(
    "options",
    [
        {"scale_grad_by_freq": True, "padding_idx": 2},
        {"max_norm": 0.9},
        {"max_norm": 1.5, "norm_type": 1.0, "scale_grad_by_freq": True},
        {"max_norm": 0.6, "norm_type": float("inf")},
    ],
    ids=["frequency", "norm", "both", "largest"],
)
@on_ranks(2, 3)
def test_norms_and_frequencies_are_of_whole_rows_and_all_samples(options, by_rows):
    split_over_all_ranks()
    in_float64(1)
    net = OneTable(lambda: nn.Embedding(11, 5, **options))
    smp.set_tensor_parallelism(net.table, vocab_parallel=by_rows)
    job = SeenTogether(net, squares, repeated)
    assert job.net.table.vocab_parallel == by_rows
    before = job.plain.table.weight.detach().clone()
    job.run(3, max_norm=0.05)
    assert not torch.equal(before, job.plain.table.weight)


@on_ranks(2)
def test_norms_and_frequencies_of_the_same_batch():
    split_over_all_ranks(prescaled_batch=True)
    in_float64(1)
    options = {"max_norm": 0.9, "scale_grad_by_freq": True}
    net = OneTable(lambda: nn.Embedding(11, 5, **options))
    smp.set_tensor_parallelism(net.table)
    WholeJob(net, squares, lambda rank, step: repeated(1, step)).run(2, max_norm=0.05)


@on_ranks(4)
def test_norms_of_rows_in_a_pipeline():
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2})
    in_float64(1)
    net = OneTable(lambda: nn.Embedding(11, 5, max_norm=0.9, scale_grad_by_freq=True))
    smp.set_tensor_parallelism(net)
    smp.set_partition(net.table, 1)
    SeenTogether(net, squares, repeated).run(2, max_norm=0.05)


@pytest.mark.parametrize("left_out", ["embedding", "head"])
@on_ranks(2)
def test_a_tied_vocabulary_of_which_a_part_is_not_marked_stays_whole(left_out):
    split_over_all_ranks()
    net = marked(Tied)
    smp.set_tensor_parallelism(net.get_submodule(left_out), False)
    model = smp.DistributedModel(net)
    other = "head" if left_out == "embedding" else "embedding"
    reasons = {one.path: one.reason for one in model._smp_split}
    assert reasons[other] == "its parameter 'weight' is shared with a module outside of it"
    assert net.head.weight.shape == (7, 4)


@on_ranks(2)
def test_a_parametrized_weight_is_not_computed_at_the_wrap():
    """Of a spectral norm that would be one more power iteration."""
    split_over_all_ranks()
    norm = nn.utils.parametrizations.spectral_norm
    net = marked(lambda: nn.Sequential(norm(nn.Linear(4, 4)), nn.Linear(4, 4)))
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    smp.DistributedModel(net)
    assert before and all(torch.equal(before[n], b) for n, b in net.named_buffers())


@on_ranks(2)
def test_modules_made_distributed_by_hand():
    """Without a context: the user's own code names the distributed classes."""
    split_over_all_ranks()
    torch.set_default_dtype(torch.float64)

    @module_of(
        lambda: {
            "table": smp.nn.DistributedEmbedding(9, 6, vocab_parallel=True, max_norm=0.03),
            "hidden": smp.nn.DistributedLinear(6, 5),
        }
    )
    def Net(self, ids: Tensor) -> Tensor:
        return self.hidden(self.table(ids))

    model = smp.DistributedModel(Net())
    whole = model.state_dict()
    plain = nn.Sequential(nn.Embedding(9, 6, max_norm=0.03), nn.Linear(6, 5))
    plain.load_state_dict(dict(zip(plain.state_dict(), whole.values(), strict=True)))
    ids = torch.arange(3) + 2 * smp.rank()
    assert_near(model(ids), plain(ids), "output")


@on_ranks(2)
def test_what_would_look_at_the_weights_itself_stays_whole():
    split_over_all_ranks()
    net = marked(lambda: nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True))
    model = smp.DistributedModel(nn.Sequential(net))
    reasons = {one.path: one.reason for one in model._smp_split}
    assert reasons["0.linear1"] == (
        "TransformerEncoderLayer uses its weight without calling it"
    )
    assert not list(model.distributed_modules())


@on_ranks(2)
def test_what_cannot_be_split_by_itself_stays_whole():
    split_over_all_ranks()

    @module_of(
        lambda: {
            "narrow": nn.Linear(1, 4),
            "normed": torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "pruned": prune.identity(nn.Linear(4, 4), "weight"),
        }
    )
    def Odd(self, x: Tensor) -> Tensor:
        return self.pruned(self.normed(self.narrow(x)))

    model = smp.DistributedModel(marked(Odd))
    reasons = {one.path: one.reason for one in model._smp_split}
    assert reasons["narrow"] == "it is too small for tensor_parallel_degree=2"
    assert reasons["pruned"] == "its weight is not a parameter of its own"
    model(torch.ones(2, 1)).sum().backward()


@pytest.mark.parametrize("by_rows", [False, True])
@on_ranks(2, 3)
def test_tables_for_those_who_gather_and_scatter_themselves(by_rows):
    """Indices of all tp_ranks; or a slice of the vectors of all."""
    split_over_all_ranks()
    weight = rows_of(1, 9, 5).requires_grad_(True)
    ids = torch.tensor([[3, 8], [0, 3], [5, 1], [2, 2], [4, 6]])  # of all tp_ranks
    options = {"weight": weight, "dtype": torch.float64, "vocab_parallel": by_rows}
    table = smp.nn.DistributedEmbedding(9, 5, skip_allgather=True, **options)
    got = table(ids)
    assert torch.equal(got, weight[ids.tensor_split(group.size())[group.rank()]])
    assert table(ids[:0]).shape == (0, 2, 5)
    got.square().sum().backward()
    weight[ids].square().sum().backward()
    slices = slices_of(table.weight)
    assert torch.equal(table.weight.grad, slices.take(weight.grad, group.rank()))
    if not by_rows:
        table = smp.nn.DistributedEmbedding(9, 5, skip_scatter_and_merge=True, **options)
        everyones = torch.cat([ids // 2 + rank for rank in range(group.size())])
        own = slices.take(weight, group.rank())
        assert torch.equal(table(ids // 2 + group.rank()), own[everyones])


@pytest.mark.parametrize("alike", [False, True], ids=["own samples", "same samples"])
@on_ranks(2)
def test_autocast_gives_its_dtype(alike):
    split_over_all_ranks(prescaled_batch=alike)
    for by_outputs in (False, True):
        linear = smp.nn.DistributedLinear(6, 4, by_outputs=by_outputs)
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(torch.ones(2, 6)).dtype is torch.bfloat16


# --------------------------------------------------------------------- registered modules


@module_of(
    lambda width, times=2: {
        "first": nn.Linear(width, times * width),
        "second": nn.Linear(times * width, width),
    }
)
def Gate(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
    """The user's class; its distributed form has another interface."""
    return {"y": self.second(torch.relu(self.first(x)) * scale)}


class SplitGate(smp.nn.DistributedModule):
    """A module from the primitives: as that of docs/tensor_parallelism.md, and with a bias."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        local = blocks.get_local_channels(inner)
        with (
            blocks.parameter_creation_scope(self, scaled_batch=True),
            blocks.initialize_with_output_partition(self),
        ):
            self.first = nn.Linear(width, local)
        with (
            blocks.parameter_creation_scope(self, scaled_batch=True),
            blocks.initialize_with_input_partition(self),
        ):
            self.second = nn.Linear(local, width, bias=False)
        self.second.bias = nn.Parameter(torch.zeros(width))  # sees this rank's samples

    def forward(self, x: Tensor, scale: float) -> Tensor:
        everyones = blocks.fused_allgather_for_tp(x, 0)
        part = F.linear(torch.relu(self.first(everyones)) * scale, self.second.weight)
        return blocks.reduce_scatter_for_tp(part, 0) + self.second.bias


def arguments(width: int, times: int = 2) -> tuple:
    return (width, times * width), {}


def inputs(x: Tensor, scale: float = 1.0) -> tuple:
    return (x, scale), {}


@module_of(lambda: {"gates": nn.ModuleList([Gate(5), Gate(5, times=3)])})
def Gates(self, x: Tensor) -> Tensor:
    for gate in self.gates:
        x = gate(x, scale=0.5)["y"]
    return x


@on_ranks(2, 3)
def test_a_registered_class_is_replaced_and_keeps_its_weights():
    split_over_all_ranks()
    smp.tp_register_with_module(Gate, SplitGate, arguments, inputs, lambda y: {"y": y})

    def batch(rank: int, step: int) -> tuple:
        return (rows_of(10 * step + rank, 4, 5),)

    job = WholeJob(marked(Gates), squares, batch)
    assert all(isinstance(gate, SplitGate) for gate in job.net.gates)
    job.run(3, max_norm=0.01)


@module_of(
    lambda width: {
        "scale": nn.Parameter(torch.ones(width)),
        "bias": nn.Parameter(torch.ones(width)),
        "shift": nn.Buffer(torch.zeros(width)),
    }
)
def Shifted(self, x: Tensor) -> Tensor:
    return x * self.scale + self.bias + self.shift + self.training


class ShiftedThere(Shifted, smp.nn.DistributedModule):
    """Every tp_rank has all of it."""


@on_ranks(2)
def test_what_replaces_a_module_has_its_buffers_mode_and_frozen_parameters():
    """Those of tp_rank 0; and stands wherever the module stood."""
    split_over_all_ranks()
    smp.tp_register_with_module(Shifted, ShiftedThere)
    one = marked(lambda: Shifted(3))
    one.shift += 4 + smp.rank()
    one.bias.requires_grad_(False)
    net = nn.ModuleDict({"a": nn.Sequential(one), "b": nn.Sequential(one)}).eval()
    smp.DistributedModel(net)
    new = net["a"][0]
    assert type(new) is ShiftedThere and net["b"][0] is new
    assert not new.training and new.shift.tolist() == [4.0] * 3
    assert (new.scale.requires_grad, new.bias.requires_grad) == (True, False)
    assert new(torch.ones(3)).tolist() == [6.0] * 3


@on_ranks(2)
def test_a_slice_of_the_inputs_is_drawn_as_for_all_of_them():
    split_over_all_ranks()
    module = smp.nn.DistributedModule()
    with blocks.initialize_with_input_partition(module):
        module.linear = nn.Linear(256, 64)
    bound = 1 / (256 * group.size()) ** 0.5  # as nn.Linear draws for so many inputs
    assert 0.99 * bound < module.linear.weight.abs().max() <= bound
    assert module.linear.bias.abs().max() > bound  # whole: it is as it was


@on_ranks(2)
def test_what_a_creation_scope_says_of_new_parameters():
    """... and of those that the module has already, nothing."""
    split_over_all_ranks()
    module = smp.nn.DistributedModule()
    module.before = nn.Linear(3, 3)
    before = copy.deepcopy(module.before.state_dict())
    options = {"dtype": torch.float64, "use_normal": True, "initializer_range": 0.5}
    with blocks.parameter_creation_scope(module, **options):
        module.linear = nn.Linear(64, 64)
    with blocks.parameter_creation_scope(module):
        module.plain = nn.Linear(64, 64)
    with blocks.parameter_creation_scope(module, use_normal=True):
        module.narrow = nn.Linear(64, 64)
    weight, bias = module.linear.weight, module.linear.bias
    assert 0.45 < weight.std() < 0.55 < 3 * 0.5 < weight.abs().max()
    assert 0.018 < module.narrow.weight.std() < 0.022
    assert not bias.any()
    assert weight.dtype == bias.dtype == torch.float64
    assert module.plain.weight.dtype == torch.float32
    assert 0 < module.plain.bias.abs().max() <= 1 / 8 >= module.plain.weight.abs().max()
    assert all(torch.equal(p, before[name]) for name, p in module.before.named_parameters())


@on_ranks(4)
def test_a_registered_class_in_a_pipeline():
    """Its primitives are the collectives of its own path."""
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 3})
    smp.tp_register_with_module(Gate, SplitGate, arguments, inputs, lambda y: {"y": y})

    class Mixed(Gates):
        def __init__(self) -> None:
            super().__init__()
            self.between = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.between(super().forward(x)))

    WholeJob(marked(Mixed), squares, lambda rank, step: (rows_of(10 * step + rank, 6, 5),)).run(
        3
    )


@module_of(lambda one, call: {"one": one, "call": call})
def OneOf(self, x: Tensor) -> Tensor:
    """A model that has all it has in one module."""
    return self.call(self.one, x)


@pytest.mark.filterwarnings("ignore:.*no module of OneOf is on partition 1")
def test_what_is_split_as_one_is_on_one_stage():
    """A distributed module, and one that is split where it stands."""
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    smp.tp_register_with_module(Gate, SplitGate, arguments, inputs, lambda y: {"y": y})
    x = torch.ones(4, 3, 40)
    for one, call, parts in (
        (Gate(40), lambda gate, x: gate(x, scale=1.0)["y"], ["first", "second"]),
        (GPT2MLP(160, GPT2Config(n_embd=40)), lambda mlp, x: mlp(x), ["c_fc", "c_proj"]),
    ):
        smp.set_tensor_parallelism(one)
        degrees = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}
        plan = smp.plan(OneOf(one, call), x, memory_weight=1.0, **degrees)
        assert [plan.rank_of(f"one.{part}") for part in parts] == [0, 0]


class Listening(Gate):
    """Hooks of the class itself are those of what is no longer called."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_forward_hook(lambda *_: pytest.fail("the original's own hook"))
        self.first.register_forward_hook(lambda *_: None)


@on_ranks(2)
def test_a_replaced_module_keeps_hooks_dtype_and_checkpointing():
    split_over_all_ranks()
    for cls in (Gate, Listening):
        hook = arguments if cls is Gate else lambda width: ((width, 2 * width), {})
        smp.tp_register_with_module(cls, SplitGate, hook, inputs, lambda y: {"y": y})
    with smp.tensor_parallelism():
        net = nn.ModuleList([Gate(5), Listening(5)]).double()
    seen: list = []
    gate = net[0]
    gate.register_forward_pre_hook(lambda m, a, k: seen.append((m, k)), with_kwargs=True)
    gate.register_forward_hook(lambda m, _, out: seen.append(list(out)), always_call=True)
    gate.register_load_state_dict_pre_hook(lambda m, *_: seen.append(m))
    removed = gate.register_forward_hook(lambda *_: pytest.fail("removed"))
    smp.set_activation_checkpointing(gate)
    model = smp.DistributedModel(net)
    removed.remove()
    new = net[0]
    assert isinstance(new, SplitGate) and {p.dtype for p in net.parameters()} == {torch.float64}
    assert hasattr(type(new), "_smp_checkpointed")
    x = rows_of(smp.rank(), 4, 5).requires_grad_()
    net[1](new(x, scale=0.5)["y"])["y"].sum().backward()
    model.load_state_dict(model.state_dict())
    assert seen == [(new, {"scale": 0.5}), ["y"], new]


@on_ranks(2)
def test_what_a_replaced_module_cannot_keep_is_named():
    split_over_all_ranks()
    smp.tp_register_with_module(Gate, SplitGate, arguments, inputs, lambda y: {"y": y})
    net = marked(Gates)
    handle = net.gates[0].first.register_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match=r"'gates.0.first' has hooks \(forward_hooks"):
        smp.DistributedModel(net)
    handle.remove()
    handle = net.gates[1].second.bias.register_hook(lambda gradient: gradient)
    with pytest.raises(NotImplementedError, match=r"'gates.1.second.bias' has hooks"):
        smp.DistributedModel(net)


def test_a_replaced_module_stays_on_its_device():
    smp.tp_register_with_module(Gate, SplitGate, arguments, inputs, lambda y: {"y": y})
    new = replacement.replace(Gate(5).to("meta", torch.bfloat16), "gate")
    assert {(p.device.type, p.dtype) for p in new.parameters()} == {("meta", torch.bfloat16)}


@module_of(lambda width, by=1.0: {"weight": nn.Parameter(torch.ones(width)), "by": by})
def Scaled(self, x: Tensor) -> Tensor:
    return x * self.weight * self.by


class ScaledThere(Scaled, smp.nn.DistributedModule):
    pass


def test_what_a_mark_says_goes_before_what_an_instance_was_made_with():
    smp.tp_register_with_module(Scaled, ScaledThere)
    with smp.tensor_parallelism(by=3.0, of_others="nothing"):
        module = Scaled(2, by=2.0)
    new = replacement.replace(module, "scaled")
    assert isinstance(new, ScaledThere) and new.by == 3.0


class HeardThere(ScaledThere):
    def __init__(self, width: int, by: float = 1.0) -> None:
        super().__init__(width, by)
        self.register_forward_hook(lambda *_: heard.append("its own"))


heard: list[Any] = []


def test_hooks_of_both_modules_are_called_as_what_they_are():
    smp.tp_register_with_module(Scaled, HeardThere)
    module = Scaled(2, by=3.0)
    module.register_forward_hook(lambda *_: heard.append("the user's"))
    module.register_full_backward_hook(lambda _, given, out: heard.append([*given, *out]))
    new = replacement.replace(module, "scaled")
    heard.clear()
    new(torch.ones(2, requires_grad=True)).sum().backward()
    *names, (given, out) = heard
    assert sorted(names) == ["its own", "the user's"]
    assert (given.tolist(), out.tolist()) == ([3.0, 3.0], [1.0, 1.0])


def test_new_values_have_the_dtype_of_those_that_are_kept(monkeypatch):
    monkeypatch.setattr(state.module_manager, "translate_functions", [])
    functions = (from_renamed, to_renamed)
    smp.tp_register_with_module(Gate, Renamed, translate_functions=functions)
    new = replacement.replace(Gate(5).bfloat16(), "gate")
    assert {name: p.dtype for name, p in new.named_parameters()} == dict.fromkeys(
        ("weights", "below", "scale"), torch.bfloat16
    )


def test_a_decorated_class_has_its_values_translated_too(monkeypatch):
    monkeypatch.setattr(state.module_manager, "translate_functions", [])

    @smp.tp_register(Renamed, translate_functions=(from_renamed, to_renamed))
    class Decorated(Gate):
        pass

    module = Decorated(5)
    given = {name: value.clone() for name, value in module.state_dict().items()}
    new = replacement.replace(module, "gate")
    for name, value in to_renamed(given).items():
        assert torch.equal(new.get_parameter(name), value), name


class Normed(nn.Module):
    """Has buffers of one shape, of which two are equal."""

    def __init__(self, width: int, name: str) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.ones(width)))
        for number, buffer in enumerate(("mean", "low", "std")):
            self.register_buffer(buffer, torch.full((width,), float(number // 2)))


@on_ranks(2)
@pytest.mark.parametrize("name", ["gain", "weight"])
def test_what_a_distributed_module_lacks_keeps_its_own_value(name, tmp_path):
    split_over_all_ranks()

    def renamed(given: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
        return {new: given[old]} if old in given else {}

    functions = (
        functools.partial(renamed, old="weight", new=name),
        functools.partial(renamed, old=name, new="weight"),
    )
    smp.tp_register_with_module(
        Normed, ScaledThere, lambda width, name: ((width,), {}), translate_functions=functions
    )
    net = marked(lambda: nn.Sequential(Normed(2, name)))
    wanted = Normed(2, name).state_dict()
    model = smp.DistributedModel(net)
    assert isinstance(net[0], ScaledThere)
    ((to_plain, to_ours),) = smp.state.module_manager.translate_functions
    found = to_plain(model.state_dict())
    assert found.keys() == {f"0.{key}" for key in wanted}
    for key, value in wanted.items():
        assert torch.equal(found[f"0.{key}"], value), key
    assert to_ours(found).keys() == {"0.weight"} and to_plain({"1.x": 0}) == {"1.x": 0}
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert len(optimizer.state_dict()["state"]) == 1
    smp.save_checkpoint(tmp_path, "full", False, model, optimizer)
    plain = nn.Sequential(Normed(2, name))
    plain.load_state_dict(torch.load(tmp_path / "full"))
    assert torch.equal(plain[0].get_parameter(name), net[0].weight)
    smp.resume_from_checkpoint(tmp_path, "full", partial=False)


class Unlike(smp.nn.DistributedModule):
    """Lacks a bias, has a scale, another width and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2, bias=False)
        self.gain = nn.Parameter(torch.ones(width))
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("own", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Like(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3)
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("angles", torch.zeros(2), persistent=False)  # made again anywhere

    forward = Unlike.forward


@on_ranks(2)
def test_values_that_a_replacement_would_lose_or_lack_are_named():
    split_over_all_ranks()
    smp.tp_register_with_module(Like, Unlike)
    lost = (
        r"'0' of class Like .* Unlike: 'linear.weight' has shape \[2, 4\] there, not \[3, 4\]; "
        "parameter or buffer 'linear.bias' would be lost; parameter or buffer 'count' would be "
        "lost; its parameter 'gain' would get no value; its buffer 'seen' would get no value: "
        ".*translate_functions"
    )
    with pytest.raises(ValueError, match=lost):
        smp.DistributedModel(marked(lambda: nn.Sequential(Like(4))))


class Different(smp.nn.DistributedModule):
    """Has nothing in common with what it replaces."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = smp.nn.DistributedLinear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@on_ranks(2)
def test_a_replacement_of_a_structure_of_its_own_begins_with_new_values():
    split_over_all_ranks()
    smp.tp_register_with_module(Like, Different)
    net = marked(lambda: nn.Sequential(nn.Linear(4, 4), Like(4)))
    with pytest.warns(
        UserWarning, match=r"'1' of class Like .* begins with new values: .*tran"
    ):
        model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    after = model.state_dict()
    assert list(after) == ["0.weight", "0.bias", "1.inner.weight", "1.inner.bias"]
    assert all(not torch.equal(after[name], before[name]) for name in after)
    state = optimizer.state_dict()
    assert [state["state"][i]["exp_avg"].shape for i in range(4)] == [
        after[name].shape for name in after
    ]
    optimizer.load_state_dict(state)


class Renamed(smp.nn.DistributedModule):
    """Another gate: both linears in one parameter, and a scale of its own."""

    def __init__(self, width: int, times: int = 2) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(2 * times * width, width))
        self.below = nn.Parameter(torch.empty(times * width))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        first, second = self.weights.chunk(2)
        return {"y": torch.relu(F.linear(x, first, self.below)) @ second * scale * self.scale}


def to_renamed(given: dict[str, Tensor]) -> dict[str, Tensor]:
    out = {}
    if "first.weight" in given or "second.weight" in given:
        out["weights"] = torch.cat([given["first.weight"], given["second.weight"].t()])
    if "first.bias" in given:
        out["below"] = given["first.bias"]
    return out  # and not second.bias, which is zero


def from_renamed(given: dict[str, Tensor]) -> dict[str, Tensor]:
    out = {}
    if "weights" in given:
        first, second = given["weights"].chunk(2)
        out |= {"first.weight": first, "second.weight": second.t()}
    if "below" in given:
        out["first.bias"] = given["below"]
    return out


@on_ranks(2)
def test_translate_functions_say_what_becomes_of_values(tmp_path):
    """Of the module, of its optimizer, and in a checkpoint."""
    split_over_all_ranks()
    smp.tp_register_with_module(Gate, Renamed, translate_functions=(from_renamed, to_renamed))
    net = marked(Gates)
    for gate in net.gates:
        nn.init.zeros_(gate.second.bias)
    plain = copy.deepcopy(net)
    model = smp.DistributedModel(net)
    for gate in (*net.gates, *plain.gates):
        (gate.scale if isinstance(gate, Renamed) else gate.second.bias).requires_grad_(False)
    with pytest.raises(NotImplementedError, match=r"'gates.0.scale' is no parameter of the"):
        smp.DistributedOptimizer(torch.optim.AdamW(model.parameters())).state_dict()
    ours = [p for p in model.parameters() if p.requires_grad]
    optimizers = [torch.optim.AdamW(some) for some in (ours, plain.parameters())]
    optimizer = smp.DistributedOptimizer(optimizers[0])
    for step in range(2):
        x = rows_of(10 * step, 4, 5)
        losses = [model(x).square().mean(), plain(x).square().mean()]
        assert_near(*losses, "loss")
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizers[1].step()
    state, wanted = optimizer.state_dict(), optimizers[1].state_dict()
    assert state["param_groups"] == wanted["param_groups"]
    assert set(state["state"]) == set(wanted["state"])
    for number, moments in wanted["state"].items():
        for key, value in moments.items():
            assert_near(state["state"][number][key], value, f"{key} of {number}")
    optimizer.load_state_dict(copy.deepcopy(wanted))
    smp.save_checkpoint(tmp_path, "full", False, model, optimizer)
    saved = torch.load(tmp_path / "full")
    for name, value in plain.state_dict().items():
        if "second.bias" not in name:
            assert_near(saved[name], value, name)
    smp.resume_from_checkpoint(tmp_path, "full", partial=False, strict=False)
    assert_near(model(x), plain(x), "outputs")


@on_ranks(4)
def test_a_replaced_module_stays_where_it_was_pinned():
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2})
    smp.tp_register_with_module(Gate, SplitGate, arguments, inputs, lambda y: {"y": y})
    with smp.partition(1):
        net = marked(Gates)
    smp.set_partition(net.gates[0], 0)
    with pytest.raises(smp.PartitionError, match="'gates.0.first' is pinned to partition 1"):
        smp.DistributedModel(net)
    for module in net.gates[0].modules():
        smp.set_partition(module, 0)
    job = WholeJob(net, squares, lambda rank, step: (rows_of(10 * step + rank, 4, 5),))
    job.step(0)
    assert job.model.get_module_partition("gates.0.second") == 0
    assert job.model.get_module_partition("gates.1.second") == 1


@on_ranks(2)
def test_hooks_that_do_not_fit_are_refused():
    split_over_all_ranks()
    with pytest.raises(TypeError, match=r"init_hook of Gate takes \(width, times=3\)"):
        smp.tp_register_with_module(Gate, SplitGate, lambda width, times=3: ((), {}))
    with pytest.raises(TypeError, match=r"must take the same: \(x, scale=1.0\)"):
        smp.tp_register(SplitGate, forward_hook=lambda x: ((x,), {}))(Gate)

    @smp.tp_register(SplitGate, init_hook=lambda width, times=2: width)
    class Other(Gate):
        pass

    net = marked(lambda: nn.Sequential(Other(3)))
    with pytest.raises(TypeError, match=r"init_hook of Other returns \(args, kwargs\)"):
        smp.DistributedModel(net)


@module_of(
    lambda: {"first": nn.Linear(4, 3), "second": nn.Linear(3, 3), "third": nn.Linear(4, 2)}
)
def Branches(self, x: Tensor) -> list[Tensor]:
    y = self.first(x)
    return [y, self.second(y), self.third(x)]


@on_ranks(2, 3)
def test_a_rank_may_leave_out_of_its_loss_what_others_use():
    """Backward comes to every collective on every rank, in the same order."""
    split_over_all_ranks()

    def loss(model: nn.Module, x: Tensor, uses: list[int]) -> Tensor:
        outputs = model(x)
        return sum(outputs[i].square().mean() for i in uses)

    def batch(rank: int, step: int) -> tuple:
        return rows_of(rank, 2, 4), [[0, 1, 2], [2], [0, 2]][(rank + step) % 3]

    job = WholeJob(marked(Branches), loss, batch)
    for step in range(3):
        job.step(step)
    job.loss = lambda model, x, _: 0 * squares(lambda x: torch.cat(model(x), -1), x)
    job.step(3)  # all is used: gradients are zeros, and not left out
    job.check_parameters()
    for optimizer in (job.optimizer, job.plain_optimizer):
        optimizer.zero_grad(set_to_none=False)
    job.loss = lambda model, x, _: model(x)[2].square().mean()
    job.train(4)
    job.check_gradients()  # what nobody uses keeps its zeros


@module_of(lambda child: {"before": nn.Linear(4, 4), "child": child})
def Calling(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """A module whose child may be elsewhere."""
    y = self.before(x)
    return self.child(y), y.sin()


@module_of(
    lambda: {
        "table": nn.Embedding(5, 4),
        "calling": Calling(nn.Linear(4, 3)),
        "second": nn.Linear(3, 3),
        "third": nn.Linear(4, 2),
        "whole": nn.LayerNorm(2),
        "other": nn.Embedding(5, 3),
    }
)
def StagedBranches(self, ids: Tensor) -> list[Tensor]:
    """Parts of it are left out by some ranks' losses, wherever they run."""
    x = self.table(ids)
    y, z = self.calling(x)
    return [y, z, self.second(y), self.whole(self.third(x)), x, self.other(ids)]


@pytest.mark.parametrize("stages", ["apart", "around", "one"])
@on_ranks(2, 4)
def test_a_rank_may_leave_out_what_others_use_of_other_stages(stages):
    """Also where the whole of a request is left out, and what is called from within it."""
    pipeline = int(os.environ["OMPI_COMM_WORLD_SIZE"]) // 2
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": pipeline})
    net = marked(StagedBranches)
    if pipeline > 1:
        for module, home in {
            "apart": [(net.calling, 1), (net.third, 1), (net.second, 0), (net.table, 0)],
            "around": [(net.calling, 1), (net.calling.child, 0), (net.table, 1)],
            "one": [(net.third, 1)],
        }[stages]:
            smp.set_partition(module, home)

    def loss(model: nn.Module, ids: Tensor, uses: list[int]) -> Tensor:
        outputs = model(ids)
        return sum(outputs[i].square().mean() for i in uses)

    def batch(rank: int, step: int) -> tuple:
        used = [[0, 1, 2, 3, 4, 5], [3], [1], [4], [0, 5]]
        return torch.arange(3) + rank, used[(rank + step) % 5]

    job = WholeJob(net, loss, batch)
    for step in range(5):
        job.step(step)
    job.loss = lambda model, ids, _: model(ids)[3].square().mean()
    job.step(5)  # what nobody uses has no gradient
    job.check_parameters()


def test_a_call_within_another_has_a_chain_of_its_own():
    """The other's goes on behind it."""
    seen: list[bool] = []

    def computes_again(gradient: Tensor) -> None:
        with torch.enable_grad():
            seen.append(collective_chain.is_carried())

    x = torch.ones(2, requires_grad=True)
    token = collective_chain._Join.apply(torch.zeros((), requires_grad=True))
    assert not collective_chain.is_carried()
    with collective_chain.opened():
        collective_chain.take(token)
        with collective_chain.opened():
            assert collective_chain.is_carried() and collective_chain.joined() is None
            with torch.no_grad():
                assert not collective_chain.is_carried()
            in_backward(x, computes_again).sum().backward()
            collective_chain.take(token)
        assert collective_chain.is_carried() and collective_chain.joined() is token
    assert not collective_chain.is_carried() and collective_chain.joined() is None
    assert seen == [False]


class WithGradients(nn.Module):
    """Takes a gradient in its forward."""

    def __init__(self, take: Callable) -> None:
        super().__init__()
        self.before, self.inner, self.after = (nn.Linear(4, 4) for _ in range(3))
        self.take = take

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.before(x))
        return self.after(h + self.take(self.inner, x))


def slope(function: Callable, x: Tensor, create_graph: bool = False) -> Tensor:
    x = x.detach().requires_grad_()
    (out,) = torch.autograd.grad(function(x).pow(2).sum(), x, create_graph=create_graph)
    return out


def backward_within(function: Callable, x: Tensor) -> Tensor:
    """Of parameters, too, which are used once more."""
    function(x).pow(2).mean().backward()
    return function(x)


TAKES = {
    "grad": slope,
    "in a graph": lambda function, x: slope(function, x, True).detach(),
    "backward": backward_within,
    "recomputed": lambda function, x: checkpoint(
        lambda x: slope(function, x) + function(x), x, use_reentrant=False
    ),
    "of what is recomputed": lambda function, x: slope(
        lambda x: checkpoint(function, x, use_reentrant=False), x
    ),
    "before one with a backward of its own": lambda function, x: checkpoint(
        function, x + slope(function, x), use_reentrant=True
    ),
}


@pytest.mark.parametrize("take", TAKES)
@on_ranks(2)
def test_a_gradient_that_a_split_model_takes_in_its_forward(take):
    """What it frees is not asked for once more, and what others need is not freed."""
    split_over_all_ranks(microbatches=2)
    torch.manual_seed(1)
    net = WithGradients(TAKES[take]).double()
    plain = copy.deepcopy(net)
    smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net)
    x = torch.randn(4, 4, dtype=torch.float64)
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        smp.step(lambda model, x: model.backward(model(x).square().mean()))(model, x)
        for part in x.chunk(2):
            (plain(part).square().mean() / 2).backward()
        for name, parameter in plain.named_parameters():
            split = net.get_parameter(name)
            compare_slice(split.grad, parameter.grad, split, name)


@on_ranks(2)
def test_a_transform_of_torch_func_over_what_is_split_is_refused():
    split_over_all_ranks()
    net = nn.Sequential(nn.Linear(4, 4))
    smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net)
    for transform in (torch.func.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())):
        with pytest.raises(
            NotImplementedError, match=r"'0'.* torch.func .*torch.autograd.grad"
        ):
            transform(model)(torch.ones(2, 4))


class Detaching(Branches):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x)
        return y, y.detach(), y.argmax(-1)


@on_ranks(2)
def test_what_a_split_model_returns_has_a_graph_where_the_plain_one_has():
    """It is gone with the outputs, and not kept for the next call."""
    split_over_all_ranks()
    model = smp.DistributedModel(marked(Detaching))
    held = nn.Identity()
    alive = weakref.ref(held)
    with model.no_sync():
        x = rows_of(1, 2, 4).requires_grad_() * 1
        x.register_hook(functools.partial(lambda _, gradient: gradient, held))
        outputs = model(x)
    assert [output.requires_grad for output in outputs] == [True, False, False]
    del x, held, outputs
    gc.collect()
    assert alive() is None


@on_ranks(2, 3)
def test_what_no_rank_uses_has_no_gradient_under_no_sync():
    """Else weight decay would change it."""
    split_over_all_ranks()

    def loss(model: nn.Module, x: Tensor, uses: list[int]) -> Tensor:
        outputs = model(x)
        return sum(outputs[i].square().mean() for i in uses)

    def batch(rank: int, step: int) -> tuple:
        return rows_of(rank, 2, 4), [0] if (rank + step) % 2 else [2]

    job = WholeJob(marked(Branches), loss, batch)
    with job.model.no_sync():
        for step in range(2):
            job.train(step)
            assert all(p.grad is None for p in job.net.second.parameters())
            assert job.net.third.weight.grad is not None
    job.train(2)
    job.check_gradients()
    job.optimizer.step()
    job.plain_optimizer.step()
    job.check_parameters()


def test_zeros_alone_of_what_a_loss_leaves_out_are_dropped():
    """Not a sparse gradient, nor what a backward before had left, which failed."""
    zeros, some, none, sparse = parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    zeros.grad, some.grad = torch.zeros(2), torch.tensor([0.0, 1.0])
    sparse.grad = torch.zeros(2).to_sparse()
    before = some.grad
    unused_collectives._without[5] = list(parameters)
    unused_collectives.begin_step()
    unused_collectives.drop_zeros()
    assert zeros.grad is not None
    unused_collectives._without[5] = list(parameters)
    unused_collectives.drop_zeros()
    assert zeros.grad is none.grad is None
    assert some.grad is before and sparse.grad.is_sparse and not unused_collectives._without


def test_a_pipelines_step_is_under_way_until_its_end():
    try:
        step = unused_collectives.PipelinedStep([nn.Parameter(torch.ones(1))])
        assert unused_collectives.PipelinedStep.is_under_way
        step.end()
        assert (
            not unused_collectives.PipelinedStep.is_under_way
            and not unused_collectives._without
        )
    finally:
        unused_collectives.PipelinedStep.is_under_way = False


class Dividing(nn.Embedding):
    """Divides the gradient of what is looked up."""

    divides_gradient = True
    gradient_factor = 1.0


def test_gradients_have_their_factor_once():
    linear, meta = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    frozen, table, tied = nn.Linear(2, 2), Dividing(3, 2), Dividing(3, 2)
    frozen.weight.requires_grad_(False)
    head = nn.Linear(2, 3, bias=False)
    head.weight = tied.weight
    net = nn.ModuleList([linear, meta, frozen, table, tied, head])
    for module in net:
        mark(module.weight, None, scaled_batch=True)
    with group.planned(4):
        for _ in range(2):
            gradients.scale(net)
    (linear(torch.ones(1, 2)) + head(torch.ones(1, 2)).sum()).sum().backward()
    assert linear.weight.grad.eq(0.25).all() and linear.bias.grad.eq(1).all()
    assert (table.gradient_factor, tied.gradient_factor) == (0.25, 1.0)
    assert tied.weight.grad.eq(2 * 0.25).all()
    assert not frozen.weight.requires_grad
    frozen.weight.requires_grad_(True)
    frozen(torch.ones(1, 2)).sum().backward()
    assert frozen.weight.grad.eq(0.25).all()
    table(torch.tensor([0])).sum().backward()
    assert table.weight.grad[0].eq(1).all()  # its module's, which this one leaves out
    scaled = [parameter_marks.is_scaled(module.weight) for module in net]
    assert scaled == [True, False, True, True, True, True]


class OfAnother(nn.Module):
    """Has one parameter under two names, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(3))
        self.again = self.first
        self.new = nn.Parameter(torch.ones(1))


def test_what_parameters_of_a_plain_model_are_now():
    """Those that stayed, one under another name, one that is gone, and a new one."""
    one = OfAnother()
    one.__dict__[REPLACES] = replacement.BothWays(
        lambda plain: {"again": -plain["old"]} if "old" in plain else {},
        lambda ours: {"old": -ours["again"]} if "again" in ours else {},
    )
    net = nn.Sequential(nn.Linear(2, 1), one)
    plain = {"0.weight": [1, 2], "1.old": [3], "1.gone": [4], "0.bias": [1]}
    found = counterparts.counterparts(net, plain)
    assert found.order == {"0.weight": 0, "1.old": 1, "1.gone": 2, "0.bias": 3}
    every = [each for each in found.every if each.plain or each.ours]
    assert [(each.plain, each.ours) for each in every] == [
        ({"0.weight": [1, 2]}, {"0.weight": [1, 2]}),
        ({"1.old": [3]}, {"1.first": [3]}),
        ({"1.gone": [4]}, {}),
        ({}, {"1.new": [1]}),
        ({"0.bias": [1]}, {"0.bias": [1]}),
    ]
    renamed = every[1]
    assert renamed.to_ours({"1.old": 5}) == {"1.first": -5}
    assert renamed.to_plain({"1.first": 5}) == {"1.old": -5}
    assert counterparts.counterparts(nn.Sequential(nn.Linear(2, 1)), plain) is None


class Chained(nn.Module):
    """A leaf of each kind first: what comes in requires grad on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.outputs = nn.Linear(4, 3)
        self.head = nn.Linear(5, 7)
        self.loss = smp.nn.DistributedCrossEntropyLoss(self.head)
        self.gate = Gate(5)

    def forward(self, x: Tensor, kind: int) -> Tensor:
        if kind == 0:
            return self.outputs(torch.tanh(self.first(x))).square().mean()
        if kind == 1:
            return self.loss(x, torch.arange(len(x)) % 7)
        return self.gate(x)["y"].square().mean()


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["linear", "head", "primitives"])
@on_ranks(2, 3)
def test_an_input_that_requires_grad_on_some_ranks_only(kind):
    split_over_all_ranks()
    smp.tp_register_with_module(Gate, SplitGate, arguments, inputs, lambda y: {"y": y})
    net = marked(Chained)
    net.requires_grad_(False)

    plain = copy.deepcopy(net)
    model = smp.DistributedModel(net)
    for step in range(2):
        samples = 2 if kind == 2 else 2 + smp.rank()
        x = rows_of(10 * step + smp.rank(), samples, 5)
        x.requires_grad_(smp.rank() == 1)
        loss = model(x, kind)
        assert_near(loss, plain(x, kind), "loss")
        loss.backward()
        if smp.rank() == 1:
            (want,) = torch.autograd.grad(plain(x, kind), x)
            assert_near(x.grad, want, "gradient")


class DelayedGates(nn.Sequential):
    """Stages of a pipeline, with something in each that is not replaced."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(Gates(), nn.Linear(5, 5)) for _ in range(4)))


@pytest.mark.parametrize("pipeline", [1, 2])
@on_ranks(4)
def test_what_is_replaced_may_have_values_that_are_delayed(pipeline):
    """They are tp_rank 0's; a rank has no memory for more than its slices."""
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": pipeline})
    smp.tp_register_with_module(Gate, SplitGate, arguments, inputs, lambda y: {"y": y})
    in_float64(5)
    plain = DelayedGates()
    torch.manual_seed(5 + smp.tp_rank())  # as scripts seed
    with smp.delay_param_initialization(), smp.tensor_parallelism():
        net = DelayedGates()
    for module in (plain, net):
        module.half().double()[1].requires_grad_(False)

    def batch(rank: int, step: int) -> tuple:
        return (rows_of(10 * step + rank, 4, 5),)

    job = WholeJob(net, squares, batch)
    job.plain, job.plain_optimizer = plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)
    job.run(2, max_norm=0.01)
    assert sum(isinstance(m, SplitGate) for m in job.model.modules()) == 8
    for parameter in job.model.local_parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


# ------------------------------------------------------------------------------ any model


@on_ranks(2)
def test_a_module_names_its_collectives_however_it_is_called():
    """Called by name, or served with its hooks: not what ran before in the same thread."""
    smp.init({"tensor_parallel_degree": 2})
    net = nn.ModuleDict({"other": nn.Linear(4, 4), "own": nn.Linear(4, 4)})
    smp.set_tensor_parallelism(net)
    smp.DistributedModel(net)
    own, x = net["own"], torch.ones(2, 4)
    before, begin_call, paths = group.begin_call()._path, group.begin_call, []

    def noted() -> Any:
        paths.append(group._called.path)
        return begin_call()

    for call in (own, own.forward, lambda x: hooks.serve_hooked(own, (x,), None, False, False)):
        with mock.patch.object(group, "begin_call", noted):
            net["other"](x)
            assert set(paths) == {"other"}
            paths.clear()
            call(x)
            assert set(paths) == {"own"}
            paths.clear()
        assert group.begin_call()._path == before


@on_ranks(2)
def test_a_slice_is_of_tp_rank_0s_values_and_leaves_what_it_is_taken_from():
    split_over_all_ranks()
    whole = torch.arange(6.0) + 10 * group.rank()
    before = whole.clone()
    for slices in (None, Slices.even(0, 6, 2)):
        got = group.own_slice(slices, whole)
        everyones = torch.arange(6.0)
        want = everyones if slices is None else everyones.chunk(2)[group.rank()]
        assert torch.equal(got.neg_(), -want) and torch.equal(whole, before)
    with group.planned(3):  # of which this is the first, and the only one
        assert (group.size(), group.rank(), group.shares(7)) == (3, 0, [3, 2, 2])
        got = group.own_slice(Slices.even(0, 6, 3), whole)
        assert torch.equal(got.neg_(), -before[:2]) and torch.equal(whole, before)
        assert group.gather_numbers([4, 2]) == [[4, 2]] * 3
    assert (group.size(), group.rank()) == (2, smp.rank())


def test_lengths_without_a_group():
    x = torch.zeros(3, 2)
    assert primitives.entering(x, 0) == (x, [3])
    assert blocks.fused_allgather_for_tp(x, 0) is x


# ---------------------------------------------------------------------- lengths assumed


@on_ranks(2, 3)
def test_lengths_are_exchanged_only_when_they_are_not_what_they_were(monkeypatch):
    """What the ranks had is taken to be what they have; a wrong guess is an exchange more."""
    split_over_all_ranks()
    rank = group.rank()
    exchanges = []
    exchange = group.gather_numbers
    monkeypatch.setattr(
        group, "gather_numbers", lambda *args: exchanges.append(args) or exchange(*args)
    )

    def gathered(length: int) -> int:
        """All ranks' lengths, from their rows; gives how many exchanges there were."""
        before = len(exchanges)
        own = torch.full((2, length), rank)
        got = blocks.fused_allgather_for_tp(own, 1)[0].tolist()
        assert got.count(rank) == length and got == sorted(got)
        return len(exchanges) - before

    assumed_sizes._seen.clear()
    assert gathered(3) == 0  # alike on all
    assert gathered(5 + rank) == 1
    assert gathered(5 + rank) == 0
    assert gathered(6 if rank == 0 else 5) == 1  # some lengths of then, on other ranks
    assert gathered(5 + rank) == 0
    assert gathered(5) == 1  # not what they were when rank 0 had this
    assert gathered(5) == 0
    assert gathered(0) == 0
    assert gathered(2 if rank == 1 else 0) == 1  # rank 0 took all to have nothing
    assert gathered(3) == 0


def test_lengths_of_ever_new_batches_are_forgotten(monkeypatch):
    monkeypatch.setattr(assumed_sizes, "_MOST", 3)
    monkeypatch.setattr(assumed_sizes, "_seen", seen := {})
    for length in range(8):
        had = ((length,), (length + 1,))
        assumed_sizes.remember("lengths", (length,), had)
        assert len(seen) <= 3 and had in seen.values()


@on_ranks(2, 3)
def test_a_wrong_guess_of_a_regions_sizes_changes_nothing():
    """Samples, lengths and who gives a mask differ from call to call, and may come again."""
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    split_over_all_ranks()
    in_float64(1)
    config = GPT2Config(n_embd=12, n_head=3, resid_pdrop=0.0, attn_pdrop=0.0)
    config._attn_implementation = "sdpa"  # causal where there is no mask
    block = GPT2Block(config)
    plain = copy.deepcopy(block)
    smp.set_tensor_parallelism(block)
    model = smp.DistributedModel(block)
    rank = group.rank()
    assumed_sizes._seen.clear()
    draw = random.Random(5)
    for call in range(9):
        shapes = [(draw.choice([1, 2]), draw.choice([3, 4])) for _ in range(group.size())]
        x = rows_of(10 * call + rank, *shapes[rank], 12)
        seen = torch.zeros(shapes[rank][0], 1, *[shapes[rank][1]] * 2)
        seen = seen.masked_fill(torch.ones_like(seen).triu(1).bool(), -torch.inf)
        mask = seen if draw.random() < 0.3 else None
        assert_near(model(x, attention_mask=mask), plain(x), f"call {call}, {shapes}")
