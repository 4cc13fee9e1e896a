"""Spec: tensor.md, sections 6 and 7: the kernels of tensor parallelism, against torch."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

import smp
from smp import _core
from smp.tensor_parallel.rows import kernels
from smp.tensor_parallel.rows.kernels import Dropout
from tests import heap
from tests.devices import DEVICES, use
from tests.ranks import on_ranks

IN_C = [torch.float32, torch.float16, torch.bfloat16]
DTYPES = [*IN_C, torch.float64]
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
DROPS = [None, Dropout(0.1, 1), Dropout(0.5, 2**63 + 5, first=77, width=300), Dropout(1, 3)]
SHAPES = [(3, 5, 33), (1, 64), (0, 8), (2, 0), (300, 17)]


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def check(function, reference, inputs, dtype):
    """The function's outputs and gradients are those of the reference in float64."""
    wide = [None if t is None else t.detach().double().requires_grad_() for t in inputs]
    got, want = function(*inputs), reference(*wide)
    if isinstance(got, torch.Tensor):
        got, want = (got,), (want,)
    seeds = [torch.randn_like(w) for w in want]
    torch.autograd.backward(got, [s.to(dtype) for s in seeds])
    torch.autograd.backward(want, [s.to(dtype).double() for s in seeds])
    for g, w in [
        *zip(got, want, strict=True),
        *((i.grad, w.grad) for i, w in zip(inputs, wide, strict=True) if w is not None),
    ]:
        assert g.dtype == dtype and g.shape == w.shape
        scale = max(1.0, w.abs().max().item()) if w.numel() else 1
        torch.testing.assert_close(
            g.double(), w, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("given", ["bias, residual", "bias", "residual", ""])
def test_bias_dropout_residual(dtype, drop, shape, given):
    x = drawn(*shape, dtype=dtype)
    bias = drawn(shape[-1], dtype=dtype) if "bias" in given else None
    residual = drawn(*shape, dtype=dtype) if "residual" in given else None

    def reference(x, bias, residual):
        y = x if bias is None else x + bias
        y = y if drop is None else y * drop.factors(y)
        return y if residual is None else y + residual

    def function(x, bias, residual):
        return kernels.bias_dropout_residual(x, bias, residual, drop)

    check(function, reference, [x, bias, residual], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drop", DROPS[:3])
@pytest.mark.parametrize("shape", [(3, 5, 33), (1, 64), (0, 8), (300, 17)])
@pytest.mark.parametrize("given", ["bias, residual, weight, shift", "weight", ""])
@pytest.mark.parametrize("both", [True, False])
def test_bias_dropout_residual_layer_norm(dtype, drop, shape, given, both):
    x = drawn(*shape, dtype=dtype)
    residual = drawn(*shape, dtype=dtype) if "residual" in given else None
    bias, weight, shift = (
        drawn(shape[-1], dtype=dtype) if name in given else None
        for name in ("bias", "weight", "shift")
    )

    def reference(x, bias, residual, weight, shift):
        y = x if bias is None else x + bias
        y = y if drop is None else y * drop.factors(y)
        y = y if residual is None else y + residual
        out = F.layer_norm(y, shape[-1:], weight, shift, 1e-3)
        return (out, y) if both else out

    def function(*inputs):
        out = kernels.bias_dropout_residual_layer_norm(*inputs, 1e-3, drop)
        return out if both else out[0]

    check(function, reference, [x, bias, residual, weight, shift], dtype)


MASKS = [None, (5,), (4, 5), (2, 1, 1, 5), (3, 4, 1), (2, 3, 4, 5), ()]
SIGHTS = [{}, {"causal": True}]
SIGHTS += [{"causal": True, "first_query": at, "window": 2 + at} for at in (0, 2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sight", SIGHTS)
def test_masked_softmax_dropout(dtype, drop, mask, sight):
    scores = drawn(2, 3, 4, 5, dtype=dtype)
    mask = None if mask is None else drawn(*mask, dtype=dtype)
    at = [q + sight.get("first_query", 1) for q in range(4)]
    seen = [[a - sight.get("window", 9) < k <= a for k in range(5)] for a in at]

    def reference(scores, mask):
        s = scores * 0.5 if mask is None else scores * 0.5 + mask
        s = s.masked_fill(~torch.tensor(seen), -torch.inf) if sight else s
        return s.softmax(-1) if drop is None else s.softmax(-1) * drop.factors(s)

    def function(scores, mask):
        return kernels.masked_softmax_dropout(scores, mask, scale=0.5, drop=drop, **sight)

    check(function, reference, [scores, mask], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_masked_altogether_is_zero_and_passes_no_gradient(dtype):
    scores = drawn(3, 2, 7, dtype=dtype)
    mask = torch.ones(3, 1, 7, dtype=torch.bool)
    mask[1] = False
    out = kernels.masked_softmax_dropout(scores, mask)
    out.backward(torch.randn_like(out))
    assert not out[1].any() and not scores.grad[1].any()
    torch.testing.assert_close(out[0].sum(-1), torch.ones(2, dtype=dtype))
    assert scores.grad[0].any()


def test_masks_may_be_bool_or_of_another_dtype():
    scores, seen = torch.randn(2, 5, 7, dtype=torch.float16), torch.rand(5, 7) > 0.5
    want = kernels.masked_softmax_dropout(scores, seen)
    added = torch.zeros(5, 7).masked_fill(~seen, torch.finfo(torch.float32).min)
    assert torch.equal(kernels.masked_softmax_dropout(scores, added), want)
    assert not want[:, ~seen].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_probabilities_do_not_depend_on_how_heads_are_split(dtype):
    scores = torch.randn(3, 5, 7, 9, dtype=dtype)

    def part(heads):
        drop = Dropout.of_heads(0.3, 5, heads, 5, queries=7, keys=9)
        own = scores[:, heads.start : heads.stop]
        return kernels.masked_softmax_dropout(own, causal=True, drop=drop)

    for cut in range(6):
        assert torch.equal(
            torch.cat([part(range(cut)), part(range(cut, 5))], 1), part(range(5))
        )


def test_arguments_of_softmax_that_do_not_fit_are_named():
    scores = torch.zeros(2, 3, 4)
    for wrong in (torch.zeros(3), torch.zeros(1, 2, 3, 4), torch.zeros(2, 4)):
        with pytest.raises(ValueError, match=r"mask of \(.*does not broadcast.*\(2, 3, 4\)"):
            kernels.masked_softmax_dropout(scores, wrong)
    with pytest.raises(ValueError, match="window must be at least 1"):
        kernels.masked_softmax_dropout(scores, window=3)
    with pytest.raises(ValueError, match="scores must be"):
        kernels.masked_softmax_dropout(scores[0, 0])


def test_shapes_that_do_not_fit_are_named():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"bias has shape \(2,\); .* must be \(3,\)"):
        kernels.bias_dropout_residual(x, torch.zeros(2), None)
    with pytest.raises(ValueError, match=r"residual has shape \(3,\)"):
        kernels.bias_dropout_residual(x, None, torch.zeros(3))
    with pytest.raises(ValueError, match="p must be in"):
        Dropout(1.5, 0)
    with pytest.raises(ValueError, match="comes with jump"):
        Dropout(0.5, 0, run=2)


def mask(rows, columns, drop):
    return kernels.dropout(torch.ones(rows, columns), drop)


def test_the_mask_does_not_depend_on_how_rows_are_split():
    whole = mask(10, 37, Dropout(0.3, 5))
    for cut in range(11):
        parts = mask(cut, 37, Dropout(0.3, 5)), mask(10 - cut, 37, Dropout(0.3, 5, cut * 37))
        assert torch.equal(torch.cat(parts), whole)


def test_the_mask_does_not_depend_on_how_columns_are_split():
    whole = mask(10, 37, Dropout(0.3, 5))
    for cut in range(38):
        left = mask(10, cut, Dropout(0.3, 5, width=37))
        right = mask(10, 37 - cut, Dropout(0.3, 5, cut, width=37))
        assert torch.equal(torch.cat([left, right], 1), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mask_does_not_depend_on_how_heads_are_split(dtype):
    def scores(heads):
        drop = Dropout.of_heads(0.3, 5, heads, 5, queries=7, keys=9)
        return kernels.dropout(torch.ones(3, len(heads), 7, 9, dtype=dtype), drop)

    whole = kernels.dropout(torch.ones(3, 5, 7, 9), Dropout(0.3, 5)).to(dtype)
    for cut in range(6):
        parts = scores(range(cut)), scores(range(cut, 5))
        torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_the_same_seed_drops_the_same_and_another_one_other_elements():
    assert torch.equal(mask(9, 65, Dropout(0.5, 8)), mask(9, 65, Dropout(0.5, 8)))
    for other in (9, 8 + 2**32):
        differ = (mask(9, 65, Dropout(0.5, 8)) != mask(9, 65, Dropout(0.5, other))).double()
        assert 0.3 < differ.mean() < 0.7


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_wanted_and_the_mean_stays(p):
    n = 1 << 20
    out = mask(1 << 10, 1 << 10, Dropout(p, 11)).double()
    sigma = math.sqrt(p * (1 - p) / n)
    assert abs((out == 0).double().mean().item() - p) < 4 * sigma
    assert out[out != 0].unique().item() == pytest.approx(1 / (1 - p))
    rows = (out == 0).double().mean(1)
    assert rows.std().item() == pytest.approx(math.sqrt(p * (1 - p) / 1024), rel=0.15)


def test_neighbours_are_dropped_independently():
    x = (mask(1 << 10, 1 << 10, Dropout(0.5, 12)) == 0).double().flatten() - 0.5
    for lag in (1, 2, 3, 4, 5, 8, 16, 32, 64, 1024):
        assert abs((x[lag:] * x[:-lag]).mean().item() * 4) < 5 / math.sqrt(x.numel())


def combined(parts):
    """What ranks with these statistics agree on."""
    top = torch.stack([p.top for p in parts]).amax(0)
    total = sum(p.sum * (p.top - top).exp() for p in parts)
    every = None if parts[0].every is None else sum(p.every for p in parts)
    return kernels.Statistics(top, total, sum(p.target for p in parts), every)


CUTS = [[13], [5, 8], [0, 13], [4, 4, 5]]  # columns of each rank


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("in_place", [False, True])
def test_split_cross_entropy(dtype, cuts, smoothing, in_place):
    logits = drawn(9, 13, dtype=dtype)
    targets = torch.tensor([0, 4, 5, 12, -7, 8, 3, -7, 12])
    seed = torch.randn(9, dtype=torch.float64)
    wide = logits.detach().double().requires_grad_()
    want = F.cross_entropy(
        wide, targets, reduction="none", ignore_index=-7, label_smoothing=smoothing
    )
    (want_grad,) = torch.autograd.grad(want, wide, seed)
    starts = [sum(cuts[:i]) for i in range(len(cuts))]
    own = [x.detach().clone().requires_grad_() for x in logits.split(cuts, 1)]
    parts = [
        kernels.cross_entropy_statistics(x, targets, start, 13, -7, smoothing)
        for x, start in zip(own, starts, strict=True)
    ]
    for rank, (x, start) in enumerate(zip(own, starts, strict=True)):

        def combine(mine, rank=rank):
            assert torch.equal(mine.sum, parts[rank].sum)
            return combined(parts)

        losses = kernels.split_cross_entropy(
            x,
            targets,
            start,
            13,
            combine,
            ignore_index=-7,
            label_smoothing=smoothing,
            in_place=in_place,
        )
        (grad,) = torch.autograd.grad(losses, x, seed.to(losses.dtype))
        assert grad.dtype == dtype
        assert not grad[targets == -7].any() and not losses[targets == -7].any()
        close = min(1e-5, TOLERANCE[dtype])
        torch.testing.assert_close(losses.double(), want, rtol=close, atol=close)
        same = want_grad[:, start : start + cuts[rank]]
        torch.testing.assert_close(grad.double(), same, rtol=0, atol=TOLERANCE[dtype])
        assert (grad.data_ptr() == x.data_ptr()) == (
            in_place and dtype != torch.float64
        ) or not cuts[rank]


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_of_huge_logits_and_of_infinite_ones(dtype):
    logits = torch.tensor([[3e4, -3e4, 0.0], [-3e4, -3e4, -3e4], [-torch.inf, 1, 1]])
    logits = logits.to(dtype).requires_grad_()
    targets = torch.tensor([1, 2, 1])
    losses = kernels.split_cross_entropy(logits, targets, 0, 3, lambda own: own)
    want = F.cross_entropy(logits.double(), targets, reduction="none")
    torch.testing.assert_close(losses.double(), want, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(losses.sum(), logits)
    third = 1 / 3
    expected = [[1, -1, 0], [third, third, third - 1], [0, -0.5, 0.5]]
    torch.testing.assert_close(
        grad.double(), torch.tensor(expected).double(), rtol=0, atol=2e-3
    )


def test_a_row_that_does_not_count_has_no_gradient_whatever_its_logits():
    logits = torch.full((2, 5), torch.nan).requires_grad_()
    targets = torch.tensor([-100, -100])
    losses = kernels.split_cross_entropy(logits, targets, 0, 5, lambda own: own)
    losses.sum().backward()
    assert not losses.any() and not logits.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_targets_that_are_no_ids_are_named(dtype):
    logits = torch.zeros(3, 4, dtype=dtype)
    for wrong in (10, -1):
        targets = torch.tensor([9, -100, wrong])
        with pytest.raises(IndexError, match=rf"targets\[2\] is {wrong}; .*\[0, 10\)"):
            kernels.cross_entropy_statistics(logits, targets, 2, 10)
    with pytest.raises(ValueError, match="logits must be"):
        kernels.cross_entropy_statistics(logits, targets, 7, 10)
    with pytest.raises(ValueError, match=r"targets has shape \(2,\)"):
        kernels.cross_entropy_statistics(logits, targets[:2], 0, 10)


@on_ranks(1)
@pytest.mark.parametrize("device", DEVICES[1:2])  # a GPU is of no use behind an assertion
def test_a_target_that_is_no_id_fails_an_assertion_of_the_device(device):
    smp.init()
    logits, targets = torch.zeros(2, 4), torch.tensor([9, -100])
    on = use(device)
    kernels.cross_entropy_statistics(logits.to(on), targets.to(on), 2, 10)
    with pytest.raises(RuntimeError, match=r"a target is not in \[0, 9\)"):
        kernels.cross_entropy_statistics(logits.to(on), targets.to(on), 2, 9)


def test_a_second_backward_in_place_is_refused():
    logits = torch.randn(2, 5).requires_grad_()
    targets = torch.tensor([1, 2])
    losses = kernels.split_cross_entropy(
        logits, targets, 0, 5, lambda own: own, in_place=True
    ).sum()
    losses.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        losses.backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding", [None, 0, 6])
def test_split_embedding(dtype, sparse, padding):
    table, cuts = drawn(13, 5, dtype=dtype), [4, 0, 9]
    ids = torch.tensor([[0, 3, 4, 12], [12, 6, 6, 3]])
    wide = table.detach().double().requires_grad_()
    want = F.embedding(ids, wide, padding)
    seed = torch.randn_like(want).to(dtype)
    want.backward(seed.double())
    total, start = 0, 0
    for own in table.split(cuts):
        own = own.detach().requires_grad_()
        out = kernels.split_embedding(own, ids, start, padding_idx=padding, sparse=sparse)
        here = (ids >= start) & (ids < start + len(own))
        assert out.shape == (2, 4, 5) and not out[~here].any()
        out.backward(seed)
        assert own.grad.is_sparse == sparse and own.grad.dtype == dtype
        if sparse:
            assert own.grad._nnz() == (here & (ids != padding)).sum()
        got = own.grad.to_dense() if sparse else own.grad
        same = wide.grad[start : start + len(own)]
        torch.testing.assert_close(got.double(), same, rtol=0, atol=TOLERANCE[dtype])
        total, start = total + out, start + len(own)
    assert torch.equal(total.double(), want)


@on_ranks(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", IN_C)
def test_a_gradient_of_many_occurrences_is_rounded_once(device, dtype):
    smp.init()
    table = torch.zeros(2, 3, dtype=dtype, device=use(device)).requires_grad_()
    ids = torch.ones(1000, dtype=torch.long, device=table.device)
    kernels.split_embedding(table, ids, 0).sum().backward()
    assert table.grad[1].tolist() == [1000] * 3 and not table.grad[0].any()


def test_a_table_that_is_no_matrix_is_named():
    with pytest.raises(ValueError, match=r"table must be .* got \(3,\)"):
        kernels.split_embedding(torch.zeros(3), torch.zeros(1, dtype=torch.long), 0)


def test_torchs_default_dtype_changes_nothing():
    logits, targets = torch.randn(3, 5), torch.tensor([1, 4, 0])
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        losses = kernels.split_cross_entropy(logits, targets, 0, 5, lambda own: own)
        normed, _ = kernels.bias_dropout_residual_layer_norm(logits, None, None, None, None)
    finally:
        torch.set_default_dtype(default)
    torch.testing.assert_close(losses, F.cross_entropy(logits, targets, reduction="none"))
    torch.testing.assert_close(normed, F.layer_norm(logits, (5,)))


KERNELS = {  # of [6, 5], with what depends on the values
    "residual": lambda x: kernels.bias_dropout_residual(x, x[0], x, Dropout(0.1, 1)),
    "norm": lambda x: kernels.bias_dropout_residual_layer_norm(x, None, x, x[0], x[1])[0],
    "softmax": lambda x: kernels.masked_softmax_dropout(x, causal=True),
    "entropy": lambda x: kernels.split_cross_entropy(
        x, torch.arange(6) % 5, 0, 5, lambda own: own
    ),
    "embedding": lambda x: kernels.split_embedding(x, torch.arange(6), 0),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_second_derivative_is_refused(name):
    """Also of a loss itself, whose gradient is a constant; not of what is linear."""
    x, kernel = drawn(6, 5), KERNELS[name]
    refused = pytest.raises(RuntimeError, match="derivative .* through a kernel of smp.nn")
    for out in (kernel(x).sum(), kernel(x).square().sum()):
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        linear = name in ("residual", "embedding") and not slope.requires_grad
        with nullcontext() if linear else refused:
            torch.autograd.grad((slope * x).sum(), x)
    assert slope.requires_grad


@pytest.mark.parametrize("dtype", IN_C)
@pytest.mark.parametrize("name", KERNELS)
def test_inputs_and_gradients_may_lie_anyhow(name, dtype):
    kernel = KERNELS[name]

    def run(x, lay):
        x = lay(x).detach().requires_grad_()
        out = kernel(x)
        out.backward(lay(torch.arange(out.numel(), dtype=out.dtype).view(out.shape) / 8))
        return out, x.grad

    def apart(t):
        return t.t().contiguous().t() if t.dim() == 2 else torch.stack([t, t], 1)[:, 0]

    x = torch.randn(6, 5).to(dtype)
    for got, want in zip(run(x, apart), run(x, torch.clone), strict=True):
        assert torch.equal(got, want)


def test_scores_of_more_axes_than_the_core_takes():
    for axes in range(8, 12):
        scores = torch.randn([2] * axes)
        mask = torch.randn(2, *[1] * (axes - 2), 2)
        want = (scores + mask).softmax(-1)
        torch.testing.assert_close(kernels.masked_softmax_dropout(scores, mask), want)


def test_while_a_model_is_compiled_torchs_operators_serve(monkeypatch):
    x, drop = torch.randn(3, 5), Dropout(0.5, 1)
    want = kernels.dropout(x, drop)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(_core, "tp_residual", None)
    torch.testing.assert_close(kernels.dropout(x, drop), want)


def test_a_second_derivative_by_what_a_kernel_hands_on():
    x, residual = torch.randn(3, 5), drawn(3, 5)
    out = kernels.bias_dropout_residual(x, None, residual)
    (slope,) = torch.autograd.grad(out.square().sum(), residual, create_graph=True)
    (twice,) = torch.autograd.grad((slope * residual).sum(), residual)
    torch.testing.assert_close(twice, 2 * out + 2 * residual)


# ------------------------------------------------------------------- the core's functions

SHAPE = {"rows": 3, "columns": 4}
PLACE = {"dropout": (0.5, 1, 0, 1, 4, 4)}
SEEN = {"scale": 1.0, "sight": (True, 0, 3, 0), **PLACE}
WHOLE, VECTOR = torch.ones(12).half(), torch.ones(4).half()
EACH, BOTH, IDS = torch.ones(3), torch.ones(6), torch.arange(3)  # statistics are float32
CALLS = {  # what each takes, in its order
    "tp_residual": {
        **SHAPE, **PLACE, "x": WHOLE, "bias": VECTOR, "residual": WHOLE, "out": WHOLE,
    },
    "tp_residual_backward": {
        **SHAPE, **PLACE, "grad": WHOLE, "grad_x": WHOLE, "grad_bias": VECTOR,
    },
    "tp_norm": {
        **SHAPE, **PLACE, "x": WHOLE, "bias": VECTOR, "residual": WHOLE, "weight": VECTOR,
        "shift": VECTOR, "eps": 1e-5, "sum": WHOLE, "out": WHOLE, "statistics": BOTH,
    },
    "tp_norm_backward": {
        **SHAPE, **PLACE, "grad_out": WHOLE, "grad_sum": WHOLE, "sum": WHOLE,
        "weight": VECTOR, "statistics": BOTH, "grad_residual": WHOLE, "grad_x": WHOLE,
        "grad_bias": VECTOR, "grad_weight": VECTOR, "grad_shift": VECTOR,
    },
    "tp_softmax": {
        **SHAPE, **SEEN, "scores": WHOLE, "mask": None, "probabilities": WHOLE, "out": WHOLE,
    },
    "tp_softmax_backward": {
        **SHAPE, **SEEN, "probabilities": WHOLE, "grad": WHOLE, "grad_scores": WHOLE,
    },
    "tp_cross_entropy": {
        **SHAPE, "ids": (0, 4, -1), "logits": WHOLE, "targets": IDS, "top": EACH, "sum": EACH,
        "target": EACH, "all": EACH,
    },
    "tp_cross_entropy_backward": {
        **SHAPE, "ids": (0, 4), "smoothing": 0.0, "logits": WHOLE, "targets": IDS, "top": EACH,
        "sum": EACH, "factors": EACH, "grad": WHOLE,
    },
    "tp_gather": {"count": 3, **SHAPE, "start": 0, "table": WHOLE, "ids": IDS, "out": WHOLE},
    "tp_scatter": {
        "count": 3, **SHAPE, "start": 0, "padding": -1, "ids": IDS, "grad": WHOLE,
        "grad_table": WHOLE,
    },
}  # fmt: skip


def call(kernel, **others):
    """Calls the core's function with copies of these tensors, but for the ``others``."""
    given = {**CALLS[kernel], **others}
    tensors = {name: t.clone() for name, t in given.items() if isinstance(t, torch.Tensor)}
    return getattr(_core, kernel)(*{**given, **tensors}.values())


@pytest.mark.parametrize("kernel", CALLS)
def test_the_core_takes_no_tensor_of_another_size_or_dtype(kernel):
    tensors = {n: t for n, t in CALLS[kernel].items() if isinstance(t, torch.Tensor)}
    for dtype in IN_C:
        halves = {n: t.to(dtype) for n, t in tensors.items() if t.dtype is torch.float16}
        assert call(kernel, **halves) in (None, 3)
    first = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    for name, tensor in tensors.items():
        n, dtype = len(tensor), str(tensor.dtype).removeprefix("torch.")
        for wrong in (tensor[1:], tensor.repeat(2)):
            said = f"^{name}: {n} elements of {dtype}, got {len(wrong)} of {dtype}$"
            with pytest.raises(ValueError, match=said):
                call(kernel, **{name: wrong})
        wrong = tensor.double() if tensor.is_floating_point() else tensor.int()
        other = str(wrong.dtype).removeprefix("torch.")
        said = f"^{name}: {n} elements of {dtype}, got {n} of {other}$"
        if name == first:
            said = f"^{name}: float32, float16 or bfloat16, got float64$"
        with pytest.raises((TypeError, ValueError), match=said):
            call(kernel, **{name: wrong})


@pytest.mark.parametrize("kernel", [name for name in CALLS if "dropout" in CALLS[name]])
def test_the_core_takes_no_other_dropout(kernel):
    for p, run in ((-0.1, 1), (1.1, 1), (math.nan, 1), (0.5, 0)):
        with pytest.raises(
            ValueError, match=r"^dropout: p must be in \[0, 1\] and run at least"
        ):
            call(kernel, dropout=(p, 1, 0, run, 4, 4))


def test_the_core_looks_at_what_a_mask_and_a_sight_say():
    def masked(elements, shape, strides):
        mask = torch.zeros(elements).half(), elements, shape, strides
        return call("tp_softmax", mask=mask)

    for elements, shape, strides in (
        (12, (3,), (4,)),
        (8, (3, 1), (2, 0)),
        (10, (1, 3), (99, 3)),
        (4, (1,) * 7 + (3,), (0,) * 8),
    ):
        masked(elements, shape, strides)
        for wrong in (
            (elements - 1, shape, strides),
            (elements, (2, *shape), (0, *strides)),
            (elements, (*shape[:-1], 2), strides),
            (elements, (*shape[:-1], 4), strides),
            (elements, shape, strides[1:]),
            (elements, shape, (*strides, 1)),
        ):
            with pytest.raises(
                ValueError, match="^mask: (shape and strides leave the|at most)"
            ):
                masked(*wrong)
    for shape, strides in (((1,) * 8 + (3,), (0,)), ((3,), (0,) * 9)):
        with pytest.raises(ValueError, match="^mask: at most 8 dimensions of rows, got 9$"):
            masked(12, shape, strides)
    with pytest.raises(ValueError, match="^mask: 12 elements of float16, got 4 of float16$"):
        call("tp_softmax", mask=(VECTOR, 12, (3,), (4,)))
    for kernel in ("tp_softmax", "tp_softmax_backward"):
        with pytest.raises(ValueError, match="^sight: queries must be at least 1$"):
            call(kernel, sight=(True, 0, 0, 0))


def test_of_a_norm_what_is_normalised_may_be_used_alone():
    x, residual = drawn(3, 5), drawn(3, 5)
    _, total = kernels.bias_dropout_residual_layer_norm(x, None, residual, None, None)
    total.backward(seed := torch.randn(5, 3).t())  # in another order in memory
    assert torch.equal(x.grad, seed) and torch.equal(residual.grad, seed)


def test_nothing_is_left_behind():
    """What a kernel needs for a while is freed."""
    x = torch.randn(2, 5000)  # of which some rows are needed: 20 KB each

    def all_kernels():
        leaf = x.clone().requires_grad_()
        vectors = [x[0].clone().requires_grad_() for _ in range(3)]
        bias, weight, shift = vectors
        y = kernels.bias_dropout_residual(leaf, bias, leaf, Dropout(0.1, 1))
        y, _ = kernels.bias_dropout_residual_layer_norm(y, bias, y, weight, shift)
        y = kernels.masked_softmax_dropout(y, causal=True, drop=Dropout(0.1, 1))
        y = kernels.split_embedding(y, torch.tensor([0, 1]), 0)
        kernels.split_cross_entropy(
            y, torch.tensor([1, 2]), 0, 5000, lambda own: own
        ).sum().backward()

    all_kernels()
    before = heap.bytes_in_use()
    for _ in range(30):
        all_kernels()
    assert heap.bytes_in_use() - before < 30 * 4000
