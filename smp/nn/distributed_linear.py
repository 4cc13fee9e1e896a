"""``DistributedLinear``: a linear layer by itself, split over the TP_GROUP."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from smp.marks import PATH
from smp.slicing import split_parameters
from smp.slicing.slices import Slices, in_words
from smp.tensor_parallel import group, primitives
from smp.tensor_parallel.rows import cross_entropy, same_samples
from smp.tensor_parallel.rows.linears import cut_weights
from smp.tensor_parallel.splits.distributed_module import DistributedModule, take_class


class DistributedLinear(nn.Linear, DistributedModule):
    """``nn.Linear`` with its weight cut by its inputs, or by its outputs.

    Cut by inputs, each tp_rank gets its channels of all samples and multiplies.  The sum over
    the ranks goes back to the samples' own ranks, and the whole bias is added there (paper,
    Figure 6).  Cut by outputs, the samples are gathered, and each rank's channels come back.

    Args:
        in_features, out_features, bias: of the whole; sizes need not divide.
        device, dtype: of weight and bias.
        by_outputs: the axis of the cut: a large vocabulary is cut so, with its tied embedding.
    """

    by_outputs: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        by_outputs: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._split(by_outputs)
        if type(self) is DistributedLinear:  # a subclass may use its slice
            split_parameters.guard(self, type(self).__name__)

    @classmethod
    def take_over(cls, linear: nn.Linear, by_outputs: bool = False) -> None:
        """Turn an ``nn.Linear`` into one, in place.  Collective over the TP_GROUP.

        Args:
            linear: whole, with its weights; they become this rank's slice.
            by_outputs: the axis of the cut.
        """
        take_class(linear, cls)
        linear._split(by_outputs)  # type: ignore[operator]

    def _split(self, by_outputs: bool) -> None:
        self.by_outputs = by_outputs
        axis, size = (0, self.out_features) if by_outputs else (1, self.in_features)
        self._slices = Slices.even(axis, size, group.size())
        cut_weights(self, self._slices, cut_bias=by_outputs)

    def extra_repr(self) -> str:
        """The whole module's sizes, and this rank's part of the weight."""
        return super().extra_repr() + in_words(self.weight)

    def forward(
        self,
        input: Tensor,
        labels: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        class_weights: Tensor | None = None,
    ) -> Any:
        """The outputs; with labels, each position's loss in their place.

        Collective over the TP_GROUP.  ``smp.nn.vocabulary_parallel_cross_entropy`` calls it
        with labels: as a call of a module, it comes to the rank of the pipeline with the
        weights.

        Args:
            input: ``[samples, ..., in_features]``; samples may differ by tp_rank.
            labels: ``[samples, ...]``, the class of each position; for a weight cut by its
                outputs.
            ignore_index: the label of positions left out.
            label_smoothing: in [0, 1].
            class_weights: ``[classes]``, or ``[own classes]`` on all tp_ranks.

        Returns:
            ``[samples, ..., out_features]``; with labels losses ``[samples, ...]``; with class
            weights as well ``(losses, weights)``, where the weights are those of each
            position's class.

        Raises:
            IndexError: a label is none of the classes; on a GPU an assertion fails.
            ValueError: the input has another number of channels.
        """
        if input.dim() == 0 or input.size(-1) != self.in_features:
            where = self.__dict__.get(PATH, type(self).__name__)
            raise ValueError(
                f"smp: '{where}' got an input of shape {list(input.shape)}: its last axis must "
                f"be in_features={self.in_features}"
            )
        x = input.reshape(-1, input.size(-1))
        same_samples.check(self, x)
        if labels is not None:
            losses = cross_entropy.split_head_losses(
                x,
                self.weight,
                self.bias,
                labels.reshape(-1),
                self._slices,
                ignore_index,
                label_smoothing,
                class_weights,
            )
            if isinstance(losses, tuple):
                return losses[0].view(labels.shape), losses[1].view(labels.shape)
            return losses.view(labels.shape)
        y = self._of_same_samples(x) if group.same_samples() else self._of_own_samples(x)
        return y.view(*input.shape[:-1], self.out_features)

    def _of_own_samples(self, x: Tensor) -> Tensor:
        if self.by_outputs:
            everyones, lengths = primitives.gather_all(x, 0)
            y = F.linear(everyones, self.weight, self.bias)
            outputs = group.shares(self.out_features)
            return primitives.scatter_and_merge(y, 0, -1, lengths, outputs)
        x, lengths = primitives.entering(x, 0)
        x = primitives.scatter_and_merge(x, -1, 0, group.shares(self.in_features), lengths)
        y = primitives.reduce_scatter(F.linear(x, self.weight), 0, lengths)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _of_same_samples(self, x: Tensor) -> Tensor:
        x = primitives.bwd_allreduce_for_tp(x)
        if self.by_outputs:
            y = F.linear(x, self.weight, self.bias)
            return primitives.gather_alike(y, -1, group.shares(self.out_features))
        first = sum(group.shares(self.in_features)[: group.rank()])
        own = x.narrow(-1, first, self.weight.size(1))
        y = primitives.fwd_allreduce_for_tp(F.linear(own, self.weight))
        return y if self.bias is None else y + self.bias.to(y.dtype)
