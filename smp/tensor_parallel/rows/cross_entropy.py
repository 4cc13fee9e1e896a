"""Cross-entropy of a head with its classes split over the TP_GROUP.

Each tp_rank computes the logits of its own classes for all tp_ranks' samples.  Other ranks send
a few numbers for each sample: logits of all classes are nowhere.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from smp.slicing.slices import Slices
from smp.tensor_parallel import group, primitives
from smp.tensor_parallel.rows import kernels
from smp.tensor_parallel.rows.kernels import Statistics


def split_head_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    slices: Slices,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    class_weights: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The losses of this rank's samples.  Collective over the TP_GROUP.

    Args:
        hidden: ``[rows, channels]``; rows may be others, and as many others, on each tp_rank,
            unless the ranks are fed the same batch.
        weight: this rank's classes of the head, ``[own classes, channels]``.
        bias: ``[own classes]``, or None.
        labels: ``[rows]``, integers; ``ignore_index`` where the loss is 0.
        slices: how the classes are cut, in one range a rank.
        ignore_index, label_smoothing: as in ``F.cross_entropy``.
        class_weights: ``[classes]``, or on each rank ``[own classes]``; a constant.

    Returns:
        ``[rows]``, float32, or float64 of such logits; with class weights also each row's own,
        0 where the label is ``ignore_index``.

    Raises:
        IndexError: a label is none of the classes; on every tp_rank.  On a GPU an assertion
            fails there, as in ``F.cross_entropy``.
    """
    if group.same_samples():
        lengths = [hidden.size(0)] * group.size()
        hidden = primitives.bwd_allreduce_for_tp(hidden)
    else:
        hidden, lengths = primitives.gather_all(hidden, 0)
        labels = primitives.gather(labels, 0, lengths)
    logits = F.linear(hidden, weight, bias)
    first_class = slices.ranges[group.rank()][0][0]
    try:
        losses = kernels.split_cross_entropy(
            logits,
            labels,
            first_class,
            slices.size,
            _of_all_ranks,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing if class_weights is None else 0.0,
        )
    except IndexError as error:
        raise IndexError(_wrong_label(labels, slices.size, ignore_index, lengths)) from error
    if class_weights is None:
        return losses if group.same_samples() else primitives.own_part(losses, 0, lengths)
    losses, weights = _weighted(
        losses, logits, labels, slices, ignore_index, label_smoothing, class_weights.detach()
    )
    if group.same_samples():
        return losses, weights
    first = sum(lengths[: group.rank()])
    own_weights = weights.narrow(0, first, lengths[group.rank()])
    return primitives.own_part(losses, 0, lengths), own_weights


def _weighted(
    losses: Tensor,
    logits: Tensor,
    labels: Tensor,
    slices: Slices,
    ignore_index: int,
    label_smoothing: float,
    class_weights: Tensor,
) -> tuple[Tensor, Tensor]:
    """Losses with class weights, from those without either; and each row's weight.

    With weight w_c of class c, label y, and smoothing s over C classes, a loss is (1 - s) w_y
    (lse - x_y) + s / C sum_c w_c (lse - x_c).  Without weights and smoothing it is lse - x_y.
    """
    ((first, last),) = slices.ranges[group.rank()]
    is_own = (labels >= first) & (labels < last)
    column = torch.where(is_own, labels - first, 0)
    counts = labels != ignore_index
    weights = class_weights.to(losses.dtype)
    is_whole = len(weights) == slices.size
    own = weights[first:last] if is_whole else weights
    terms = []  # for sums over the ranks
    if not is_whole:
        of_label = own[column] if last > first else own.new_zeros(len(labels))
        terms += [of_label.where(is_own, 0), own.sum().expand(len(labels))]
    if label_smoothing:
        x = logits.to(losses.dtype)
        target = x.gather(1, column[:, None])[:, 0] if last > first else x.sum(1)
        terms += [target.where(is_own, 0), x @ own]
    sums = list(primitives.fwd_allreduce_for_tp(torch.stack(terms)) if terms else ())
    if is_whole:
        of_rows, total = weights[labels.where(counts, 0)], weights.sum()
    else:
        of_rows, total = sums[0].detach(), sums[1].detach()
    of_rows = of_rows.where(counts, 0)
    out = losses * of_rows * (1 - label_smoothing)
    if label_smoothing:
        target, weighted = sums[-2:]
        smooth = total * (losses + target) - weighted
        out = out + (smooth * (label_smoothing / slices.size)).where(counts, 0)
    return out, of_rows


def _of_all_ranks(own: Statistics) -> Statistics:
    """The statistics of the logits of all classes."""
    if group.size() == 1:
        return own
    numbers = [own.top, own.sum, own.target]
    if own.every is not None:
        numbers.append(own.every)
    everyones = primitives.gather(torch.stack(numbers)[None], 0, [1] * group.size())
    tops, sums, *added = everyones.unbind(1)
    top = tops.amax(0)
    total = (sums * (tops - top).exp()).sum(0)
    return Statistics(top, total, *(numbers.sum(0) for numbers in added))


def _wrong_label(labels: Tensor, classes: int, ignore_index: int, lengths: list[int]) -> str:
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= classes))
    row = int(wrong.long().argmax())
    value, rank = int(labels[row]), group.rank()
    if not group.same_samples():
        rank = 0
        while row >= lengths[rank]:
            row -= lengths[rank]
            rank += 1
    return (
        f"smp: label {row} of tp_rank {rank} is {value}; it must be in [0, {classes}), the "
        f"head's classes, or ignore_index ({ignore_index})"
    )
