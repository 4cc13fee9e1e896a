"""The kernels of tensor parallelism, with their gradients.

The C core (``csrc/tp_kernels``) takes tensors of float32, float16 or bfloat16 in host memory,
or on a GPU with kernels (``gpu_kernels.py``).  It computes in float32.  Others, and all while a
model is compiled, go through torch's operators, with the same meaning and the same dropout.
On a GPU torch also serves embeddings, and norms, sums without dropout and sums of columns: its
operators were ahead of an earlier form of the kernels on an H100.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smp import _core
from smp.slicing.split_parameters import SplitParameter
from smp.tensor_parallel.rows import gpu_kernels
from smp.tensor_parallel.rows.second_derivatives import refused, refused_of_values

_HALF = (torch.float16, torch.bfloat16)
_DTYPES = (torch.float32, *_HALF)
_MASK_DIMS = 8  # SMP_TP_MASK_DIMS: those of the scores but the last
_PLAIN = (Tensor, torch.nn.Parameter, SplitParameter)

# Added to scores: as good as minus infinity, and yet small: the scores of a position that sees
# hidden ones only are not lost beside it.
HIDES = -1e4


@dataclass(frozen=True)
class Dropout:
    """The elements dropped by a call: a function of ``seed`` and each one's global index alone.

    So ranks with parts of a tensor drop the same elements as one rank with all of it.  The
    index of element (r, c) of a call is ``first + r // run * jump + r % run * width + c``; r is
    over all dimensions but the last.  Without ``jump`` the rows follow one another.

    ``p``: the probability of an element to become 0; the others are divided by 1 - p.
    ``seed``: an int of 64 bits.  ``width``: elements of a whole row (default: of the call's).
    """

    p: float
    seed: int
    first: int = 0
    width: int | None = None
    run: int = 1
    jump: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ValueError(f"dropout: p must be in [0, 1], got {self.p}")
        if self.run < 1 or (self.run > 1 and self.jump is None):
            raise ValueError(
                f"dropout: run must be at least 1, and comes with jump, got {self.run} "
                f"and jump={self.jump}"
            )

    @classmethod
    def of_heads(
        cls, p: float, seed: int, heads: range, of: int, queries: int, keys: int
    ) -> Dropout:
        """For scores [samples, len(heads), queries, keys]: these heads, ``of`` in all."""
        one = queries * keys
        return cls(p, seed, heads.start * one, keys, len(heads) * queries or 1, of * one)

    def placed(self, columns: int) -> tuple[float, int, int, int, int, int]:
        """The core's arguments, for rows of so many elements."""
        width = columns if self.width is None else self.width
        jump = width if self.jump is None else self.jump
        return (self.p, self.seed, self.first, self.run, jump, width)

    def factors(self, like: Tensor) -> Tensor:
        """The factor of each element, by torch alone; of the shape of ``like``."""
        if self.p in (0, 1):
            return torch.full_like(like, 1 - self.p)
        columns = like.shape[-1] if like.dim() else 1
        _, seed, first, run, jump, width = self.placed(columns)
        rows = torch.arange(like.numel() // max(columns, 1), device=like.device)
        starts = first + rows // run * jump + rows % run * width
        index = starts[:, None] + torch.arange(columns, device=like.device)
        kept = _philox(index, seed) >= min(int(self.p * 2**16 + 0.5), 2**16 - 1)
        return (kept.to(like.dtype) / (1 - self.p)).view(like.shape)


def _philox(index: Tensor, seed: int) -> Tensor:
    """Half index % 8 of Philox4x32-7(counter = index / 8, key = seed), as int64."""
    low = 0xFFFFFFFF
    counter = index >> 3
    c = [counter & low, counter >> 32 & low, torch.zeros_like(index), torch.zeros_like(index)]
    keys = [seed & low, seed >> 32 & low]
    for _ in range(7):
        even, odd = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57  # they wrap around: 64 bits
        c = [
            (odd >> 32 & low) ^ c[1] ^ keys[0],
            odd & low,
            (even >> 32 & low) ^ c[3] ^ keys[1],
            even & low,
        ]
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    word = torch.stack(c, -1).gather(-1, (index >> 1 & 3)[..., None])[..., 0]
    return word >> 16 * (index & 1) & 0xFFFF


_NONE = Dropout(0, 0)


def _in_c(
    first: Tensor, *rest: Tensor | None, ids: Tensor | None = None, ahead_on_gpu: bool = True
) -> bool:
    """Whether the core takes these tensors together; ``ids``: of int64, beside them."""
    device, dtype = first.device, first.dtype
    if type(first) not in _PLAIN or dtype not in _DTYPES or torch.compiler.is_compiling():
        return False
    for t in rest:  # no generator: it takes a microsecond
        if t is not None and (type(t) not in _PLAIN or t.dtype != dtype or t.device != device):
            return False
    return (ids is None or ids.device == device) and (
        device.type == "cpu" or gpu_kernels.usable(device, dtype, _trials, ahead_on_gpu)
    )


def _rows(x: Tensor) -> tuple[int, int]:
    """Rows and columns, for rows along the last dimension."""
    columns = x.shape[-1]
    return (x.numel() // columns if columns else 0), columns


def _check_shape(
    name: str, tensor: Tensor | None, want: torch.Size, of: str, given: Tensor
) -> None:
    if tensor is not None and tensor.shape != want:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; with {of} of {tuple(given.shape)} it "
            f"must be {tuple(want)}"
        )


class _Residual(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None, drop: Dropout
    ) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        ctx.drop, ctx.columns = drop, x.shape[-1]
        ctx.sums_in_c = x.device.type == "cpu" or _in_c(x, ahead_on_gpu=False)
        _core.tp_residual(
            *_rows(x),
            drop.placed(x.shape[-1]),
            x,
            None if bias is None else bias.contiguous(),
            None if residual is None else residual.contiguous(),
            out,
        )
        return out

    @staticmethod
    @refused
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.contiguous()
        grad_x = torch.empty_like(grad)
        sums_in_c = ctx.needs_input_grad[1] and ctx.sums_in_c
        grad_bias = grad.new_empty(ctx.columns) if sums_in_c else None
        drop = ctx.drop.placed(ctx.columns)
        _core.tp_residual_backward(*_rows(grad), drop, grad, grad_x, grad_bias)
        if ctx.needs_input_grad[1] and not sums_in_c:
            grad_bias = grad_x.view(_rows(grad)).sum(0)
        return grad_x, grad_bias, grad if ctx.needs_input_grad[2] else None, None


def bias_dropout_residual(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, drop: Dropout | None = None
) -> Tensor:
    """``residual + dropout(x + bias)``.

    x and residual [..., columns], bias [columns]; ``drop=None`` drops nothing.
    Raises ValueError for other shapes.
    """
    drop = drop or _NONE
    _check_shape("bias", bias, x.shape[-1:], "x", x)
    _check_shape("residual", residual, x.shape, "x", x)
    if _in_c(x, bias, residual, ahead_on_gpu=drop.p > 0):
        return _Residual.apply(x, bias, residual, drop)
    y = x if bias is None else x + bias
    if drop.p:
        y = y * drop.factors(y)
    return y if residual is None else residual + y


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        weight: Tensor | None,
        shift: Tensor | None,
        eps: float,
        drop: Dropout,
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        rows, columns = _rows(x)
        total, out = torch.empty_like(x), torch.empty_like(x)
        statistics = torch.empty(2 * rows, dtype=torch.float32, device=x.device)
        weight = None if weight is None else weight.contiguous()
        ctx.drop = drop
        _core.tp_norm(
            rows,
            columns,
            drop.placed(columns),
            x,
            None if bias is None else bias.contiguous(),
            None if residual is None else residual.contiguous(),
            weight,
            None if shift is None else shift.contiguous(),
            eps,
            total,
            out,
            statistics,
        )
        ctx.save_for_backward(total, weight, statistics)
        ctx.set_materialize_grads(False)
        return out, total

    @staticmethod
    @refused_of_values
    def backward(ctx: Any, grad: Tensor | None, grad_total: Tensor | None) -> Any:
        total, weight, statistics = ctx.saved_tensors
        rows, columns = _rows(total)
        grad = torch.zeros_like(total) if grad is None else grad.contiguous()
        grad_total = None if grad_total is None else grad_total.contiguous()
        grad_residual = torch.empty_like(total)
        grad_x = torch.empty_like(total) if ctx.drop.p else None
        sums = [total.new_empty(columns) for _ in range(3)]
        _core.tp_norm_backward(
            rows,
            columns,
            ctx.drop.placed(columns),
            grad,
            grad_total,
            total,
            weight,
            statistics,
            grad_residual,
            grad_x,
            *sums,
        )
        wanted = ctx.needs_input_grad
        return (
            (grad_residual if grad_x is None else grad_x) if wanted[0] else None,
            sums[0] if wanted[1] else None,
            grad_residual if wanted[2] else None,
            sums[1] if wanted[3] else None,
            sums[2] if wanted[4] else None,
            None,
            None,
        )


def bias_dropout_residual_layer_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    shift: Tensor | None,
    eps: float = 1e-5,
    drop: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """``layer_norm(residual + dropout(x + bias)) * weight + shift``, and the norm's input.

    x and residual [..., columns], the rest [columns].  The second result is the residual
    stream where the norm comes before the next module.  Raises ValueError for other shapes.
    """
    drop = drop or _NONE
    for name, tensor in (("bias", bias), ("weight", weight), ("shift", shift)):
        _check_shape(name, tensor, x.shape[-1:], "x", x)
    _check_shape("residual", residual, x.shape, "x", x)
    if _in_c(x, bias, residual, weight, shift, ahead_on_gpu=False):
        return _Norm.apply(x, bias, residual, weight, shift, eps, drop)
    total = bias_dropout_residual(x, bias, residual, drop)
    return torch.layer_norm(total, x.shape[-1:], weight, shift, eps), total


def dropout(x: Tensor, drop: Dropout) -> Tensor:
    """x [..., columns] with some elements 0, the others divided by 1 - p."""
    return bias_dropout_residual(x, None, None, drop)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        mask: Tensor | None,
        scale: float,
        sight: tuple[bool, int, int, int],
        drop: Dropout,
    ) -> Tensor:
        scores = scores.contiguous()
        rows, keys = _rows(scores)
        probabilities = torch.empty_like(scores)
        out = torch.empty_like(scores) if drop.p else None
        added = None
        if mask is not None:
            ctx.mask_shape = mask.shape
            mask = mask.expand(*mask.shape[:-1], keys).contiguous()
            strides = mask.expand(scores.shape).stride()[:-1]
            added = (mask, mask.numel(), tuple(scores.shape[:-1]), strides)
        ctx.scale = scale
        placed = drop.placed(keys)
        ctx.settings = sight, placed
        _core.tp_softmax(rows, keys, scale, sight, placed, scores, added, probabilities, out)
        ctx.save_for_backward(probabilities)
        return probabilities if out is None else out

    @staticmethod
    @refused_of_values
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (probabilities,) = ctx.saved_tensors
        grad, grad_mask = grad.contiguous(), None
        of_mask = ctx.needs_input_grad[1]  # that of the scores, but for the scale
        grad_scores = torch.empty_like(grad)
        scale = 1.0 if of_mask else ctx.scale
        (rows, keys), (sight, placed) = _rows(grad), ctx.settings
        _core.tp_softmax_backward(
            rows, keys, scale, sight, placed, probabilities, grad, grad_scores
        )
        if of_mask:
            grad_mask = grad_scores.sum_to_size(ctx.mask_shape)
            grad_scores = grad_scores * ctx.scale
        return grad_scores, grad_mask, None, None, None


def _seen(scores: Tensor, sight: tuple[bool, int, int, int]) -> Tensor:
    """The keys seen by each query: bool [queries, keys]."""
    _, first, _, window = sight
    queries, keys = scores.shape[-2:]
    at = torch.arange(first, first + queries, device=scores.device)[:, None]
    key = torch.arange(keys, device=scores.device)
    return (key <= at) & (key > at - window) if window else key <= at


def masked_softmax_dropout(
    scores: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    window: int | None = None,
    first_query: int | None = None,
    drop: Dropout | None = None,
) -> Tensor:
    """``dropout(softmax(scores * scale + mask))`` over the last dimension.

    scores [..., queries, keys]; mask, broadcast to the same shape, is added; a bool mask is
    True for the keys seen.  ``causal``: a query sees the keys up to its own position, with
    ``window`` the last so many of those.  The first query's position is ``first_query``
    (default: keys - queries, so the last one sees all).  A row whose keys are all masked with
    -inf is 0.  Raises ValueError for a mask that does not broadcast, and for a window
    without ``causal`` or below 1.
    """
    shape = scores.shape
    if scores.dim() < 2:
        raise ValueError(f"scores must be [..., queries, keys], got {tuple(shape)}")
    if window is not None and (not causal or window < 1):
        raise ValueError(f"window must be at least 1, with causal=True, got {window}")
    drop = drop or _NONE
    if mask is not None:
        fits = zip(reversed(mask.shape), reversed(shape), strict=False)
        if mask.dim() > scores.dim() or any(m not in (1, s) for m, s in fits):
            raise ValueError(
                f"mask of {tuple(mask.shape)} does not broadcast to scores of {tuple(shape)}"
            )
        if mask.dtype == torch.bool:
            zero = torch.zeros((), dtype=scores.dtype, device=mask.device)
            mask = zero.masked_fill(~mask, -torch.inf)
        mask = mask.to(scores.dtype).view(mask.shape or (1,))
    first = shape[-1] - shape[-2] if first_query is None else first_query
    sight = (causal, first, max(shape[-2], 1), window or 0)
    if _in_c(scores, mask) and scores.dim() <= _MASK_DIMS + 1:
        return _Softmax.apply(scores, mask, scale, sight, drop)
    s = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    s = s if mask is None else s + mask
    s = s.masked_fill(~_seen(scores, sight), -torch.inf) if causal else s
    unseen = (s == -torch.inf).all(-1, keepdim=True)
    p = s.masked_fill(unseen, 0).softmax(-1).masked_fill(unseen, 0)
    return (p * drop.factors(p) if drop.p else p).to(scores.dtype)


@dataclass
class Statistics:
    """Cross-entropy's numbers for each row of logits [rows, columns]; all [rows], float32.

    For logits with columns split over ranks, first of a rank's own columns, and then of all:
    ``top`` is the largest of the ranks', ``sum`` the sum of ``sum * exp(top - all's top)``,
    ``target`` and ``every`` are sums.
    """

    top: Tensor  # the largest logit; -inf without columns
    sum: Tensor  # of exp(logit - top)
    target: Tensor  # the target's logit; 0 where it is not among the columns
    every: Tensor | None = None  # the sum of the logits, for label smoothing


def cross_entropy_statistics(
    logits: Tensor,
    targets: Tensor,
    start: int,
    vocabulary: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Statistics:
    """The statistics of a rank's own columns, those of ids ``start`` and on.

    logits [rows, columns]; targets [rows], int64; a row with ``ignore_index`` does not count.
    Statistics of float64 logits are float64.  Raises IndexError for a target neither
    ``ignore_index`` nor in [0, vocabulary), and ValueError for wrong shapes.  On a device such
    a target fails an assertion there, as in ``F.cross_entropy``: the host does not wait.
    """
    if logits.dim() != 2 or not 0 <= start <= vocabulary - logits.shape[1]:
        raise ValueError(
            f"logits must be [rows, columns] with columns {start} .. of {vocabulary}, "
            f"got {tuple(logits.shape)}"
        )
    _check_shape("targets", targets, logits.shape[:1], "logits", logits)
    logits = logits.detach()
    if _in_c(logits, ids=targets):
        count = 4 if label_smoothing else 3
        out = torch.empty((count, len(logits)), dtype=torch.float32, device=logits.device)
        statistics = Statistics(*out)
        wrong = _core.tp_cross_entropy(
            logits.shape[0],
            logits.shape[1],
            (start, vocabulary, ignore_index),
            logits.contiguous(),
            targets.long().contiguous(),
            statistics.top,
            statistics.sum,
            statistics.target,
            statistics.every,
        )
    else:
        wrong = None
        statistics = _statistics(logits, targets - start, bool(label_smoothing))
    if wrong is None:
        fits = (targets == ignore_index) | ((targets >= 0) & (targets < vocabulary))
        if not targets.is_cpu:
            with contextlib.suppress(NotImplementedError):  # of accelerators without it
                torch._assert_async(fits.all(), f"a target is not in [0, {vocabulary})")
                return statistics
        wrong = len(targets) if fits.all() else int(fits.long().argmin())
    if wrong < len(targets):
        raise IndexError(
            f"targets[{wrong}] is {int(targets[wrong])}; it must be in [0, {vocabulary}) or "
            f"ignore_index ({ignore_index})"
        )
    return statistics


def _statistics(logits: Tensor, columns: Tensor, every: bool) -> Statistics:
    """By torch alone; ``columns`` of the targets, perhaps outside the logits."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = torch.cat([x, x.new_full((len(x), 1), -torch.inf)], 1).amax(1)
    base = top.masked_fill(top == -torch.inf, 0)[:, None]
    own = columns[:, None] == torch.arange(x.shape[1], device=x.device)
    return Statistics(
        top,
        (x - base).exp().sum(1),
        torch.where(own, x, 0).sum(1),
        x.sum(1) if every else None,
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        start: int,
        vocabulary: int,
        combine: Callable[[Statistics], Statistics],
        ignore_index: int,
        smoothing: float,
        in_place: bool,
    ) -> Tensor:
        of = combine(
            cross_entropy_statistics(
                logits, targets, start, vocabulary, ignore_index, smoothing
            )
        )
        ctx.save_for_backward(logits, targets, of.top, of.sum)
        ctx.settings = (start, vocabulary, ignore_index, smoothing, in_place)
        ctx.spent = False
        above = of.sum.log()  # by so much all logits' log-sum-exp is above the largest one
        losses = above + (of.top - of.target)
        if of.every is not None:
            mean = above + (of.top - of.every / vocabulary)
            losses = losses * (1 - smoothing) + mean * smoothing
        return losses.masked_fill(targets == ignore_index, 0)

    @staticmethod
    @refused_of_values
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, top, total = ctx.saved_tensors
        start, vocabulary, ignore_index, smoothing, in_place = ctx.settings
        if ctx.spent:
            raise RuntimeError(
                "split_cross_entropy(in_place=True): a second backward, but the first one "
                "has written the gradient over the logits"
            )
        ctx.spent = in_place
        factors = grad.masked_fill(targets == ignore_index, 0)
        return _cross_entropy_backward(
            logits, targets, start, vocabulary, top, total, factors, smoothing, in_place
        ), *[None] * 7


def _cross_entropy_backward(
    logits: Tensor,
    targets: Tensor,
    start: int,
    vocabulary: int,
    top: Tensor,
    total: Tensor,
    factors: Tensor,
    smoothing: float,
    in_place: bool,
) -> Tensor:
    """The logits' gradient, from all ranks' statistics and the losses' gradients."""
    if _in_c(logits, ids=targets):
        dense = logits.contiguous()
        out = dense if in_place else torch.empty_like(dense)
        _core.tp_cross_entropy_backward(
            logits.shape[0],
            logits.shape[1],
            (start, vocabulary),
            smoothing,
            dense,
            targets.long().contiguous(),
            top.contiguous(),
            total.contiguous(),
            factors.contiguous(),
            out,
        )
        return out
    p = (logits.to(top.dtype) - top[:, None]).exp() / total[:, None]
    ids = torch.arange(start, start + logits.shape[1], device=logits.device)
    is_target = (targets[:, None] == ids).to(p.dtype)
    wanted = is_target * (1 - smoothing) + smoothing / vocabulary
    grad = (p - wanted) * factors[:, None]
    return grad.masked_fill((factors == 0)[:, None], 0).to(logits.dtype)


def split_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    start: int,
    vocabulary: int,
    combine: Callable[[Statistics], Statistics],
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    in_place: bool = False,
) -> Tensor:
    """The loss of each row, float32 [rows], 0 for rows with the target ``ignore_index``.

    logits [rows, columns] are a rank's own columns of all, those of ids ``start`` and on.
    ``combine`` makes all ranks' statistics of its own ones, by collectives.  Each rank gets the
    losses of all columns, and in backward the gradient of its own.  ``in_place`` writes that
    gradient over the logits, needed by no other code then.  Errors as for
    :func:`cross_entropy_statistics`.
    """
    return _CrossEntropy.apply(
        logits, targets, start, vocabulary, combine, ignore_index, label_smoothing, in_place
    )


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table: Tensor, ids: Tensor, start: int, padding: int, sparse: bool
    ) -> Tensor:
        table, ids = table.contiguous(), ids.long().contiguous()
        ctx.save_for_backward(ids)
        ctx.settings = (tuple(table.shape), start, padding, sparse)
        if table.device.type == "cpu" and _in_c(table, ids=ids):
            out = table.new_empty(*ids.shape, table.shape[1])
            rows, columns = table.shape
            _core.tp_gather(ids.numel(), rows, columns, start, table, ids, out)
            return out
        here = ((ids >= start) & (ids < start + len(table)))[..., None]
        if not len(table):
            return table.new_zeros(*ids.shape, table.shape[1])
        at = (ids - start).clamp(0, len(table) - 1)
        return table[at].masked_fill(~here, 0)

    @staticmethod
    @refused
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        shape, start, padding, sparse = ctx.settings
        if not sparse and grad.device.type == "cpu" and _in_c(grad, ids=ids):
            out = grad.new_empty(shape)
            rows, columns = shape
            grad = grad.contiguous()
            _core.tp_scatter(ids.numel(), rows, columns, start, padding, ids, grad, out)
            return out, *[None] * 4
        ids, grad = ids.flatten(), grad.reshape(-1, shape[1])
        here = (ids >= start) & (ids < start + shape[0]) & (ids != padding)
        if sparse:
            at, values = ids[here] - start, grad[here]
            out = torch.sparse_coo_tensor(at[None], values, shape, check_invariants=False)
        else:  # ids of other ranks add to a row behind the table
            at = torch.where(here, ids - start, shape[0])
            wide = grad.float() if grad.dtype in _HALF else grad  # as the core sums
            out = torch.ops.aten.embedding_dense_backward(wide, at, shape[0] + 1, -1, False)
            out = out[:-1].to(grad.dtype)
        return out, *[None] * 4


