"""The ranks with the slices of one module: this rank's TP_GROUP.

One rank alone traces a model; the other tp_ranks' sizes are then taken to be its own.
"""

import contextlib
import math
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smp import ranks, torch_versions
from smp.collectives.process_group import ProcessGroup
from smp.collectives.torch_process_groups import device_of_numbers
from smp.pytorch.compiled_code import not_traced
from smp.slicing.slices import Slices, share
from smp.state_mod import state
from smp.tensor_parallel.backward import order
from smp.tensor_parallel.rows import assumed_sizes

# The size of a TP_GROUP under planning; None: the job's counts.
_planned: ContextVar[int | None] = ContextVar("smp.tensor_parallel.planned", default=None)


@contextlib.contextmanager
def planned(size: int) -> Iterator[None]:
    """In the block this process is tp_rank 0 of ``size``, without the others."""
    token = _planned.set(size)
    try:
        yield
    finally:
        _planned.reset(token)


def size() -> int:
    """Number of ranks; 1 before ``smp.init``: nothing is split there."""
    if (planned_size := _planned.get()) is not None:
        return planned_size
    return ranks.tp_size() if ranks.state.is_initialized else 1


def rank() -> int:
    """This rank's tp_rank."""
    if _planned.get() is not None:
        return 0
    return ranks.tp_rank() if ranks.state.is_initialized else 0


def same_samples() -> bool:
    """Whether the ranks are fed the same batch (``prescaled_batch``)."""
    return ranks.state.is_initialized and ranks.state.job("smp").cfg.prescaled_batch


def shares(count: int) -> list[int]:
    """The number for each tp_rank of ``count`` things."""
    return share(count, size())


class _InThisThread(threading.local):
    path = "a function of smp.nn.utils"


_called = _InThisThread()


@not_traced("who calls, as smp's collectives say")
def call_of(path: str) -> str:
    """The module at ``path`` makes the collectives of this thread from now on.

    Returns:
        the path before, to be given back at the end of the module's call.

    Raises:
        NotImplementedError: in a transform of ``torch.func``.
    """
    if torch._C._are_functorch_transforms_active() and size() > 1:
        raise NotImplementedError(
            f"smp: module '{path}', which is split over the TP_GROUP, was called within a "
            "transform of torch.func (grad, vmap, jvp, ...), which its collectives do not "
            "know: leave it whole, smp.set_tensor_parallelism(module, False), or take a "
            "gradient by torch.autograd.grad"
        )
    before, _called.path = _called.path, path
    return before


def called_path() -> str:
    """The path of this thread's collectives."""
    return _called.path


def begin_call() -> order.Call:
    """A call of that module, in the count of the order of collectives."""
    return order.Call.of_module(_called.path)


def is_traced() -> bool:
    """Whether this rank traces the model, or plans its split, without the others."""
    if _planned.get() is not None:
        return True
    return state.is_tracing


def gather_numbers(mine: list[int]) -> list[list[int]]:
    """Every tp_rank's numbers; as many on each.

    In host memory, wherever the model is, so that no rank waits for its GPU; NCCL alone has no
    such collective.
    """
    if is_traced():
        return [mine] * size()
    tp_group = ranks.get_tp_process_group()
    own = torch.tensor(mine, dtype=torch.int64, device=device_of_numbers(tp_group))
    out = own.new_empty(size() * len(mine))  # gloo takes no matrix
    begin_call().run(
        lambda is_async: torch_versions.all_gather_single(
            out, own, group=tp_group, async_op=is_async
        )
    )
    return out.view(size(), len(mine)).tolist()


def gather_rows(
    out: Tensor,
    own: Tensor,
    lengths: list[int],
    call: order.Call,
    signature: int = 0,
    axis: int = 0,
) -> None:
    """Fill ``out`` with the tp_ranks' slices along an axis, one rank behind the other.

    Args:
        out, own: contiguous.
        lengths: of the slice of each tp_rank.
        signature: of the sizes behind assumed lengths; 0: they are known.
        axis: 0, if not `moves_columns`.

    Raises:
        assumed_sizes.Unlike: the other tp_ranks assumed other sizes.
    """
    tp_group: Any = ranks.get_tp_process_group()
    is_even = len(set(lengths)) == 1
    if _takes_rows(tp_group, own):
        counts = None if is_even else elements(own, axis, lengths)
        out_rows = rows_before(out, axis) if axis else 0

        def start(is_async: bool) -> dist.Work:
            try:
                return tp_group.gather_rows(out, own, counts, is_async, signature, out_rows)
            except dist.DistBackendError as error:
                assumed_sizes.check(error)
                raise

        call.run(start)
    elif is_even:
        call.run(
            lambda is_async: torch_versions.all_gather_single(out, own, tp_group, is_async)
        )
    elif _is_gloo(tp_group, own):  # gathers equal slices alone
        longest = max(lengths)
        padded = own.new_zeros((longest, *own.shape[1:]))
        padded[: len(own)] = own
        rows = own.new_empty((len(lengths) * longest, *own.shape[1:]))
        call.run(
            lambda is_async: torch_versions.all_gather_single(rows, padded, tp_group, is_async)
        )
        parts = zip(rows.split(longest), lengths, strict=True)
        torch.cat([part[:length] for part, length in parts], out=out)
    else:
        slices = list(out.split(lengths))
        call.run(lambda is_async: dist.all_gather(slices, own, tp_group, is_async))


