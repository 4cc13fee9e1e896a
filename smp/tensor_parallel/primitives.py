"""Tensors moved between the ranks of the TP_GROUP: each operation is a true adjoint.

Ranks may have different lengths along the axis of a cut or a join.  Sources: the SageMaker
paper, section 5 and appendix E.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from smp import ranks
from smp.pytorch.compiled_code import not_traced
from smp.runtime.collective_chain import linked, new_token
from smp.tensor_parallel import group
from smp.tensor_parallel.backward.order import Call
from smp.tensor_parallel.backward.unused_collectives import defined, keep_shape
from smp.tensor_parallel.rows import assumed_sizes
from smp.tensor_parallel.rows.second_derivatives import refused

Lengths = list[int]  # by tp_rank


def entering(x: Tensor, axis: int) -> tuple[Tensor, Lengths]:
    """A tensor to gather next, and every tp_rank's length along an axis.

    The tensor requires grad where any rank's does: all take part in the backward of the gather.
    Collective over the TP_GROUP.
    """
    if group.size() == 1:
        return x, [x.size(axis)]
    return _entered(x, group.gather_numbers([*_of_entering(x, axis)]))


def _of_entering(x: Tensor, axis: int) -> tuple[int, bool]:
    return x.size(axis), x.requires_grad and torch.is_grad_enabled()


def requiring(x: Tensor, required: bool) -> Tensor:
    """The tensor, with an unused gradient if this rank does not require one."""
    if not required or x.requires_grad or not torch.is_grad_enabled():
        return x
    return x.detach().requires_grad_(True)


def all_gather_slices(
    x: Tensor, lengths: Lengths, call: Call, signature: int = 0, axis: int = 0
) -> Tensor:
    """The ranks' slices along an axis, one rank behind the other."""
    if axis and not group.is_traced() and not group.moves_columns(x):
        rows = all_gather_slices(x.movedim(axis, 0), lengths, call, signature)
        return rows.movedim(0, axis)
    out = x.new_empty(_with_length(x, axis, sum(lengths)))
    if group.is_traced():
        return out.copy_(x.narrow(axis, 0, 1)) if x.numel() else out.zero_()
    if out.numel() or signature:
        group.gather_rows(out, x.contiguous(), lengths, call, signature, axis)
    return out


def reduce_scatter_slices(x: Tensor, lengths: Lengths, call: Call, axis: int = 0) -> Tensor:
    """This rank's slice along an axis of the sum."""
    if axis and not group.is_traced() and not group.moves_columns(x):
        return reduce_scatter_slices(x.movedim(axis, 0), lengths, call).movedim(0, axis)
    own = lengths[group.rank()]
    out = x.new_empty(_with_length(x, axis, own))
    if group.is_traced():
        return out.copy_(x.narrow(axis, 0, own))
    if x.numel():
        group.reduce_rows(out, x.contiguous(), lengths, call, axis)
    return out


def _with_length(x: Tensor, axis: int, length: int) -> list[int]:
    """The shape, with another length along the axis."""
    shape = list(x.shape)
    shape[axis] = length
    return shape


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, lengths: Lengths, signature: int) -> tuple:
        ctx.axis, ctx.lengths, ctx.call = axis, lengths, group.begin_call()
        out = all_gather_slices(x, lengths, ctx.call, signature, axis)
        keep_shape(ctx, out)
        if not x.is_floating_point() and not x.is_complex():
            ctx.mark_non_differentiable(out)
        return out, new_token()

    @staticmethod
    @refused
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple:  # type: ignore[override]
        gradient, call = defined(ctx, gradient), ctx.call.backward()
        out = reduce_scatter_slices(gradient, ctx.lengths, call, ctx.axis)
        return out, None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, lengths: Lengths) -> tuple:
        ctx.axis, ctx.lengths, ctx.call = axis, lengths, group.begin_call()
        out = reduce_scatter_slices(x, lengths, ctx.call, axis)
        keep_shape(ctx, out)
        return out, new_token()

    @staticmethod
    @refused
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple:  # type: ignore[override]
        gradient, call = defined(ctx, gradient), ctx.call.backward()
        out = all_gather_slices(gradient, ctx.lengths, call, axis=ctx.axis)
        return out, None, None


class _OwnPart(Function):
    """This rank's slice of a tensor alike on all tp_ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, lengths: Lengths) -> tuple:
        ctx.axis, ctx.lengths, ctx.call = axis, lengths, group.begin_call()
        first = sum(lengths[: group.rank()])
        out = x.narrow(axis, first, lengths[group.rank()]).clone()
        keep_shape(ctx, out)
        return out, new_token()

    @staticmethod
    @refused
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple:  # type: ignore[override]
        gradient, call = defined(ctx, gradient), ctx.call.backward()
        out = all_gather_slices(gradient, ctx.lengths, call, axis=ctx.axis)
        return out, None, None


class _ScatterAndMerge(Function):
    """Piece i along ``split`` goes to rank i; arriving pieces are joined along ``merge``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, split: int, merge: int, cut: Lengths, joined: Lengths
    ) -> tuple:
        ctx.arguments, ctx.call = (merge, split, joined, cut), group.begin_call()
        out = _scatter_and_merge(x, ctx.call, split, merge, cut, joined)
        keep_shape(ctx, out)
        return out, new_token()

    @staticmethod
    @refused
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple:  # type: ignore[override]
        call = ctx.call.backward()
        out = _scatter_and_merge(defined(ctx, gradient), call, *ctx.arguments)
        return out, None, None, None, None


