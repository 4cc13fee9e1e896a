"""``smp.nn``'s embedding, linear, norm and cross-entropy by themselves: values and errors."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from smp import ranks
from smp.nn import utils as blocks
from smp.nn import vocabulary_parallel_cross_entropy
from smp.slicing.slices import is_scaled_batch, slices_of
from smp.tensor_parallel import group
from tests.ranks import on_ranks
from tests.reference.whole_job import assert_near, in_float64, own, split_over_all_ranks

# ---------------------------------------------------------------------------- embeddings


def test_values_of_a_new_table():
    torch.manual_seed(1)
    table = smp.nn.DistributedEmbedding(300, 20, padding_idx=3)
    assert 0.018 < table.weight.std() < 0.022
    assert not table.weight[3].any() and table.weight[4].any()
    wide = smp.nn.DistributedEmbedding(300, 20, initializer_range=0.5)
    assert 0.45 < wide.weight.std() < 0.55
    given = torch.arange(6.0).view(3, 2)
    table = smp.nn.DistributedEmbedding(3, 2, padding_idx=1, weight=given, dtype=torch.float64)
    assert torch.equal(table.weight, given.double()) and table.weight.requires_grad
    assert table.weight.dtype == torch.float64
    given += 1
    assert table.weight[0, 0] == 0  # it is copied
    for shape in ((2,), (1, 2), (2, 3)):
        with pytest.raises(
            ValueError, match=r"weight of shape \[.*: the whole table has \[3, 2"
        ):
            smp.nn.DistributedEmbedding(3, 2, weight=torch.ones(shape))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding_idx": 2},
    "padding from behind": {"padding_idx": -1},
    "frequencies": {"scale_grad_by_freq": True},
    "sparse": {"sparse": True},
    **{f"norm {p}": {"max_norm": 0.9, "norm_type": p} for p in (0, 1.0, 2.0, float("inf"))},
}


@pytest.mark.parametrize("by_rows", [False, True], ids=["by dimension", "by rows"])
@pytest.mark.parametrize("option", OPTIONS)
@on_ranks(2)
def test_a_split_table_with_the_options_of_torchs(option, by_rows):
    """Of the samples of all ranks together, which each rank has in part."""
    split_over_all_ranks()
    in_float64(1)
    weight, options = torch.randn(7, 5), OPTIONS[option]
    whole = nn.Embedding(7, 5, **options)
    whole.load_state_dict({"weight": weight})
    table = smp.nn.DistributedEmbedding(7, 5, weight=weight, vocab_parallel=by_rows, **options)
    every = torch.tensor([[1, 2, 6], [6, 1, 3], [2, 2, 0]])
    parts = every[:1], every[1:]
    out, want = table(parts[group.rank()]), whole(every)
    assert_near(out, want[:1] if group.rank() == 0 else want[1:], "vectors")
    gradient = torch.randn(3, 3, 5)
    out.backward(gradient[:1] if group.rank() == 0 else gradient[1:])
    want.backward(gradient)
    slices = slices_of(table.weight)
    assert table.weight.grad.is_sparse == whole.weight.grad.is_sparse == (option == "sparse")
    if option == "sparse":
        (got,), (want,) = (of.weight.grad.coalesce().indices() for of in (table, whole))
        first = slices.ranges[group.rank()][0][0] if by_rows else 0
        wanted = [n - first for n in want.tolist() if 0 <= n - first < len(table.weight)]
        assert got.tolist() == wanted  # SparseAdam updates these rows
    got = table.weight.grad.to_dense()
    assert_near(got, slices.take(whole.weight.grad.to_dense(), group.rank()), "gradient")
    assert_near(own(table.weight), slices.take(whole.weight, group.rank()), "table")
    with torch.no_grad():
        out, want = table(parts[group.rank()]), whole(every)
    assert_near(out, want[:1] if group.rank() == 0 else want[1:], "vectors without grad")


@on_ranks(2)
def test_a_table_from_given_vectors():
    split_over_all_ranks()
    given = torch.randn(7, 5, dtype=torch.float64)
    table = smp.nn.DistributedEmbedding.from_pretrained(given, True, 2, vocab_parallel=True)
    assert table.padding_idx == 2 and not table.weight.requires_grad
    assert torch.equal(smp.DistributedModel(table).state_dict()["weight"], given)
    assert smp.nn.DistributedEmbedding.from_pretrained(given, freeze=False).weight.requires_grad


@pytest.mark.parametrize("ranks_alike", [False, True])
@on_ranks(2)
def test_an_index_that_is_no_row_is_named(ranks_alike):
    split_over_all_ranks(prescaled_batch=ranks_alike)
    table = smp.nn.DistributedEmbedding(5, 4, vocab_parallel=True)
    for good in (0, 4):
        table(torch.tensor([good]))
    table(torch.zeros(0, dtype=torch.int64))
    for index in (-1, 5, 99):
        with pytest.raises(IndexError, match=f"an index is {index}, of 5 embeddings"):
            table(torch.tensor([1, index]))


@on_ranks(2)
def test_a_norm_of_rows_needs_one_tp_group(monkeypatch):
    split_over_all_ranks()
    monkeypatch.setattr(ranks, "rdp_size", lambda: 2)
    with pytest.raises(NotImplementedError, match="max_norm=0.5: each of its 2 replicas"):
        smp.nn.DistributedEmbedding(7, 4, max_norm=0.5)
    smp.nn.DistributedEmbedding(7, 4)


@on_ranks(2)
def test_indices_of_any_shape():
    split_over_all_ranks()
    for by_rows in (False, True):
        table = smp.nn.DistributedEmbedding(5, 4, vocab_parallel=by_rows)
        whole = smp.DistributedModel(table).state_dict()["weight"]
        for shape in ((2,), (2, 3), (1, 2, 3), (2, 0)):
            ids = torch.randint(0, 5, shape)
            assert torch.equal(table(ids), F.embedding(ids, whole)), (shape, by_rows)


# -------------------------------------------------------------------------------- linears


@pytest.mark.parametrize("alike", [False, True], ids=["own samples", "same samples"])
@pytest.mark.parametrize("by_outputs", [False, True], ids=["by inputs", "by outputs"])
@on_ranks(2)
def test_a_linear_made_by_hand(by_outputs, alike):
    """Of any number of axes, with a bias or without, in its dtype."""
    split_over_all_ranks(prescaled_batch=alike)
    for bias in (True, False):
        linear = smp.nn.DistributedLinear(
            5, 7, bias=bias, dtype=torch.float64, by_outputs=by_outputs
        )
        assert linear.weight.dtype == torch.float64 and (linear.bias is not None) == bias
        assert slices_of(linear.weight).axis == (0 if by_outputs else 1)
        whole = nn.Linear(5, 7, bias, dtype=torch.float64)
        whole.load_state_dict(smp.DistributedModel(linear).state_dict())
        torch.manual_seed(0 if alike else group.rank())
        for shape in ((5,), (2, 5), (3, 2, 5), (1, 2, 3, 5)):
            x = torch.randn(shape, dtype=torch.float64)
            assert_near(linear(x), whole(x), f"{shape}")
    with pytest.raises(ValueError, match=r"'DistributedLinear' got an input of shape \[2, 4\]"):
        smp.nn.DistributedLinear(5, 7, by_outputs=by_outputs)(torch.ones(2, 4))


@pytest.mark.parametrize("alike", [False, True], ids=["own samples", "same samples"])
@on_ranks(2)
def test_a_linears_input_of_another_width_is_an_error_on_every_rank(alike):
    """Before any collective; of one that is wider, no channels are left out."""
    split_over_all_ranks(prescaled_batch=alike)
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
    smp.set_tensor_parallelism(net[0])
    smp.set_tensor_parallelism(net[1], by_outputs=True)
    smp.DistributedModel(net)
    for linear, path in zip(net, "01", strict=True):
        for width in (4, 6, 8):
            words = rf"'{path}' got an input of shape \[2, {width}\]: .* in_features=[57]"
            with pytest.raises(ValueError, match=words):
                linear(torch.ones(2, width))
        linear(torch.ones(2, linear.in_features))
        with pytest.raises(ValueError, match=rf"'{path}' got an input of shape \[\]: "):
            linear(torch.ones(()))


def test_modules_are_made_where_they_are_wanted():
    made = [
        smp.nn.DistributedLinear(5, 7, device="meta"),
        smp.nn.DistributedEmbedding(5, 7, padding_idx=1, device="meta"),
        smp.nn.DistributedLayerNorm(7, device="meta"),
    ]
    assert all(p.is_meta for module in made for p in module.parameters())


# ---------------------------------------------------------------------------------- norms


def test_norms_of_several_axes_are_refused():
    for shape in ((2, 3), ()):
        with pytest.raises(ValueError, match=r"normalized_shape=\(.*\): the channels are one"):
            smp.nn.DistributedLayerNorm(shape)
    norm = smp.nn.DistributedLayerNorm((4,), 0.5, dtype=torch.float64)
    assert norm.normalized_shape == (4,) and norm.weight.dtype == torch.float64
    x = torch.randn(2, 4).double()
    assert_near(norm(x), F.layer_norm(x, (4,), eps=0.5), "output")


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@on_ranks(2, 3)
def test_a_norm_of_split_channels_is_that_of_all(affine, dtype):
    split_over_all_ranks()
    torch.manual_seed(7)
    whole = nn.LayerNorm(7, 0.3, elementwise_affine=affine).double()
    split = smp.nn.DistributedLayerNorm(7, 0.3, elementwise_affine=affine)
    x, gradient = torch.randn(2, 7).double(), torch.randn(2, 7).double()
    own = range(7)[slice(*[sum(group.shares(7)[: group.rank() + i]) for i in (0, 1)])]
    for name, parameter in whole.named_parameters():
        nn.init.normal_(parameter)
        split.get_parameter(name).data = parameter.data[own].clone()
    split.to(dtype)
    ours = x[:, own].to(dtype).requires_grad_(True)
    x.requires_grad_(True)
    out, want = split(ours), whole(x)
    out.backward(gradient[:, own].to(dtype))
    want.backward(gradient)
    assert out.dtype == ours.grad.dtype == dtype
    found = {"output": (out, want[:, own]), "gradient": (ours.grad, x.grad[:, own])}
    for name, parameter in whole.named_parameters():
        found[name] = split.get_parameter(name).grad, parameter.grad[own]
    assert len(found) == (4 if affine else 2)
    for name, (a, b) in found.items():
        if dtype == torch.float64:
            assert_near(a, b, name)
        else:
            torch.testing.assert_close(a.double(), b, atol=0.1, rtol=0.1)
    with pytest.raises(
        ValueError, match=rf"tp_rank {group.rank()} has {len(own)} of 7 channel"
    ):
        split(torch.zeros(2, 7, dtype=dtype))


# -------------------------------------------------------------------------- cross-entropy


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_whole_heads_loss_has_every_option_of_torchs(reduction):
    torch.manual_seed(1)
    head, hidden = nn.Linear(4, 6), torch.randn(2, 3, 4)
    labels = torch.tensor([[1, 2, 5], [2, 0, 4]])
    options: dict[str, Any] = {
        "ignore_index": 2, "reduction": reduction, "label_smoothing": 0.3,
        "weight": torch.rand(6),
    }  # fmt: skip
    want = F.cross_entropy(head(hidden).movedim(-1, 1), labels, **options)
    loss = smp.nn.DistributedCrossEntropyLoss(head, **options)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        got = vocabulary_parallel_cross_entropy(head, hidden, labels.to(dtype), **options)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(loss(hidden, labels.to(dtype)), want)
    assert f"ignore_index=2, reduction='{reduction}'" in repr(loss)
    assert list(loss.state_dict()) == ["weight"] and not list(loss.parameters())
    assert not smp.nn.DistributedCrossEntropyLoss(head).state_dict()


def test_options_of_a_loss_that_make_no_sense_are_named():
    head, hidden = nn.Linear(4, 6), torch.randn(2, 4)
    labels = torch.tensor([1, 2])
    for options, words in (
        ({"reduction": "max"}, r"reduction is one of \('none', 'mean', 'sum'\), not 'max'"),
        ({"label_smoothing": 1.5}, r"label_smoothing is in \[0, 1\], not 1.5"),
        ({"label_smoothing": -0.1}, r"label_smoothing is in \[0, 1\], not -0.1"),
    ):
        with pytest.raises(ValueError, match=f"smp.nn: {words}"):
            vocabulary_parallel_cross_entropy(head, hidden, labels, **options)
        with pytest.raises(ValueError, match=f"smp.nn: {words}"):
            smp.nn.DistributedCrossEntropyLoss(head, **options)
    for edge in (0, 1):
        smp.nn.DistributedCrossEntropyLoss(head, label_smoothing=edge)
    for dtype in (torch.bool, torch.float16):
        with pytest.raises(TypeError, match=f"labels are class numbers, not {dtype}"):
            vocabulary_parallel_cross_entropy(head, hidden, labels.to(dtype))
    for wrong in (labels[:1], labels[None], torch.zeros(2, 4).long()):
        with pytest.raises(ValueError, match=r"labels have shape .*; of hidden \[2, 4\] it is"):
            vocabulary_parallel_cross_entropy(head, hidden, wrong)


@on_ranks(2)
def test_a_split_heads_loss_of_edges():
    """Labels at the borders of slices, positions that all do not count, and none at all."""
    split_over_all_ranks()
    torch.manual_seed(1)
    whole = nn.Linear(4, 5).double()
    head = smp.nn.DistributedLinear(4, 5, dtype=torch.float64, by_outputs=True)
    for name, parameter in whole.named_parameters():
        own = slices_of(head.get_parameter(name)).take(parameter.detach(), group.rank())
        head.get_parameter(name).data.copy_(own)
    hidden = torch.randn(5, 4).double()
    for labels in (torch.arange(5), torch.full((5,), 2), torch.arange(5).flip(0)):
        for reduction in ("mean", "sum", "none"):
            for weight in (None, torch.rand(5, generator=torch.manual_seed(2)).double()):
                options: dict[str, Any] = {"ignore_index": 4, "weight": weight}
                got = vocabulary_parallel_cross_entropy(
                    head, hidden, labels.int(), reduction=reduction, **options
                )
                want = F.cross_entropy(whole(hidden), labels, reduction=reduction, **options)
                assert_near(got, want, f"{labels} {reduction}")
    empty = torch.zeros(0, 4).double(), torch.zeros(0, dtype=torch.int64)
    assert vocabulary_parallel_cross_entropy(head, *empty, reduction="sum") == 0
    ignored = torch.full((5,), -100)
    assert vocabulary_parallel_cross_entropy(head, hidden, ignored).isnan()
    assert not vocabulary_parallel_cross_entropy(head, hidden, ignored, reduction="none").any()


# ------------------------------------------------------------------------ building blocks


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_a_creation_scope_that_fails_leaves_the_default_dtype(default):
    module, before = smp.nn.DistributedModule(), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with (
            contextlib.suppress(KeyError),
            blocks.parameter_creation_scope(module, dtype=torch.float16),
        ):
            assert torch.get_default_dtype() == torch.float16
            raise KeyError
        assert torch.get_default_dtype() == default
    finally:
        torch.set_default_dtype(before)


@on_ranks(2)
def test_whose_samples_new_parameters_see_and_how_they_are_cut():
    split_over_all_ranks()
    for scaled in (True, False):
        module = smp.nn.DistributedModule()
        with (
            blocks.parameter_creation_scope(module, scaled_batch=scaled),
            blocks.initialize_with_output_partition(module),
        ):
            module.first = nn.Linear(3, 1 + group.rank())
        with (
            blocks.initialize_with_input_partition(module),
            blocks.parameter_creation_scope(module, scaled_batch=scaled),
        ):
            module.second = nn.Linear(1 + group.rank(), 4)
        assert all(is_scaled_batch(p) == scaled for p in module.parameters())
        for parameter, axis in (
            (module.first.weight, 0), (module.first.bias, 0), (module.second.weight, 1),
        ):  # fmt: skip
            slices = slices_of(parameter)
            assert (slices.axis, slices.size) == (axis, 3)
            assert slices.ranges == (((0, 1),), ((1, 3),))
        assert slices_of(module.second.bias) is None


@on_ranks(3)
def test_channels_that_do_not_divide():
    split_over_all_ranks()
    for n in (3, 7, 8):
        parts = torch.arange(n).tensor_split(3)
        assert blocks.get_local_channels(n) == len(parts[group.rank()])
        assert blocks.get_start_pos_for_slicing(n) == int(parts[group.rank()][0])


def like(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.manual_seed(5), dtype=x.dtype)


def test_attention_by_pytorchs_kernels():
    """Its arguments by place: queries, keys, values, mask, causal, scale."""
    q, k, v = (torch.randn(2, 3, 4, 5) for _ in range(3))
    net = smp.nn.FlashAttentionLayer()
    mask = like(q @ k.transpose(-1, -2))
    for added, causal in ((mask, False), (None, True), (None, False)):
        scores = q @ k.transpose(-1, -2) * 0.3
        if added is not None:
            scores = scores + added
        if causal:
            scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
        want = scores.softmax(-1) @ v
        torch.testing.assert_close(net(q, k, v, added, causal, 0.3), want)
