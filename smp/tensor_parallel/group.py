"""The ranks that share the slices of a module: this rank's TP_GROUP.

While a model is traced, which one rank does alone, the others are taken to have what it has.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor

from smp import ranks
from smp.execution import runtime
from smp.tensor_parallel import order
from smp.tensor_parallel.slices import share

# The size of the TP_GROUP that is only thought of; None: there is the job's.
_planned: ContextVar[int | None] = ContextVar("smp.tensor_parallel.planned", default=None)


@contextlib.contextmanager
def planned(size: int) -> Iterator[None]:
    """In the block this process is tp_rank 0 of so many, and the others are not there."""
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
    """How many of ``count`` things each tp_rank gets."""
    return share(count, size())


class _InThisThread(threading.local):
    path = "a function of smp.nn.utils"


_called = _InThisThread()


def call_of(path: str) -> None:
    """The module at ``path`` makes the collectives of this thread from now on."""
    _called.path = path


def begin_call() -> order.Call:
    """A call of that module, as the order of collectives counts them."""
    return order.Call.of_module(_called.path)


def run(start: Callable[[], dist.Work | None]) -> None:
    """Begin a collective that has no backward, in its turn, and wait until it is over."""
    begin_call().run(start)


def is_traced() -> bool:
    """Whether this rank traces the model, or plans how it is split, without the others."""
    if _planned.get() is not None:
        return True
    return runtime.current is not None and runtime.current.tracing


def gather_numbers(mine: list[int], device: torch.device) -> list[list[int]]:
    """Every tp_rank's numbers; as many on each."""
    if is_traced():
        return [mine] * size()
    own = torch.tensor(mine, dtype=torch.int64, device=device)
    out = own.new_empty((size(), len(mine)))
    tp_group = ranks.get_tp_process_group()
    run(lambda: dist.all_gather_single(out, own, group=tp_group, async_op=True))
    return out.tolist()


def broadcast(tensor: Tensor) -> None:
    """Give all tp_ranks tp_rank 0's values."""
    if is_traced():
        return
    dist.broadcast(tensor, ranks.get_tp_group()[0], group=ranks.get_tp_process_group())
