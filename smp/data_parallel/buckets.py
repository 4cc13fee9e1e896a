"""Buckets: parameters with their gradients exchanged in one collective.

A bucket answers a communication hook for torch's DistributedDataParallel as
``torch.distributed.GradBucket`` does.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp import torch_versions
from smp.collectives.process_group import ProcessGroup
from smp.collectives.work import AllOf
from smp.data_parallel.group import Holders, gradient_dtype
from smp.sharding.owners import Part, Parts, elements_by_rank, part_here, parts_of
from smp.sharding.shards import may_keep_averages
from smp.slicing.slices import elements_alike

MEGABYTE = 1024 * 1024

_made: WeakSet[Tensor] = WeakSet()  # buffers of this process, of all buckets


def memory_of_buckets() -> list[Tensor]:
    """The buffers on their way, spare ones, and those with gradients as views."""
    return list(_made)


class Memory:
    """The memory of the buckets on their way, used again by later ones."""

    def __init__(self) -> None:
        self._spare: list[Tensor] = []

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """A buffer of at least so many bytes, uint8.

        A new buffer is made only without a spare one: the most buckets on their way at once are
        the number of buffers.
        """
        for place, spare in enumerate(self._spare):
            if spare.device == device and spare.numel() >= nbytes:
                return self._spare.pop(place)
        if self._spare:
            self._spare.pop()
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        _made.add(buffer)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """The bucket's use of the buffer is over."""
        self._spare.append(buffer)