def reduce_rows(
    out: Tensor, terms: Tensor, lengths: list[int], call: order.Call, axis: int = 0
) -> None:
    """Fill ``out`` with this tp_rank's slice along an axis of the sum of the tp_ranks' terms.

    Args:
        out, terms: contiguous.
        lengths: of the slice of each tp_rank.
        axis: 0, if not `moves_columns`.
    """
    tp_group: Any = ranks.get_tp_process_group()
    is_even = len(set(lengths)) == 1
    if _takes_rows(tp_group, terms):
        counts = None if is_even else elements(terms, axis, lengths)
        in_rows = rows_before(terms, axis) if axis else 0
        call.run(lambda is_async: tp_group.reduce_rows(out, terms, counts, is_async, in_rows))
    elif is_even:
        call.run(
            lambda is_async: torch_versions.reduce_scatter_single(
                out, terms, group=tp_group, async_op=is_async
            )
        )
    elif not terms.is_cpu and _is_gloo(tp_group, terms):  # scatters those of hosts alone
        total = terms.clone()
        call.run(lambda is_async: dist.all_reduce(total, group=tp_group, async_op=is_async))
        out.copy_(total.split(lengths)[rank()])
    else:
        rows = list(terms.split(lengths))
        call.run(
            lambda is_async: dist.reduce_scatter(out, rows, group=tp_group, async_op=is_async)
        )


def refuse_gloo_on_gpus(device: torch.device) -> None:
    """Check the backend for a pipeline, in which a rank works on while a collective runs.

    Raises:
        NotImplementedError: gloo's collectives of CUDA tensors do not tell of their end.
    """
    tp_group: Any = ranks.get_tp_process_group()
    if device.type == "cuda" and tp_group._get_backend(device).name() == "gloo":
        raise NotImplementedError(
            "smp: gloo cannot serve tensor parallelism of a pipeline on GPUs (its collectives "
            "of CUDA tensors have no future, torch.distributed.Work.get_future): set "
            "'ddp_dist_backend' to 'smddp' or 'nccl'"
        )


def meet(device: torch.device) -> None:
    """Make the TP_GROUP's first operations of a device's tensors, before a pipeline's steps.

    The first call of an all-gather, and of any other operation, waits for the other ranks: GPUs
    meet, or NCCL makes a communicator.  Within a step these ranks would wait for word of
    tp_rank 0's call, sent at its return.  Collective over the TP_GROUP.
    """
    tp_group = ranks.get_tp_process_group()
    own = torch.zeros(1, device=device)
    torch_versions.all_gather_single(own.new_empty(size()), own, group=tp_group)
    dist.all_reduce(own, group=tp_group)


def _is_gloo(tp_group: Any, tensor: Tensor) -> bool:
    """Whether gloo serves such tensors: all of host memory but smddp's."""
    return tensor.is_cpu or tp_group._get_backend(tensor.device).name() == "gloo"


def _takes_rows(tp_group: Any, tensor: Tensor) -> bool:
    """Whether rows need no lists of tensors (these are copied), and no checks of torch's."""
    return isinstance(tp_group, ProcessGroup) and tensor.is_cpu


def moves_columns(tensor: Tensor) -> bool:
    """Whether slices along any axis of such tensors travel without copies on the way."""
    tp_group: Any = ranks.get_tp_process_group()
    return _takes_rows(tp_group, tensor) and tp_group.moves_columns


def elements(tensor: Tensor, axis: int, lengths: list[int]) -> list[int]:
    """How many elements slices of these lengths along the axis have."""
    rest = math.prod(tensor.shape[:axis]) * math.prod(tensor.shape[axis + 1 :])
    return [length * rest for length in lengths]


def rows_before(tensor: Tensor, axis: int) -> int:
    """The rows of the matrix with slices along the axis as columns; 1 without elements."""
    return math.prod(tensor.shape[:axis]) or 1


def broadcast(tensor: Tensor) -> None:
    """Give all tp_ranks tp_rank 0's values."""
    if is_traced():
        return
    dist.broadcast(tensor, ranks.get_tp_group()[0], group=ranks.get_tp_process_group())


def own_slice(slices: Slices | None, whole: Tensor) -> Tensor:
    """This tp_rank's slice of tp_rank 0's values, in memory of its own.

    Collective over the TP_GROUP; of a meta tensor its shape alone.

    Args:
        slices: None: all of it.
        whole: stays as it is.
    """
    if size() > 1 and not whole.is_meta:
        whole = whole.clone(memory_format=torch.contiguous_format)
        broadcast(whole)
        if slices is None:
            return whole
    return whole.clone() if slices is None else slices.take(whole, rank())
