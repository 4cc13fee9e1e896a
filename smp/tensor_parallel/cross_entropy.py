"""Cross-entropy of a head whose classes are split over the TP_GROUP.

Each tp_rank computes the logits of its own classes for all tp_ranks' samples.  Of the other
ranks it gets a few numbers for each sample, so that logits of all classes are nowhere.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from smp.tensor_parallel import group, kernels, primitives
from smp.tensor_parallel.kernels import Statistics
from smp.tensor_parallel.slices import Slices


def split_head_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    slices: Slices,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The losses of this rank's samples.  Collective over the TP_GROUP.

    Args:
        hidden: ``[rows, channels]``; rows may be others, and as many others, on each tp_rank,
            unless the ranks are fed the same batch.
        weight: this rank's classes of the head, ``[own classes, channels]``.
        bias: ``[own classes]``, or None.
        labels: ``[rows]``, integers; ``ignore_index`` where the loss is 0.
        slices: how the classes are cut, in one range a rank.
        ignore_index, label_smoothing: as in ``F.cross_entropy``.

    Returns:
        ``[rows]``, float32, or float64 of such logits.

    Raises:
        IndexError: a label is none of the classes; on every tp_rank.
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
            label_smoothing=label_smoothing,
        )
    except IndexError as error:
        raise IndexError(_wrong_label(labels, slices.size, ignore_index, lengths)) from error
    return losses if group.same_samples() else primitives.own_part(losses, 0, lengths)


def _of_all_ranks(own: Statistics) -> Statistics:
    """Of the logits of all classes."""
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