def split_embedding(
    table: Tensor,
    ids: Tensor,
    start: int,
    *,
    padding_idx: int | None = None,
    sparse: bool = False,
) -> Tensor:
    """Rows of a rank's slice of a table, zeros for ids of other ranks' slices.

    table [rows, columns] has the ids ``start`` and on; ids have any shape.  The result is
    [*ids, columns]: its sum over ranks is the whole table's.  ``padding_idx`` gets no gradient.
    With ``sparse`` the gradient is COO, with an entry for each id of the slice, in their order.
    Raises ValueError for a table that is no matrix.
    """
    if table.dim() != 2:
        raise ValueError(f"table must be [rows, columns], got {tuple(table.shape)}")
    padding = -1 if padding_idx is None else padding_idx
    return _Embedding.apply(table, ids, start, padding, sparse)


# Rows and columns of trials: each form of a kernel on a GPU (csrc/tp_kernels/gpu_entries.h) has
# one, by the alignment and the length of rows.
_TRIED = ((37, 130), (9, 136), (2, 2048), (2, 2050), (2, 8200))
# ... and on a GPU one with more rows than there are blocks.
_TRIED_ON_GPUS = ((4100, 1032),)


def _trials(
    device: torch.device, dtype: torch.dtype
) -> list[tuple[str, Callable[[torch.dtype], list[Tensor]]]]:
    """Each kernel: from the dtype of computing to outputs and gradients.

    Args:
        dtype: that of the kernel; its inputs have the same values in the other.
    """
    source = torch.Generator(device="cpu").manual_seed(1)
    return [
        trial
        for rows, columns in _TRIED + (_TRIED_ON_GPUS if device.type == "cuda" else ())
        for trial in _trials_of(rows, columns, device, dtype, source)
    ]