def _scatter_and_merge(
    x: Tensor, call: Call, split: int, merge: int, cut: Lengths, joined: Lengths
) -> Tensor:
    shape = _with_length(x, split, cut[group.rank()])
    shape[merge] = sum(joined)
    out = x.new_empty(shape)
    if group.is_traced():
        return out.zero_()
    goes, comes = group.elements(x, split, cut), group.elements(out, merge, joined)
    is_even = len(set(cut)) == len(set(joined)) == 1  # alike on all ranks
    tp_group: Any = ranks.get_tp_process_group()
    if group.moves_columns(x):
        x = x.contiguous()
        counts = (None, None) if is_even else (goes, comes)
        rows = group.rows_before(x, split), group.rows_before(out, merge)
        call.run(lambda is_async: tp_group.exchange_columns(out, x, counts, rows, is_async))
        return out
    # Pieces travel one behind the other, as they lie along axis 0 already.
    row = x if split == 0 else torch.cat([piece.reshape(-1) for piece in x.split(cut, split)])
    row, came = row.reshape(-1), out.view(-1)
    splits = ([], []) if is_even else (comes, goes)
    call.run(lambda is_async: dist.all_to_all_single(came, row, *splits, tp_group, is_async))
    if merge == 0:
        return out
    before, behind = shape[:merge], shape[merge + 1 :]
    parts = zip(came.split(comes), joined, strict=True)
    return torch.cat([part.view(*before, n, *behind) for part, n in parts], merge)


class _BackwardAllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple:
        keep_shape(ctx, x)
        ctx.call = group.begin_call()
        return x.view_as(x), new_token()

    @staticmethod
    @refused
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:  # type: ignore[override]
        return _sum(defined(ctx, gradient), ctx.call.backward())


class _ForwardAllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.call = group.begin_call()
        return _sum(x, ctx.call)

    @staticmethod
    @refused
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.view_as(gradient)


class _GatherAlike(Function):
    """Joins slices for the same use on all tp_ranks: the gradient is the same on all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, lengths: Lengths) -> Tensor:
        ctx.axis, ctx.lengths, ctx.call = axis, lengths, group.begin_call()
        return all_gather_slices(x, lengths, ctx.call, axis=axis)

    @staticmethod
    @refused
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        first = sum(ctx.lengths[: group.rank()])
        return gradient.narrow(ctx.axis, first, ctx.lengths[group.rank()]), None, None


def _sum(x: Tensor, call: Call) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    if out.numel() and not group.is_traced():
        tp_group = ranks.get_tp_process_group()
        call.run(lambda is_async: dist.all_reduce(out, group=tp_group, async_op=is_async))
    return out


# --------------------------------------------------------------------- the users' functions


def gather(x: Tensor, axis: int, lengths: Lengths, signature: int = 0) -> Tensor:
    """``fused_allgather_for_tp`` of known lengths along the axis, by tp_rank.

    Args:
        signature: of assumed sizes (`smp.tensor_parallel.rows.assumed_sizes`); 0: none are.

    Raises:
        assumed_sizes.Unlike: they are others.
    """
    return linked(_Gather, x, axis, lengths, signature) if group.size() > 1 else x


def gather_all(x: Tensor, axis: int) -> tuple[Tensor, Lengths]:
    """``fused_allgather_for_tp``, and every tp_rank's length along the axis."""
    if group.size() == 1:
        return x, [x.size(axis)]
    mine = _of_entering(x, axis)
    # Indices never require grad, even after numbers of that length did.
    kind = "lengths", x.is_floating_point() or x.is_complex()
    if assumed_sizes.is_possible(x):
        everyones = assumed_sizes.everyones(kind, mine)
        x_now, lengths = _entered(x, everyones)
        with contextlib.suppress(assumed_sizes.Unlike):
            return gather(x_now, axis, lengths, assumed_sizes.signature(everyones)), lengths
    known = group.gather_numbers([*mine])
    assumed_sizes.remember(kind, mine, tuple((length, requires) for length, requires in known))
    x, lengths = _entered(x, known)
    return gather(x, axis, lengths), lengths


def _entered(x: Tensor, everyones: Sequence[Sequence[int]]) -> tuple[Tensor, Lengths]:
    required = any(requires for _, requires in everyones)
    return requiring(x, required), [length for length, _ in everyones]


