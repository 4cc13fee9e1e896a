"""The backend ``smddp`` of ``torch.distributed``: a process group over the C core.

Collectives of tensors in host memory are the core's.  Those of CUDA tensors are handed
to a NCCL group inside.  torch calls the methods under the names that it has for them;
`opts` are its option objects.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from smp import _core
from smp.collectives import dense, profile
from smp.collectives.ranks import Ranks
from smp.collectives.work import AllOf, Over, Received, Work

BARRIER = _core.operations["barrier"]
ALL_REDUCE = _core.operations["all-reduce"]
REDUCE = _core.operations["reduce"]
REDUCE_SCATTER = _core.operations["reduce-scatter"]
ALL_GATHER = _core.operations["all-gather"]
BROADCAST = _core.operations["broadcast"]
GATHER = _core.operations["gather"]
SCATTER = _core.operations["scatter"]
ALL_TO_ALL = _core.operations["all-to-all"]

RedOpType: Any = dist.ReduceOp.RedOpType
_PREMUL_SUM = _core.reductions["premultiplied sum"]
# The core's numbers of the reductions, by torch's.
_REDUCTIONS = {
    int(RedOpType.PREMUL_SUM if number == _PREMUL_SUM else getattr(RedOpType, name.upper())): (
        number
    )
    for name, number in _core.reductions.items()
}

# What torch's options say where nobody set a timeout.
UNSET = dist.AllreduceOptions().timeout


def _first(value: Any) -> Any:
    """The first item of nested lists; None if there is none."""
    while isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return value


def _operation(title: str) -> Callable[[Callable], Callable]:
    """An operation of tensors, which come first; results before inputs.

    NCCL does it if they are CUDA's.  A profile shows it as `title`.
    """

    def decorated(method: Callable) -> Callable:
        @wraps(method)
        def operation(self: "ProcessGroup", tensors: Any, *args: Any, **kwargs: Any) -> Any:
            tensor = _first(tensors)
            if tensor is None and args:
                tensor = _first(args[0])
            if tensor is not None and tensor.is_cuda:
                return getattr(self.nccl(), method.__name__)(tensors, *args, **kwargs)
            if not profile.is_on():
                return method(self, tensors, *args, **kwargs)
            has_inputs = bool(args) and isinstance(_first(args[0]), Tensor)
            shown = args[0] if has_inputs else tensors
            event = profile.Event(f"{self.name()}:{title}", dense.listed(shown))
            work = method(self, tensors, *args, **kwargs)
            work.ends(event)
            return work

        return operation

    return decorated


class ProcessGroup(dist.ProcessGroup):
    """Ranks of a ``torch.distributed`` group.

    Args:
        ranks: the connected processes.
        members: which of them, in the order of the group.
        rank: of this process in the group.
        store: for keys that only this group uses.
        timeout: of an operation, unless it says otherwise.
        name: torch's, unlike that of any other group.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(
        self,
        ranks: Ranks,
        members: list[int],
        rank: int,
        store: dist.Store,
        timeout: timedelta,
        name: str,
    ):
        super().__init__(rank, len(members))  # type: ignore[call-arg]
        self._rank = rank
        self._ranks = ranks
        self._members = members
        self._store = store
        self._timeout = timeout
        self._limit_s = 0.0  # of one operation; 0: as the group was made
        self._name = name
        self._description = "undefined"
        self._device: torch.device | None = None
        self._nccl: Any = None
        self._coalesced: list[Work] | None = None
        self._monitored = 0  # barriers
        self._over = Over()
        self._number = ranks.number(name)
        self._group = ranks.group(members, name, timeout)

    # ------------------------------------------------------------------- operations

    @_operation("all_reduce")
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        return self._allreduce(tensors, opts, timeout)

    @_operation("all_reduce")
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._allreduce(tensors, opts or dist.AllreduceCoalescedOptions())

    def _allreduce(self, tensors: Any, opts: Any, timeout: Any = None) -> dist.Work:
        if not isinstance(opts, dist.AllreduceOptions):
            opts = _options(dist.AllreduceOptions, opts, timeout)
        tensors = tensors if isinstance(tensors, list) else [tensors]
        if tensors[0].is_sparse:
            return self._sparse_allreduce(tensors, opts)
        reduction, factor = _reduction(opts.reduceOp)
        return self._call(ALL_REDUCE, None, tensors, opts, reduction, factor)

    @_operation("reduce")
    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.ReduceOptions()
        reduction, factor = _reduction(opts.reduceOp)
        return self._call(REDUCE, None, tensors, opts, reduction, factor, opts.rootRank)

    @_operation("broadcast")
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.BroadcastOptions()
        return self._call(BROADCAST, None, tensors, opts, root=opts.rootRank)

    @_operation("all_gather")
    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or AllgatherOptions()
        works = [
            self._fill_lists(ALL_GATHER, one, own, opts, counts=(dense.counts(one), None))
            for one, own in zip(outputs, inputs, strict=True)
        ]
        return works[0] if len(works) == 1 else AllOf(works)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """outputs[rank][i] is what that rank has in inputs[i]."""
        by_input = [list(each) for each in zip(*outputs, strict=True)]
        return self.allgather(by_input, inputs, opts)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [own], opts)

    @_operation("all_gather_single")
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return self._call(ALL_GATHER, inputs, outputs, opts or AllgatherOptions())

    @_operation("reduce_scatter")
    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        reduction, factor = _reduction(opts.reduceOp)
        works = [
            self._call(
                REDUCE_SCATTER,
                [dense.joined(terms)],
                [output],
                opts,
                reduction,
                factor,
                counts=(dense.counts(terms), None),
            )
            for output, terms in zip(outputs, inputs, strict=True)
        ]
        return works[0] if len(works) == 1 else AllOf(works)

    def reduce_scatter_single(
        self, output: Tensor, terms: Tensor, opts: Any = None
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [terms], opts)

    @_operation("reduce_scatter_single")
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        reduction, factor = _reduction(opts.reduceOp)
        return self._call(REDUCE_SCATTER, inputs, outputs, opts, reduction, factor)

    @_operation("gather")
    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.GatherOptions()
        if self.rank() == opts.rootRank:
            return self._fill_lists(GATHER, outputs[0], inputs[0], opts, root=opts.rootRank)
        return self._call(GATHER, inputs, None, opts, root=opts.rootRank)

    @_operation("scatter")
    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.ScatterOptions()
        is_root = self.rank() == opts.rootRank
        parts = [dense.joined(inputs[0])] if is_root else None
        return self._call(SCATTER, parts, outputs, opts, root=opts.rootRank)

    @_operation("all_to_all")
    def all_to_all_single(
        self,
        output: Tensor,
        own: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> dist.Work:
        """Splits are along the first axis; none: it is cut evenly."""
        opts = opts or dist.AllToAllOptions()
        counts: list[list[int] | None] = [None, None]
        if input_splits or output_splits:
            counts = [
                _elements(self.size(), own, input_splits),
                _elements(self.size(), output, output_splits),
            ]
        return self._call(ALL_TO_ALL, [own], [output], opts, counts=counts)

    @_operation("all_to_all")
    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        counts = [[t.numel() for t in inputs], [t.numel() for t in outputs]]
        room = dense.room_for(outputs)
        return self._call(
            ALL_TO_ALL,
            [dense.joined(inputs)],
            [room],
            opts or dist.AllToAllOptions(),
            counts=counts,
            results=outputs,
            finish=dense.parted(room, outputs),
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        opts = opts or dist.BarrierOptions()
        if opts.device is not None and opts.device.type == "cuda":
            return self.nccl().barrier(opts)
        return self._call(BARRIER, None, None, opts)

    @_operation("send")
    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> dist.Work:
        for tensor in tensors:
            self._ranks.send(self._number, self._members[to], tag, tensor)
        return self._over

    @_operation("recv")
    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        works = [self._receive(tensor, source, tag) for tensor in tensors]
        return works[0] if len(works) == 1 else AllOf(works)

    @_operation("recvAnySource")
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        return self._receive(tensor, None, tag)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that tells rank 0 who did not come.

        Raises:
            torch.distributed.DistBackendError: on rank 0, naming the first rank that is
                missing, or all with ``wait_all_ranks``; on others that rank 0 did not answer.
        """
        timeout = self._timeout if timeout is None else timeout
        self._monitored += 1
        tag = -self._monitored  # a script's own are not negative
        sign = torch.empty(0)
        if self.rank() != 0:
            self.send([sign], 0, tag)
            try:
                self._receive(sign, 0, tag).wait(timeout)
            except dist.DistBackendError as error:
                raise dist.DistBackendError(
                    f"Rank {self.rank()} successfully reached monitoredBarrier, but received "
                    f"errors while waiting for send/recv from rank 0: {error}"
                ) from error
            return
        missing = self._missing(sign, tag, timeout, wait_all_ranks)
        if missing:
            names = ", ".join(map(str, missing))
            raise dist.DistBackendError(
                f"{'Ranks' if wait_all_ranks else 'Rank'} {names} failed to pass "
                f"monitoredBarrier in {_ms(timeout)} ms"
            )
        for rank in range(1, self.size()):
            self.send([sign], rank, tag)

    def _missing(self, sign: Tensor, tag: int, timeout: timedelta, all_of_them: bool) -> list:
        """The ranks whose sign does not come in time: all, or the first."""
        deadline = time.monotonic() + timeout.total_seconds()
        missing: list[int] = []
        for rank in range(1, self.size()):
            left = deadline - time.monotonic()
            if left <= 0 and not all_of_them:
                raise dist.DistBackendError(
                    f"Rank 0 timed out in monitoredBarrier after {_ms(timeout)} ms; ranks that "
                    f"passed: {', '.join(map(str, range(1, rank))) or 'none'}"
                )
            try:
                self._receive(sign, rank, tag).wait(timedelta(seconds=max(left, 1e-3)))
            except dist.DistBackendError:
                missing.append(rank)
                if not all_of_them:
                    break
        return missing

    def _receive(self, tensor: Tensor, source: int | None, tag: int) -> Received:
        """From a member, or from any: None."""
        where = _core.ANY_SOURCE if source is None else self._members[source]
        receipt, filled = self._ranks.receive(self._number, where, tag, tensor)
        wanted = (self._name, where, tag)
        return Received(receipt, tensor, filled, self._timeout, self._members, wanted)

    # The names that older versions of torch know.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _call(
        self,
        operation: int,
        inputs: Sequence[Tensor] | None,
        outputs: Sequence[Tensor] | None,
        opts: Any,
        reduction: int = 0,
        factor: float = 1.0,
        root: int = 0,
        counts: Any = (None, None),
        results: Sequence[Tensor] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> dist.Work:
        """Calls of the core, one for each of the tensors; without inputs: in place.

        Args:
            counts: of the elements from or to each rank; two lists for all-to-all.
            results: what the caller sees filled, if not the outputs, by ``finish``.
        """
        limit_s = self._limit_s if opts.timeout == UNSET else opts.timeout.total_seconds()
        rest = (reduction, root, factor, *counts, limit_s)
        waits = not opts.asyncOp and self._coalesced is None
        begin = self._group.run if waits else self._group.order
        try:
            try:
                order = begin(operation, inputs, outputs, *rest)
            except BufferError:
                given, outputs = outputs, outputs and [dense.dense(t) for t in outputs]
                inputs = inputs and [dense.dense(t) for t in inputs]
                order = begin(operation, inputs, outputs, *rest)
                results = given if results is None else results
                finish = dense.copied_back(outputs or (), given or (), finish)
        except dist.DistBackendError:
            raise
        except BaseException:  # of a signal's handler, perhaps
            self._ranks.attend()
            raise
        if order is None:
            if finish is not None:
                finish()
            return self._over
        work = Work(order, (outputs if results is None else results) or (), finish)
        self._ranks.issue(order, work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _fill_lists(
        self,
        operation: int,
        outputs: list[Tensor],
        own: Tensor,
        opts: Any,
        root: int = 0,
        counts: Any = (None, None),
    ) -> dist.Work:
        """Each rank's `own` in one of the outputs."""
        room = dense.room_for(outputs)
        finish = dense.parted(room, outputs)
        return self._call(
            operation,
            [own],
            [room],
            opts,
            root=root,
            counts=counts,
            results=outputs,
            finish=finish,
        )

    def _sparse_allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """The sum of sparse tensors, in the order of dense ones; over when this returns."""
        if _reduction(opts.reduceOp)[0] != _core.reductions["sum"]:
            raise ValueError("smp: all_reduce of sparse tensors is defined for SUM alone")
        for tensor in tensors:
            own = tensor.coalesce()
            sizes = torch.empty(self.size(), dtype=torch.int64)
            self._gather(torch.tensor([own._nnz()]), sizes, None)
            terms = zip(
                self._gather_rows(own.indices().T, sizes),
                self._gather_rows(own.values(), sizes),
                strict=True,
            )
            with torch.no_grad():
                tensor.copy_(
                    _tree(
                        [
                            torch.sparse_coo_tensor(indices.T, values, own.shape)
                            for indices, values in terms
                        ]
                    )
                )
        return Over(tensors)

    def _gather_rows(self, rows: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        """Every rank's rows, of which it has as many as `sizes` says."""
        per_row = rows[0:1].numel() if len(rows) else rows.new_empty(1, *rows.shape[1:]).numel()
        out = rows.new_empty(int(sizes.sum()), *rows.shape[1:])
        self._gather(dense.dense(rows), out, (sizes * per_row).tolist())
        return out.split(sizes.tolist())

    def _gather(self, own: Tensor, out: Tensor, counts: list[int] | None) -> None:
        self._group.run(ALL_GATHER, [own], [out], 0, 0, 1.0, counts, None, self._limit_s)

    # --------------------------------------------------------- what torch asks a group

    def rank(self) -> int:
        """As in C++, which takes 0.6 us, and torch asks before every operation."""
        return self._rank

    def name(self) -> str:
        return "smddp"

    getBackendName = name
    _get_backend_name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, desc: str) -> None:
        self._description = desc

    _set_group_desc = setGroupDesc
    group_desc = property(getGroupDesc)

    def _get_backend(self, device: torch.device) -> Any:
        return self.nccl()._get_backend(device) if device.type == "cuda" else self

    @property
    def _device_types(self) -> list[torch.device]:
        has_cuda = torch.cuda.is_available() and dist.is_nccl_available()
        return [torch.device(name) for name in (["cpu", "cuda"] if has_cuda else ["cpu"])]

    @property
    def bound_device_id(self) -> torch.device | None:
        return self._device

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._device = device

    def get_group_store(self) -> dist.Store:
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        pass  # the core counts by itself

    def _get_sequence_number_for_group(self) -> int:
        return self._group.sequence()

    def _has_hooks(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._limit_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.nccl()._start_coalescing(device)
        else:
            self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        if device.type == "cuda":
            return self.nccl()._end_coalescing(device)
        works, self._coalesced = self._coalesced or [], None
        return AllOf(works)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu" and self.size() > 1

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Tensor:
        """A row in memory that is used again: the pages of fresh memory cost more than a copy.

        FSDP2 gathers into such tensors if it is asked to
        (``set_allocate_memory_from_process_group_for_comm``).
        """
        if torch.device(device).type != "cpu":
            raise ValueError(f"smp: allocate_tensor() has memory of the host, not of {device}")
        if size == 0:
            return torch.empty(0, dtype=dtype)
        return self._ranks.comm.allocate(size * dtype.itemsize).view(dtype)

    def nccl(self) -> dist.ProcessGroup:
        """The group that serves CUDA tensors, made when the first comes."""
        if self._nccl is None:
            store = dist.PrefixStore("nccl", self._store)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            backend = dist.ProcessGroupNCCL(store, self.rank(), self.size(), options)
            kind = dist.ProcessGroup.BackendType.NCCL
            group = dist.ProcessGroup(store, self.rank(), self.size())
            group._set_default_backend(kind)
            group._register_backend(torch.device("cuda"), kind, backend)
            group._set_group_name(self._name)  # type: ignore[arg-type]
            self._nccl = group
        return self._nccl

    def shutdown(self) -> None:
        if self._nccl is not None:
            self._nccl.shutdown()
        self._ranks.leave(self._group)

    abort = shutdown


def _options(kind: type, opts: Any, timeout: timedelta | None) -> Any:
    """The options that torch's overloads spell (opts), (op, timeout) or not at all."""
    is_op = isinstance(opts, (dist.ReduceOp, RedOpType))
    if opts is not None and not is_op:
        return opts
    made = kind()
    if is_op:
        made.reduceOp = opts
    if timeout is not None:
        made.timeout = timeout
    return made


def _reduction(op: Any) -> tuple[int, float]:
    """The core's number of a reduction, and the factor of a pre-multiplied sum."""
    number = _REDUCTIONS[int(op.op)]
    return number, float(op.__getstate__()[1]) if number == _PREMUL_SUM else 1.0


def _ms(timeout: timedelta) -> int:
    return int(timeout.total_seconds() * 1000)


def _elements(size: int, tensor: Tensor, splits: list[int]) -> list[int]:
    """How many elements of the tensor each rank gets or gives."""
    rows = tensor.size(0)
    per_row = tensor.numel() // rows if rows else 0
    return [n * per_row for n in splits or [rows // size] * size]


def _tree(terms: list[Tensor]) -> Tensor:
    """The sum along the tree that csrc/comm/collective/reduce.h defines."""
    if len(terms) == 1:
        return terms[0].coalesce()
    half = 1 << (len(terms) - 1).bit_length() - 1
    return (_tree(terms[:half]) + _tree(terms[half:])).coalesce()


_everyone: Ranks | None = None  # those of the default group, if it is one of ours


def create(opts: Any, _: Any = None) -> ProcessGroup:
    """What ``torch.distributed`` calls to make a group; collective over its members."""
    global _everyone
    rank, size, members = opts.group_rank, opts.group_size, opts.global_ranks_in_group
    is_default = not members
    ranks = _everyone
    if is_default or ranks is None or not ranks.is_open:
        ranks, members = Ranks(opts.store, rank, size, opts.timeout), list(range(size))
    if is_default:
        _everyone = ranks
    try:
        return ProcessGroup(ranks, list(members), rank, opts.store, opts.timeout, opts.group_id)
    except BaseException:
        ranks.close_unused()
        raise


def register() -> None:
    """Make ``smddp`` known to ``torch.distributed``."""
    dist.Backend.register_backend("smddp", create, extended_api=True, devices=["cpu", "cuda"])
