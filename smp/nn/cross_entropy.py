"""The cross-entropy of a head with many classes, perhaps split over the TP_GROUP."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp.marks import BY_ROWS, PATH
from smp.modules.stand_ins import users_class
from smp.nn.distributed_linear import DistributedLinear
from smp.tensor_parallel import group
from smp.tensor_parallel.rows import autocast

_REDUCTIONS = ("none", "mean", "sum")


class DistributedCrossEntropyLoss(nn.Module):
    """``nn.CrossEntropyLoss`` of a head's logits, never whole on one rank.

    This module has a head marked for tensor parallelism cut by its outputs.  The head stays the
    model's: this module has no parameters::

        self.head = nn.Linear(512, 200_000)
        self.loss = smp.nn.DistributedCrossEntropyLoss(self.head)
        ...
        return self.loss(hidden, labels)  # self.head is not called

    Args:
        head: an ``nn.Linear``; its outputs are the classes' logits.
        ignore_index, reduction, label_smoothing, weight: as in ``nn.CrossEntropyLoss``; the
            weight of each class is a buffer, whole on every rank.

    Raises:
        TypeError: the head is no ``nn.Linear``.
        ValueError: an unknown reduction, or a label smoothing out of range.

    Source: the SageMaker paper, section 3.1.
    """

    head: nn.Module
    weight: Tensor | None

    def __init__(
        self,
        head: nn.Linear,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        weight: Tensor | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(head, nn.Linear):
            raise TypeError(
                "smp.nn.DistributedCrossEntropyLoss: head is a torch.nn.Linear, not a "
                f"{type(head).__name__}"
            )
        _check(reduction, label_smoothing)
        self.__dict__["head"] = head  # no child: its parameters have one name
        head.__dict__[BY_ROWS] = True
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.register_buffer("weight", weight)

    def extra_repr(self) -> str:
        """The options, for ``print(model)``."""
        return f"ignore_index={self.ignore_index}, reduction={self.reduction!r}"

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The loss of the head's logits.  Collective over the TP_GROUP if the head is split.

        Args:
            hidden: the head's input, ``[..., channels]``.
            labels: ``[...]``, the class of each position.

        Returns:
            a scalar, or ``[...]`` with ``reduction="none"``.

        Raises:
            as `vocabulary_parallel_cross_entropy`.
        """
        return vocabulary_parallel_cross_entropy(
            self.head,
            hidden,
            labels,
            self.ignore_index,
            self.reduction,
            self.label_smoothing,
            self.weight,
        )


def vocabulary_parallel_cross_entropy(
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
) -> Tensor:
    """``F.cross_entropy(head(hidden), labels)``, also of a head split by its outputs.

    Each rank gives its own samples and gets their loss.  The loss of a split head has no second
    derivatives.

    Args:
        head: an ``nn.Linear``, or a ``DistributedLinear`` cut by its outputs: one tied to an
            embedding, made with ``by_outputs=True``, marked with
            ``smp.set_tensor_parallelism(head, by_outputs=True)``, or with a
            `DistributedCrossEntropyLoss`.
        hidden: ``[..., channels]``; of a split head, other lengths on each tp_rank.
        labels: ``[...]``, integers: the class of each position.
        ignore_index: the label of positions left out.
        reduction: ``"mean"`` over this rank's other positions, weighted if there are weights;
            ``"sum"`` or ``"none"``.
        label_smoothing: in [0, 1].
        weight: of each class, ``[classes]``; of a split head also ``[own classes]``, then on
            all tp_ranks.

    Returns:
        a scalar, or ``[...]`` with ``reduction="none"``; in the dtype of ``F.cross_entropy``.

    Raises:
        IndexError: a label is none of the classes; on a GPU an assertion fails.
        TypeError: the labels are no integers.
        ValueError: wrong shapes, an unknown reduction, or a head cut by its inputs.
    """
    _check(reduction, label_smoothing)
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"smp.nn.vocabulary_parallel_cross_entropy: labels have shape "
            f"{list(labels.shape)}; of hidden {list(hidden.shape)} it is "
            f"{list(hidden.shape[:-1])}"
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(
            "smp.nn.vocabulary_parallel_cross_entropy: labels are class numbers, not "
            f"{labels.dtype}"
        )
    labels = labels.long()
    # A split head of a user's class makes its logits in a forward of its own.
    is_own = not issubclass(users_class(type(head)), DistributedLinear)
    if is_own or not isinstance(head, DistributedLinear):
        logits = head(hidden)
        losses = F.cross_entropy(
            logits.reshape(-1, logits.size(-1)),
            labels.reshape(-1),
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            weight=weight,
        )
        return losses.view(labels.shape) if reduction == "none" else losses
    if not head.by_outputs:
        path = head.__dict__.get(PATH, "the head")
        raise ValueError(
            f"smp.nn.vocabulary_parallel_cross_entropy: '{path}' is cut by its inputs; for a "
            "split loss make a smp.nn.DistributedCrossEntropyLoss(head) with it, or call "
            "smp.set_tensor_parallelism(head, by_outputs=True), before smp.DistributedModel"
        )
    if weight is None:
        losses = head(hidden, labels, ignore_index, label_smoothing)
        counts: Tensor = labels != ignore_index
    else:
        own = head._slices.local_size(group.rank())
        if weight.dim() != 1 or len(weight) not in (head.out_features, own):
            raise ValueError(
                "smp.nn.vocabulary_parallel_cross_entropy: weight has shape "
                f"{list(weight.shape)}; of this head it is [{head.out_features}], or [{own}], "
                "of this rank's classes"
            )
        losses, counts = head(hidden, labels, ignore_index, label_smoothing, weight)
    out: Any = losses
    if reduction != "none":
        out = losses.sum()
    if reduction == "mean":
        out = out / counts.sum()
    # The dtype of F.cross_entropy: autocast has it in float32.
    return out if autocast.is_on(hidden.device) else out.to(hidden.dtype)


def _check(reduction: str, label_smoothing: float) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"smp.nn: reduction is one of {_REDUCTIONS}, not {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"smp.nn: label_smoothing is in [0, 1], not {label_smoothing}")
