"""The backend ``smddp`` of ``torch.distributed``: a process group over the C core.

Collectives of tensors in host memory are the core's, and all-gathers of CUDA tensors where all
ranks share a host.  Other collectives of CUDA tensors go to a NCCL group inside.  Where NCCL
cannot serve them, as where ranks share a GPU, the core has copies in host memory.  torch calls
the methods by its own names; `opts` are its option objects.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import AllgatherOptions

from smp import _core, torch_versions
from smp.collectives import dense, gather_times, launch, sparse
from smp.collectives.monitored_barrier import Monitor
from smp.collectives.operation import operation_of, show
from smp.collectives.ranks import Ranks
from smp.collectives.shared_gpus import SharedGpus
from smp.collectives.work import AllOf, DeviceWork, Over, OverOnDevice, Received, Work
from smp.job import core_warnings
from smp.pytorch.compiled_code import not_traced

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

MONITOR_TAG = -1  # of words about monitored barriers; a script's own tags are not negative

# The descriptions of groups without one.
_NO_DESCRIPTIONS = ("undefined", "default_pg")

_SUM = _core.reductions["sum"]

# The timeout in torch's options where none was set.
UNSET = dist.AllreduceOptions().timeout

_SYNC, _ASYNC = AllgatherOptions(), AllgatherOptions()  # never changed
_SYNC.asyncOp, _ASYNC.asyncOp = False, True


class ProcessGroup(dist.ProcessGroup):
    """Ranks of a ``torch.distributed`` group.

    Args:
        ranks: the connected processes.
        members: their numbers, in the order of the group.
        rank: of this process in the group.
        store: its keys are this group's alone.
        timeout: of an operation without one of its own.
        name: torch's, unlike any other group's.
        shown: the name in errors and reports, until the group has a description.
        nccl_options: for the group inside.
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
        nccl_options: Any,
        shown: str,
    ):
        super().__init__(rank, len(members))  # type: ignore[call-arg]
        self._rank = rank
        self._ranks = ranks
        self._members = members
        self.global_ranks = [ranks.global_ranks[member] for member in members]
        self._store = store
        self._timeout = timeout
        self._timeout_s = timeout.total_seconds()
        self._limit_s = 0.0  # of one operation; 0: as the group was made
        self._name = name
        self._shown = shown
        self._description = _NO_DESCRIPTIONS[0]
        self._device: torch.device | None = None
        self._nccl: Any = None
        self._nccl_options = nccl_options
        self._gpus = SharedGpus(dist.PrefixStore("gpus", store), rank, self.global_ranks)
        # Whether tensors of devices go through host memory: with one rank, with all (None).
        self._through_host: dict[int | None, bool] = {}
        self._nccl_waits: torch.device | None = None  # to be told of coalesced operations
        self._nccl_coalesces = False
        self._why_nccl: str | None = None  # gathers, too; "": it does not; None: not known
        # The ways of all-gathers between devices; empty: there is one.  None: not measured.
        self._gather_times: tuple[gather_times.Times, ...] | None = None
        self._coalesced: list[dist.Work] | None = None
        self._monitor = Monitor(self._shown, rank, self.global_ranks)
        self._over = Over()
        # In a task of a step: waits for the task's calls, and lets other tasks run.
        self.gives_way: Callable[[dist.Work], None] | None = None
        self.key = 0  # of the next operation without a root, as in smp_call; 0: none
        self._group = ranks.group(members, name, timeout, self._shown)

    # ------------------------------------------------------------------- operations

    @operation_of("all_reduce")
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        return self._allreduce(tensors, opts, timeout)

    @operation_of("all_reduce")
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._allreduce(tensors, opts or dist.AllreduceCoalescedOptions())

    def _allreduce(self, tensors: Any, opts: Any, timeout: Any = None) -> dist.Work:
        if not isinstance(opts, dist.AllreduceOptions):
            opts = _options(dist.AllreduceOptions, opts, timeout)
        tensors = tensors if isinstance(tensors, list) else [tensors]
        if not tensors:
            raise ValueError("smp: all-reduce: an empty list of tensors")
        if tensors[0].is_sparse:
            return self._sparse_allreduce(tensors, opts)
        reduction, factor = _reduction(opts.reduceOp)
        return self._call(ALL_REDUCE, None, tensors, opts, reduction, factor)

    @operation_of("reduce")
    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.ReduceOptions()
        reduction, factor = _reduction(opts.reduceOp)
        return self._call(REDUCE, None, tensors, opts, reduction, factor, opts.rootRank)

    @operation_of("broadcast")
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.BroadcastOptions()
        return self._call(BROADCAST, None, tensors, opts, root=opts.rootRank)

    @operation_of("all_gather", gathers=True)
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
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """output_lists[rank][i] is that rank's input_list[i]."""
        by_input = [list(each) for each in zip(*output_lists, strict=True)]
        return self.allgather(by_input, input_list, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    @operation_of("all_gather_single", gathers=True)
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return self._call(ALL_GATHER, inputs, outputs, opts or AllgatherOptions())

    @operation_of("reduce_scatter")
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
        self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced([outputTensor], [inputTensor], opts)

    @operation_of("reduce_scatter_single")
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        reduction, factor = _reduction(opts.reduceOp)
        return self._call(REDUCE_SCATTER, inputs, outputs, opts, reduction, factor)

    @operation_of("all_gather")
    def gather_rows(
        self,
        output: Tensor,
        own: Tensor,
        counts: list[int] | None,
        is_async: bool,
        assumed: int = 0,
        out_rows: int = 0,
        results: Sequence[Tensor] | None = None,
    ) -> dist.Work:
        """The members' elements in a row; tensors of the host, contiguous.

        Args:
            counts: elements of each member; None: as many of each.
            is_async: whether the work is still under way when this returns.
            out_rows: if the output is a matrix of so many rows, and a member's elements are
                columns of it (`moves_columns`); 0: they are in one piece.
            assumed: if the members may take the counts to be others, this one's assumption, by
                its hash; 0: they are known.
            results: of the work, which may keep small ones for a while; None: the output.

        Raises:
            dist.DistBackendError: of status SMP_ERR_SIZES where all assume counts, but
                not the same.
        """
        opts = _ASYNC if is_async else _SYNC
        return self._call(
            ALL_GATHER,
            [own],
            [output],
            opts,
            counts=(counts, None),
            assumed=assumed,
            results=results,
            rows=(0, out_rows),
        )

    @operation_of("reduce_scatter")
    def reduce_rows(
        self,
        output: Tensor,
        terms: Tensor,
        counts: list[int] | None,
        is_async: bool,
        in_rows: int = 0,
    ) -> dist.Work:
        """This member's elements of the sum; arguments as for `gather_rows`."""
        opts = _ASYNC if is_async else _SYNC
        return self._call(
            REDUCE_SCATTER,
            [terms],
            [output],
            opts,
            _SUM,
            counts=(counts, None),
            rows=(in_rows, 0),
        )

    @operation_of("all_to_all")
    def exchange_columns(
        self,
        output: Tensor,
        own: Tensor,
        counts: tuple[list[int], list[int]] | tuple[None, None],
        rows: tuple[int, int],
        is_async: bool,
    ) -> dist.Work:
        """An all-to-all of columns of matrices (`moves_columns`); as for `gather_rows`.

        Args:
            counts: elements for each member, and from each; None: as many of each.
            rows: of ``own`` and of ``output``.
        """
        opts = _ASYNC if is_async else _SYNC
        return self._call(ALL_TO_ALL, [own], [output], opts, counts=counts, rows=rows)

    @property
    def moves_columns(self) -> bool:
        """Whether operations can be of columns of matrices in host memory."""
        return self._group.is_on_one_host()

    @operation_of("gather")
    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.GatherOptions()
        if self.rank() == opts.rootRank:
            return self._fill_lists(GATHER, outputs[0], inputs[0], opts, root=opts.rootRank)
        return self._call(GATHER, inputs, None, opts, root=opts.rootRank)

    @operation_of("scatter")
    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.ScatterOptions()
        is_root = self.rank() == opts.rootRank
        parts = [dense.joined(inputs[0])] if is_root else None
        return self._call(SCATTER, parts, outputs, opts, root=opts.rootRank)

    @operation_of("all_to_all")
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
        elif own.dim() and own.size(0) % self.size() != 0:
            raise ValueError(
                f"smp: all-to-all: a first axis of {own.size(0)} is not cut evenly among "
                f"{self.size()} ranks; give the sizes of the parts"
            )
        return self._call(ALL_TO_ALL, [own], [output], opts, counts=counts)

    @operation_of("all_to_all")
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

    @not_traced("an operation of smddp")
    def barrier(self, opts: Any = None) -> dist.Work:
        show(self)
        opts = opts or dist.BarrierOptions()
        if opts.device is not None and opts.device.type == "cuda":
            if not self._goes_through_host(opts.device):
                return self.nccl().barrier(opts)
            torch.accelerator.current_stream(opts.device).synchronize()
        return self._call(BARRIER, None, None, opts)

    @operation_of("send", of_two=True)
    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> dist.Work:
        _check_tag(tag)
        for tensor in tensors:
            self._ranks.send(self._group, self._members[to], tag, tensor)
        return self._over

    @operation_of("recv", of_two=True)
    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        _check_tag(tag)
        works = [self._receive(tensor, source, tag) for tensor in tensors]
        return works[0] if len(works) == 1 else AllOf(works)

    @operation_of("recvAnySource")
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        _check_tag(tag)
        (tensor,) = tensors
        return self._receive(tensor, None, tag)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that tells rank 0 of the missing ranks (`monitored_barrier.Monitor`)."""
        show(self)
        timeout = self._timeout if timeout is None else timeout
        self._monitor.barrier(self, timeout, wait_all_ranks)

    def tell(self, rank: int, word: Tensor) -> None:
        """For the monitor."""
        self._ranks.send(self._group, self._members[rank], MONITOR_TAG, word)

    def listen(self, rank: int, word: Tensor) -> Received:
        """For the monitor."""
        return self._receive(word, rank, MONITOR_TAG)

    def _receive(self, tensor: Tensor, source: int | None, tag: int) -> Received:
        """From a member, or from any: None."""
        where = _core.ANY_SOURCE if source is None else self._members[source]
        receipt, filled = self._ranks.receive(self._group, where, tag, tensor)
        reporter = (self._ranks.global_rank, self._ranks.report_s)
        work = Received(receipt, tensor, filled, self._timeout_s, self._members, reporter)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # The names known to older versions of torch.
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
        assumed: int = 0,
        rows: tuple[int, int] = (0, 0),
    ) -> dist.Work:
        """Calls of the core, one for each of the tensors; without inputs: in place.

        Args:
            counts: of the elements from or to each rank; two lists for all-to-all.
            results: the caller's filled tensors, if not the outputs, by ``finish``.
            assumed: see `gather_rows`.
            rows: of inputs and outputs in the form of matrices; 0: they are in one piece.
        """
        key, self.key = self.key, 0
        rest = (reduction, root, factor, *counts, self._limit(opts), 0, assumed, *rows, key)
        waits = not opts.asyncOp and self._coalesced is None
        in_task = waits and self.gives_way is not None and _core.current() is not None
        begin = self._group.run if waits and not in_task else self._group.work_item
        try:
            try:
                item = begin(operation, inputs, outputs, *rest)
            except BufferError:
                if len({t.device.type for t in (*(inputs or ()), *(outputs or ()))}) > 1:
                    raise
                given, in_place = outputs, inputs is None
                outputs = outputs and [dense.in_host_memory(t, in_place) for t in outputs]
                inputs = inputs and [dense.in_host_memory(t) for t in inputs]
                item = begin(operation, inputs, outputs, *rest)
                results = given if results is None else results
                if not _only_reads(operation, root, self._rank):
                    finish = dense.copied_back(outputs or (), given or (), finish)
        except dist.DistBackendError:
            raise
        except BaseException:  # of a signal's handler, perhaps
            self._ranks.attend()
            raise
        if item is None:
            if finish is not None:
                finish()
            return self._over
        work = self._issue(
            item, Work(item, (outputs if results is None else results) or (), finish)
        )
        if in_task:
            self.gives_way(work)  # type: ignore[misc]
        return work

    def _issue(self, item: _core.WorkItem, work: Work) -> Work:
        """Begin an operation that is awaited later."""
        self._ranks.issue(item, work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        if _distributed_c10d._allow_inflight_collective_as_graph_input():
            for tensor in work.result():  # for torch.ops._c10d_functional.wait_tensor
                _distributed_c10d._register_work(tensor, work)
        return work

    def _devices_gather(
        self, tensor: Tensor, outputs: Sequence, inputs: Sequence[Tensor], opts: Any = None
    ) -> bool:
        """Whether the ranks' devices gather among themselves; alike on all ranks.

        The first call of the group settles this, on all ranks together.
        """
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # a graph has no calls of the host
        if self._why_nccl is None:
            self._why_nccl = self._meet_devices(outputs, inputs, opts)
        if self._why_nccl:
            return False
        if self._coalesced is None and self._gather_times is None:
            known, members = self._ranks.gather_times, tuple(self._members)
            if members not in known:
                known[members] = self._measure_gathers(tensor.device)
            self._gather_times = known[members]
        return True

    def _meet_devices(self, outputs: Sequence, inputs: Sequence[Tensor], opts: Any) -> str:
        """Why the devices do not gather; "": they do.  Waits for the other ranks."""
        if not self._group.is_on_one_host():
            return "the ranks are on several hosts"
        meet = self._group.meet_devices
        limit_s, memory = self._limit(opts), self._ranks.gather_bytes
        with self._attended():
            try:
                why = meet(inputs, _tuples(outputs), limit_s, memory)
            except BufferError:
                copies = [_each(dense.dense, out) for out in outputs]
                why = meet([dense.dense(own) for own in inputs], copies, limit_s, memory)
            core_warnings.pass_on()
            return why

    @contextmanager
    def _attended(self) -> Iterator[None]:
        try:
            yield
        except dist.DistBackendError:
            raise
        except BaseException:  # of a signal's handler, perhaps
            self._ranks.attend()
            raise

    def _measure_gathers(self, device: torch.device) -> tuple[gather_times.Times, ...]:
        """The times of both ways, if NCCL is the other one."""
        through_host = self._through_host.get(None)
        if through_host is None:
            through_host = bool(self._why_not_nccl(device, None))
        if self.size() == 1 or through_host:
            return ()

        def by_copies(out: Tensor, own: Tensor) -> None:
            self._group.gather((own,), [out], self._limit_s, True)

        def by_nccl(out: Tensor, own: Tensor) -> None:
            self._gather_by_nccl(device, [out], [own]).wait()

        def all_of(numbers: list[float]) -> list[list[float]]:
            own = torch.tensor(numbers, dtype=torch.float64, device="cpu")
            out = own.new_empty(self.size() * len(numbers))
            self._group.run(ALL_GATHER, [own], [out], 0, 0, 1.0, None, None, self._limit_s)
            return out.view(self.size(), -1).tolist()

        with self._attended():
            return gather_times.measure(self.size(), device, by_copies, by_nccl, all_of)

    def _nccl_gathers_faster(self, outputs: Sequence) -> bool:
        """Whether NCCL serves a call, as the faster way with the dtype; alike on all ranks."""
        times = self._gather_times or ()
        if self._coalesced is not None or not any(each.is_nccl_ahead for each in times):
            return False
        filled = dense.listed(outputs)
        nbytes = sum(tensor.nbytes for tensor in filled) // self.size()
        return (
            gather_times.of_size(times, nbytes).is_nccl_ahead
            and filled[0].dtype in gather_times.NCCL_DTYPES
        )

    def _gather_by_nccl(
        self,
        device: torch.device,
        outputs: Sequence,
        inputs: Sequence[Tensor],
        opts: Any = None,
    ) -> dist.Work:
        """As `_gather_on_device`, by NCCL."""
        nccl, given = self.nccl(), dense.listed(outputs)
        copies = [_each(dense.dense, out) for out in outputs]
        pairs = zip(given, dense.listed(copies), strict=True)
        has_gaps = any(one.data_ptr() != copy.data_ptr() for one, copy in pairs)
        works = []
        filled = copies if has_gaps else outputs
        for out, own in zip(filled, map(dense.dense, inputs), strict=True):
            if isinstance(out, Tensor):
                gather = torch_versions.operation_of(nccl, "all_gather_single_coalesced")
                works.append(gather([out], [own], opts or _SYNC))
            else:
                works.append(nccl.allgather([out], [own], opts or _SYNC))
        work = works[0] if len(works) == 1 else AllOf(works)
        if not has_gaps:
            return work
        work.wait()
        dense.copied_back(dense.listed(copies), given)()
        return OverOnDevice(device, given)

    def _gather_on_device(
        self,
        device: torch.device,
        outputs: Sequence,
        inputs: Sequence[Tensor],
        opts: Any = None,
    ) -> dist.Work:
        """All-gathers between devices, one for each of the inputs.

        Args:
            outputs: for each a tensor, or a list of one for each rank.
        """
        if self._nccl_gathers_faster(outputs):
            return self._gather_by_nccl(device, outputs, inputs, opts)
        waits = not getattr(opts, "asyncOp", False) and self._coalesced is None
        limit_s = self._limit(opts)
        key, self.key = self.key, 0
        try:
            try:
                item = self._group.gather(inputs, _tuples(outputs), limit_s, waits, key)
            except BufferError:
                # Copies back are for this stream, so it waits for them.
                copies = [_each(dense.dense, out) for out in outputs]
                own = [dense.dense(tensor) for tensor in inputs]
                self._group.gather(own, copies, limit_s, True, key)
                dense.copied_back(dense.listed(copies), dense.listed(outputs))()
                return OverOnDevice(device, dense.listed(outputs))
        except dist.DistBackendError:
            raise
        except BaseException:  # of a signal's handler, perhaps
            self._ranks.attend()
            raise
        if item is None:
            return self._over
        return self._issue(item, DeviceWork(item, device, dense.listed(outputs)))

    def _goes_through_host(self, device: torch.device, peer: int | None = None) -> bool:
        """Whether a device's tensors are copied to host memory and back, by the core.

        The answer is the same on all ranks of an operation.  The first call waits for the
        others.

        Args:
            peer: the other rank of a send or a receive; None: all ranks call.
        """
        if self._coalesced is not None:
            peer = None  # NCCL makes one operation of a block, over all ranks of the group
        if peer not in self._through_host:
            why = self._why_not_nccl(device, peer)
            self._through_host[peer] = bool(why)
            if why:
                self._ranks.through_host[self._group] = why
        return self._through_host[peer]

    def _why_not_nccl(self, device: torch.device, peer: int | None) -> str:
        if device.type != "cuda":
            return f"NCCL does not serve {device.type} tensors"
        if not dist.is_nccl_available():
            return "this torch has no NCCL"
        if self.size() == 1:
            return ""
        members = range(self.size()) if peer is None else [peer]
        shared = self._gpus.found(device, members, self._timeout)
        return f"ranks {', '.join(map(str, shared))} share a GPU" if shared else ""

    def _by_nccl(self, name: str, args: tuple) -> dist.Work:
        nccl = self.nccl()
        if self._nccl_waits is not None:
            nccl._start_coalescing(self._nccl_waits)
            self._nccl_waits, self._nccl_coalesces = None, True
        return torch_versions.operation_of(nccl, name)(*args)

    def _limit(self, opts: Any) -> float:
        """Seconds for an operation; 0: as the group was made."""
        if opts is None or opts.timeout == UNSET:
            return self._limit_s
        return opts.timeout.total_seconds()

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
        """The sum of sparse tensors, in the order of dense ones.

        The sum is complete on return, also where the caller wants to wait later: the number of
        elements depends on the other ranks.
        """
        if _reduction(opts.reduceOp)[0] != _core.reductions["sum"]:
            raise ValueError("smp: all_reduce of sparse tensors is defined for SUM alone")
        deadline = time.monotonic() + (self._limit(opts) or self._timeout_s)

        def gather(which: int, own: Tensor, out: Tensor, counts: Any = None) -> int:
            left_s = max(deadline - time.monotonic(), 1e-3)
            self._group.run(ALL_GATHER, [own], [out], 0, 0, 1.0, counts, None, left_s, which)
            return self._group.sequence()

        for tensor in tensors:
            with torch.no_grad():
                own = tensor.coalesce().to("cpu")
                total = sparse.summed(own, self.global_ranks, gather, self._shown)
                tensor.copy_(total.to(tensor.device))
        return Over(tensors)

    # ------------------------------------------------------------ torch's questions to a group

    def rank(self) -> int:
        """As in C++, but without its 0.6 us: torch asks before every operation."""
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
        """Errors and reports use this name, if the group has had no operation."""
        self._description = desc
        if desc not in _NO_DESCRIPTIONS and self.issued() == 0:
            self._shown = desc
            self._monitor = Monitor(desc, self._rank, self.global_ranks)
            self._ranks.rename(self._group, desc)

    _set_group_desc = setGroupDesc
    group_desc = property(getGroupDesc)

    def _get_backend(self, device: torch.device) -> Any:
        has_nccl = self._nccl is not None or dist.is_nccl_available()
        if device.type != "cuda" or not has_nccl or self._through_host.get(None):
            return self
        return self.nccl()._get_backend(device)

    @property
    def _device_types(self) -> list[torch.device]:
        if not torch_versions.is_made(self):
            return []
        names = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(name) for name in names]

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

    def issued(self) -> int:
        """The number of operations begun, with those that wait behind others."""
        return self._group.issued()

    def _has_hooks(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._timeout_s = self._limit_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _start_coalescing(self, device: torch.device) -> None:
        if self._nccl_coalesces:  # of a block left by an exception
            self.nccl()._end_coalescing(device).wait()
        self._coalesced, self._nccl_coalesces = [], False
        # NCCL hears of the block at the first operation.
        self._nccl_waits = None if device.type == "cpu" else device

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced, self._nccl_waits = self._coalesced or [], None, None
        if self._nccl_coalesces:
            self._nccl_coalesces = False
            works.append(self.nccl()._end_coalescing(device))
        return works[0] if len(works) == 1 else AllOf(works)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu" and self.size() > 1

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Tensor:
        """A row in reused memory: the pages of fresh memory cost more than a copy.

        FSDP2 gathers into such tensors if asked to
        (``set_allocate_memory_from_process_group_for_comm``).
        """
        if torch.device(device).type != "cpu":
            raise ValueError(f"smp: allocate_tensor() has memory of the host, not of {device}")
        if size == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return self._ranks.comm.allocate(size * dtype.itemsize).view(dtype)

    def nccl(self) -> dist.ProcessGroup:
        """The group for CUDA tensors, made for the first one."""
        if self._nccl is None:
            store = dist.PrefixStore("nccl", self._store)
            options = self._nccl_options
            if options is None:
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
        self._leave()

    def abort(self) -> None:
        """Leave, without a wait for NCCL's running operations."""
        if self._nccl is not None:
            self._nccl.abort()
        self._leave()

    def _leave(self) -> None:
        was_open = self._ranks.is_open
        self._ranks.leave(self._group)
        if self._ranks.of_default and was_open and not self._ranks.is_open:
            launch.take_next_port()


def _each(change: Callable[[Tensor], Tensor], out: Any) -> Any:
    """Change one tensor, or each of several: a tuple."""
    return change(out) if isinstance(out, Tensor) else tuple(map(change, out))


def _tuples(outputs: Sequence) -> list:
    """Lists of tensors as tuples, safe from changes."""
    return [out if isinstance(out, Tensor) else tuple(out) for out in outputs]


def _options(kind: type, opts: Any, timeout: timedelta | None) -> Any:
    """The options from torch's overloads: (opts), (op, timeout) or none."""
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


def _only_reads(operation: int, root: int, rank: int) -> bool:
    """Whether the one tensor of such an operation is not written to on this rank."""
    if operation == BROADCAST:
        return rank == root
    return operation == REDUCE and rank != root


def _check_tag(tag: int) -> None:
    if tag < 0:
        raise ValueError(f"smp: the tag is {tag}, and must not be negative")


def _elements(size: int, tensor: Tensor, splits: list[int]) -> list[int]:
    """The number of the tensor's elements for each rank, or from each."""
    rows = tensor.size(0)
    per_row = tensor.numel() // rows if rows else 0
    return [n * per_row for n in splits or [rows // size] * size]
