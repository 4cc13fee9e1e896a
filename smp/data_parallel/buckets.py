"""Buckets: parameters whose gradients the replicas exchange in one collective.

A bucket has what a communication hook written for torch's DistributedDataParallel asks
of its ``torch.distributed.GradBucket``.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp.data_parallel.group import Holders
from smp.tensor_parallel.slices import slices_of

MEGABYTE = 1024 * 1024


class Bucket:
    """Gradients of one dtype on one device, one behind the other in one buffer.

    Args:
        parameters: in the order in which they lie in the buffer.
        sparse: whether the gradient is sparse; then there is one parameter, and the
            buffer is a new sparse tensor each time.
        holders: the ranks that exchange it: those of the DP_GROUP, or of the RDP_GROUP for
            parameters that see the samples of the whole TP_GROUP.
    """

    def __init__(self, parameters: list[nn.Parameter], sparse: bool, holders: Holders):
        self.sparse = sparse
        self.holders = holders
        self.named_its_group = False  # to the hook that runs
        self.is_launched = False
        self._index = 0
        self._is_last = False
        self._parameters = parameters
        self._layout = []  # by parameter: shape, strides, offset in elements
        first, size = parameters[0], 0
        for parameter in parameters:
            dense = torch.empty_like(parameter, device="meta")
            self._layout.append((dense.shape, dense.stride(), size))
            size += dense.numel()
        self._buffer = first.new_empty(0 if sparse else size).detach()
        self._views = self._view(self._buffer)

    # ------------------------------------------------- what a communication hook asks

    def index(self) -> int:
        """The number of the bucket in its model, in the order of the exchange."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last one of its model."""
        return self._is_last

    def process_group(self) -> dist.ProcessGroup:
        """The ranks that average these gradients; a hook's collectives are theirs."""
        self.named_its_group = True
        return self.holders.group

    def buffer(self) -> Tensor:
        """The gradients, shape ``[elements]``; sparse, of the parameter's shape."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the values of the buffer."""
        if self.sparse:
            self._buffer = tensor
        elif tensor is not self._buffer:
            self._buffer.copy_(tensor)

    def gradients(self) -> list[Tensor]:
        """The gradients by parameter: views of the buffer."""
        return [self._buffer] if self.sparse else list(self._views)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the order of the gradients."""
        return list(self._parameters)

    # --------------------------------------------------------------- to and from .grad

    def fill(self, zeros: bool) -> None:
        """Copy the parameters' gradients in; where there is none, zeros."""
        if self.sparse:
            parameter = self._parameters[0]
            gradient = None if zeros else parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter, layout=torch.sparse_coo)
            self._buffer = gradient.detach().to_sparse(1).coalesce().clone()
            return
        for parameter, view in zip(self._parameters, self._views, strict=True):
            gradient = parameter.grad
            if zeros or gradient is None:
                view.zero_()
            elif gradient is not view:
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)

    def write_back(self, used: Sequence[bool], as_views: bool) -> None:
        """Copy the result into ``.grad`` of the used parameters.

        Args:
            used: by parameter, whether any replica has a gradient for it.
            as_views: have ``.grad`` be part of the buffer instead.
        """
        for parameter, result, wanted in zip(
            self._parameters, self.gradients(), used, strict=True
        ):
            if not wanted:
                continue
            held = parameter.grad
            if self.sparse or as_views:
                parameter.grad = result
            elif held is None or held.is_sparse:
                parameter.grad = torch.empty_like(parameter).copy_(result)
            else:
                held.copy_(result)

    def _view(self, buffer: Tensor) -> list[Tensor]:
        if self.sparse:
            return []
        return [buffer.as_strided(*place) for place in self._layout]


def make_buckets(
    module: nn.Module,
    parameters: Sequence[nn.Parameter],
    cap_mb: float,
    holders_of: Callable[[nn.Parameter], Holders],
) -> list[Bucket]:
    """The buckets of a model, last parameters first: backward reaches these first.

    Args:
        module: tells which parameters get sparse gradients.
        parameters: in order of definition.
        cap_mb: a bucket that holds this many MiB or more takes no further parameter; slices
            count alike on all tp_ranks.
        holders_of: the ranks that exchange a parameter's gradient.
    """
    sparse = {
        id(owner.weight)
        for owner in module.modules()
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse
    }
    members: list[list[nn.Parameter]] = []
    open_at: dict[Any, tuple[int, int]] = {}  # dtype and device -> place, bytes
    for parameter in reversed(parameters):
        if id(parameter) in sparse:
            members.append([parameter])
            continue
        kind = parameter.dtype, parameter.device, tuple(holders_of(parameter).ranks)
        place, held = open_at.get(kind, (-1, 0))
        if place < 0 or held >= cap_mb * MEGABYTE:
            place, held = len(members), 0
            members.append([])
        members[place].append(parameter)
        open_at[kind] = place, held + _bytes_alike(parameter)
    buckets = [Bucket(group, id(group[0]) in sparse, holders_of(group[0])) for group in members]
    for number, bucket in enumerate(buckets):
        bucket._index = number
        bucket._is_last = number == len(buckets) - 1
    return buckets


def _bytes_alike(parameter: nn.Parameter) -> int:
    """A parameter's bytes; of slices the mean, so that buckets are alike on all tp_ranks."""
    slices = slices_of(parameter)
    if slices is None:
        return parameter.numel() * parameter.element_size()
    whole = math.prod(slices.full_shape(parameter.shape))
    return whole * parameter.element_size() // len(slices.ranges)