class Bucket:
    """Gradients of one dtype on one device, one behind the other in one buffer.

    A bucket has a buffer from :meth:`fill` to :meth:`empty`, or for good if gradients are views
    of it.

    Args:
        parameters: in the order of their gradients in the buffer.
        dtype: of the gradients, not always the parameters'.
        sparse: whether the gradient is sparse; then the bucket has one parameter, and the
            buffer is a new sparse tensor each time.
        holders: the ranks of the exchange: those of the DP_GROUP, or of the RDP_GROUP for
            parameters with the samples of the whole TP_GROUP.
        as_views: the gradients are views of the buffer.

    Attributes:
        parts: of the buffer, by the owner of the gradients; None: each rank keeps them.
        scatters: each rank gets the sums for its own elements alone (`smp.sharding.shards`).
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        dtype: torch.dtype,
        sparse: bool,
        holders: Holders,
        as_views: bool = False,
    ):
        self.sparse = sparse
        self.holders = holders
        self.named_its_group = False  # to the running hook
        self.is_launched = False
        self._index = 0
        self._is_last = False
        self._parameters = parameters
        self.dtype = dtype
        self._number = {id(p): number for number, p in enumerate(parameters)}
        self._layout = []  # by parameter: shape, strides, offset in elements
        self._size = 0
        for parameter in parameters:
            dense = torch.empty_like(parameter, device="meta")
            self._layout.append((dense.shape, dense.stride(), self._size))
            self._size += dense.numel()
        parts = parts_of(parameters[0])
        self.parts: Parts | None = parts
        if parts is not None and len(parts) == 1:
            self.parts = (Part(parts[0].owner, 0, self._size),)
        self.scatters = (
            may_keep_averages(parameters[0])
            and not (sparse or as_views)
            and len(holders.ranks) == len(holders.owners)
        )
        self._bytes: Tensor | None = None  # the Memory's
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []
        self._stays = as_views and not sparse
        if self._stays:
            self._lie_in(parameters[0].new_empty(self._size, dtype=dtype).detach())

    # ------------------------------------------------- asked by a communication hook

    def index(self) -> int:
        """The number of the bucket in its model, in the order of the exchange."""
        return self._index

    def is_last(self) -> bool:
        """Whether the bucket is the last one of its model."""
        return self._is_last

    def process_group(self) -> dist.ProcessGroup:
        """The ranks of this average; a hook's collectives are theirs."""
        self.named_its_group = True
        return self.holders.group

    def buffer(self) -> Tensor:
        """The gradients, shape ``[elements]``; sparse, of the parameter's shape.

        Raises:
            RuntimeError: the bucket is not on its way, and has no buffer.
        """
        if self._buffer is None:
            raise RuntimeError(
                f"smp: bucket {self._index} has no gradients now: a communication hook uses "
                "a bucket until the future that it returned is done"
            )
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the values of the buffer."""
        if self.sparse:
            self._buffer = tensor
        elif tensor is not self._buffer:
            self.buffer().copy_(tensor)

    def gradients(self) -> list[Tensor]:
        """The gradients by parameter: views of the buffer."""
        return [self.buffer()] if self.sparse else list(self._views)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the order of the gradients."""
        return list(self._parameters)

    # ----------------------------------------------------------------------- its buffer

    def fill(self, gradients: Sequence[Tensor | None], memory: Memory) -> None:
        """Copy gradients in, by parameter; zeros for None."""
        if self.sparse:
            (gradient,) = gradients
            self._buffer = self._no_rows() if gradient is None else _rows_of(gradient)
            return
        if self._buffer is None:
            nbytes = self._size * self.dtype.itemsize
            self._bytes = memory.take(nbytes, self._parameters[0].device)
            self._lie_in(self._bytes[:nbytes].view(self.dtype))
        for view, gradient in zip(self._views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)

    def scatter(self) -> tuple[Any, Tensor]:
        """Begin the sum: its work, and the place of this rank's sums, once that is over."""
        assert self.parts is not None
        buffer, mine = self.buffer(), part_here(self.parts)
        counts = elements_by_rank(self.parts)
        own = buffer.new_empty(0 if mine is None else mine.end - mine.start)
        alike = len(set(counts)) == 1
        if isinstance(self.holders.group, ProcessGroup) and buffer.is_cpu:
            work = self.holders.group.reduce_rows(own, buffer, None if alike else counts, True)
            return work, own
        if alike:
            reduce_scatter = torch_versions.reduce_scatter_single
            return reduce_scatter(own, buffer, group=self.holders.group, async_op=True), own
        works = [
            dist.reduce(
                buffer[start:end],
                self.holders.owners[owner],
                group=self.holders.group,
                async_op=True,
            )
            for owner, start, end in self.parts
        ]
        return AllOf(works), buffer[:0] if mine is None else buffer[mine.start : mine.end]

    def empty(self, memory: Memory) -> None:
        """Give the buffer back."""
        if self._stays:
            return
        self._buffer, self._views = None, []
        if self._bytes is not None:
            memory.give_back(self._bytes)
            self._bytes = None

    def adopt(self, parameter: Tensor) -> None:
        """Move a parameter's ``.grad`` into the buffer, and make it a view of that."""
        if not self._stays or parameter.grad is None:
            return
        view, gradient = self._views[self._number[id(parameter)]], parameter.grad
        alike = (gradient.dtype, gradient.device) == (view.dtype, view.device)
        if gradient is not view and alike:
            with torch.no_grad():
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            parameter.grad = view

    def _lie_in(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._views = [buffer.as_strided(*place) for place in self._layout]

    def _no_rows(self) -> Tensor:
        """The gradient of an unused table."""
        (table,) = self._parameters
        indices = torch.empty((1, 0), dtype=torch.int64, device=table.device)
        values = torch.empty((0, *table.shape[1:]), dtype=self.dtype, device=table.device)
        return torch.sparse_coo_tensor(indices, values, table.shape, is_coalesced=True)


def _rows_of(gradient: Tensor) -> Tensor:
    """A copy of a table's gradient as sparse rows, each once."""
    gradient = gradient.detach()
    if gradient.is_sparse and gradient.sparse_dim() != 1:
        gradient = gradient.to_dense()
    return gradient.to_sparse(1).coalesce().clone()


def sparse_tables(module: nn.Module) -> set[int]:
    """The ids of parameters with sparse gradients."""
    sparse: set[int] = set()
    dense: set[int] = set()
    for owner in module.modules():
        is_table = isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse
        for parameter in owner._parameters.values():
            (sparse if is_table else dense).add(id(parameter))
    return sparse - dense  # of a tied table the sum of gradients is dense


def make_buckets(
    module: nn.Module,
    parameters: Sequence[nn.Parameter],
    cap_mb: float,
    holders_of: Callable[[nn.Parameter], Holders],
    as_views: bool = False,
) -> list[Bucket]:
    """The buckets of a model, last parameters first: backward reaches these first.

    Args:
        module: its tables decide between sparse gradients and dense.
        parameters: in order of definition.
        cap_mb: the most MiB of gradients in a bucket of several; slices count alike on all
            tp_ranks.
        holders_of: the ranks of the exchange of a parameter's gradient.
        as_views: gradients are views of the buckets.
    """
    sparse = sparse_tables(module)
    members: list[list[nn.Parameter]] = []
    open_at: dict[Any, tuple[int, int]] = {}  # dtype and device -> place, bytes
    for parameter in reversed(parameters):
        if id(parameter) in sparse:
            members.append([parameter])
            continue
        ranks, parts = tuple(holders_of(parameter).ranks), parts_of(parameter) or ()
        kind: Any = gradient_dtype(parameter), parameter.device, ranks
        # One owner has all gradients of a bucket, or the bucket has one parameter.
        kind += (parts[0].owner if len(parts) == 1 else id(parameter) if parts else None,)
        place, held = open_at.get(kind, (-1, 0))
        nbytes = elements_alike(parameter) * gradient_dtype(parameter).itemsize
        if place < 0 or held + nbytes > cap_mb * MEGABYTE:
            place, held = len(members), 0
            members.append([])
        members[place].append(parameter)
        open_at[kind] = place, held + nbytes
    buckets = [
        Bucket(
            group,
            gradient_dtype(group[0]),
            id(group[0]) in sparse,
            holders_of(group[0]),
            as_views,
        )
        for group in members
    ]
    for number, bucket in enumerate(buckets):
        bucket._index = number
        bucket._is_last = number == len(buckets) - 1
    return buckets