def _trials_of(
    rows: int, columns: int, device: torch.device, dtype: torch.dtype, source: torch.Generator
) -> list[tuple[str, Callable[[torch.dtype], list[Tensor]]]]:
    drop = Dropout(0.25, 0x5EED << 40 | 7, first=13)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, device="cpu").to(dtype).to(device)

    x, residual, grad = (drawn(rows, columns) for _ in range(3))
    bias, weight, shift = (drawn(columns) for _ in range(3))
    scores, mask = drawn(1, rows, columns), drawn(1, 1, columns)
    vocabulary = columns + 20
    targets = torch.randint(-20, vocabulary, (rows,), generator=source, device="cpu")
    targets = targets.clamp(min=0).to(device)

    def with_gradients(
        function: Callable[..., Any], *inputs: Tensor
    ) -> Callable[[torch.dtype], list[Tensor]]:
        def run(computes_in: torch.dtype) -> list[Tensor]:
            leaves = [t.detach().to(computes_in, copy=True).requires_grad_() for t in inputs]
            with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
                out = function(*leaves)
                seed = grad.flatten()[: out.numel()].view_as(out).to(out.dtype)
                return [out.detach(), *torch.autograd.grad(out, leaves, seed)]

        return run

    def entropy(logits: Tensor) -> Tensor:
        return split_cross_entropy(
            logits, targets, 20, vocabulary, lambda own: own, label_smoothing=0.1
        )

    def softmax(scores: Tensor) -> Tensor:
        return masked_softmax_dropout(
            scores, mask.to(scores.dtype), scale=0.5, causal=True, window=40, drop=drop
        )

    def added(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return bias_dropout_residual(x, bias, residual, drop)

    def norm(
        x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor
    ) -> Tensor:
        return bias_dropout_residual_layer_norm(x, bias, residual, weight, shift, drop=drop)[0]

    return [
        (f"{name} of {columns} columns", run)
        for name, run in (
            ("bias, dropout and residual", with_gradients(added, x, bias, residual)),
            ("layer norm", with_gradients(norm, x, bias, residual, weight, shift)),
            ("masked softmax", with_gradients(softmax, scores)),
            ("cross-entropy", with_gradients(entropy, x)),
        )
    ]