def reduce_scatter(x: Tensor, axis: int, lengths: Lengths) -> Tensor:
    """``reduce_scatter_for_tp`` into known lengths along the axis, by tp_rank."""
    return linked(_ReduceScatter, x, axis, lengths) if group.size() > 1 else x


def own_part(x: Tensor, axis: int, lengths: Lengths) -> Tensor:
    """This rank's slice along the axis of a tensor alike on all tp_ranks.

    Backward joins the slices' gradients: later values are each rank's own.
    """
    return linked(_OwnPart, x, axis, lengths) if group.size() > 1 else x


def scatter_and_merge(
    x: Tensor, split: int, merge: int, cut: Lengths, joined: Lengths
) -> Tensor:
    """``scatter_and_merge_for_tp`` into and out of known lengths, by tp_rank."""
    if group.size() == 1:
        return x
    return linked(_ScatterAndMerge, x, split % x.dim(), merge % x.dim(), cut, joined)


def gather_alike(x: Tensor, axis: int, lengths: Lengths) -> Tensor:
    """Slices joined along the axis, for the same use by ranks with the same samples."""
    return _GatherAlike.apply(x, axis % x.dim(), lengths) if group.size() > 1 else x


def fused_allgather_for_tp(tensor: Tensor, dim: int) -> Tensor:
    """All tp_ranks' tensors, joined along an axis in their order.

    Backward sums the ranks' gradients and gives each its slice; integers have none.

    Args:
        tensor: alike on all tp_ranks but for the length of ``dim``.
        dim: the axis.

    Returns:
        a tensor, with the sum of all lengths of ``dim``.
    """
    return gather_all(tensor, dim % tensor.dim())[0]


def reduce_scatter_for_tp(tensor: Tensor, dim: int) -> Tensor:
    """This rank's slice along an axis of the sum of all tp_ranks' tensors.

    Backward gathers the slices' gradients.

    Args:
        tensor: of one shape on all tp_ranks.
        dim: the axis; cut as ``torch.tensor_split`` does.

    Returns:
        a tensor, with this rank's share for its length of ``dim``.
    """
    dim %= tensor.dim()
    return reduce_scatter(tensor, dim, group.shares(tensor.size(dim)))


def scatter_and_merge_for_tp(tensor: Tensor, split_dim: int, merge_dim: int) -> Tensor:
    """Slice i along ``split_dim`` goes to tp_rank i; slices are joined along ``merge_dim``.

    Backward does the same with the axes swapped.

    Args:
        tensor: alike on all tp_ranks but for the length of ``merge_dim``.
        split_dim: the axis to cut, as ``torch.tensor_split`` does.
        merge_dim: another axis.

    Returns:
        a tensor, with this rank's share for its length of ``split_dim``, and the sum of all
        for ``merge_dim``.

    Raises:
        ValueError: the axes are the same.
    """
    split, merge = split_dim % tensor.dim(), merge_dim % tensor.dim()
    if split == merge:
        raise ValueError(
            f"scatter_and_merge_for_tp: split_dim and merge_dim are the same axis, {split_dim}"
        )
    cut = group.shares(tensor.size(split))
    tensor, lengths = entering(tensor, merge)
    return scatter_and_merge(tensor, split, merge, cut, lengths)


def bwd_allreduce_for_tp(tensor: Tensor) -> Tensor:
    """The tensor; backward sums the tp_ranks' gradients.

    For a value, the same on all tp_ranks, on its way into a split part of a model.

    Args:
        tensor: the same on all tp_ranks.
    """
    return linked(_BackwardAllReduce, tensor) if group.size() > 1 else tensor


def fwd_allreduce_for_tp(tensor: Tensor) -> Tensor:
    """The sum of the tp_ranks' tensors; backward passes the gradient on.

    For the result of such a part: it is the same on all tp_ranks.

    Args:
        tensor: of one shape on all tp_ranks.
    """
    return _ForwardAllReduce.apply(tensor) if group.size() > 1 else tensor


def shard_sequence(tensor: Tensor, dim: int = 1) -> Tensor:
    """This rank's slice along an axis of a tensor alike on all tp_ranks.

    For ranks with the same batch (``prescaled_batch``), at work on positions of their own.
    Backward joins the slices' gradients.

    Args:
        tensor: ``[samples, positions, ...]``, the same on all tp_ranks.
        dim: the axis; cut as ``torch.tensor_split`` does.

    Returns:
        a tensor, with this rank's share for its length of ``dim``.
    """
    dim %= tensor.dim()
    return own_part(tensor, dim, group.shares(tensor.size(dim)))


for _function in (
    entering,
    gather,
    gather_all,
    reduce_scatter,
    own_part,
    scatter_and_merge,
    gather_alike,
    fused_allgather_for_tp,
    reduce_scatter_for_tp,
    scatter_and_merge_for_tp,
    bwd_allreduce_for_tp,
    fwd_allreduce_for_tp,
    shard_sequence,
):
    not_traced("a collective of smp's tensor parallelism")(_function)
