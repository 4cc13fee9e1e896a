"""The user's pins: on which partition a module is to be."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from torch import nn

from smp.marks import PIN, TOGETHER
from smp.modules import creation, inner_module, live_models


class PartitionError(ValueError):
    """The user's pins cannot be met; the message names module paths and partitions."""


_innermost: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "smp.partition", default=None
)


class _Pin:
    """Where the user wants a module: by ``set_partition`` or by a context."""

    __slots__ = ("by_context", "partition")

    def __init__(self, partition: int, by_context: bool):
        self.partition = partition
        self.by_context = by_context


def _checked(partition: Any) -> int:
    if isinstance(partition, bool) or not isinstance(partition, int):
        raise TypeError(f"smp: a partition is an int, got {partition!r}")
    if partition < 0:
        raise ValueError(f"smp: a partition is 0 or more, got {partition}")
    return partition


def set_partition(module: nn.Module, partition: int) -> None:
    """Pin a module, with all it contains, to a partition.

    A pin on a module inside it wins.  To be called before the first step, after
    ``DistributedModel`` or before.

    Args:
        module: any module of the model; a ``DistributedModel`` stands for the one it wraps.
        partition: a pp_rank, from 0.

    Raises:
        TypeError, ValueError: not a module, or not a partition.
        PartitionError: the partition has been made; or in the first step, when
            ``partition`` is not below ``pipeline_parallel_degree`` or the pin contradicts a
            shared parameter.

    Source: SageMaker Python SDK documentation, ``smp.set_partition``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"smp.set_partition pins a torch.nn.Module, got a {type(module).__name__}"
        )
    partition = _checked(partition)
    module = inner_module.users_module(module)
    home = live_models.home_of(module)
    if home is not None:
        path, owner = home
        raise PartitionError(
            f"smp.set_partition: too late to pin module '{path}' ({type(module).__name__}) to "
            f"partition {partition}: its model was partitioned in its first step, and it is on "
            f"partition {owner}; call it before the first step"
        )
    module.__dict__[PIN] = _Pin(partition, by_context=False)


def keep_together(module: nn.Module) -> None:
    """Keep a module on one partition with all modules in it."""
    module.__dict__[TOGETHER] = True


def hand_on_pin(module: nn.Module, new: nn.Module, path: str) -> None:
    """Put the module in another's place where the other was pinned, with all in it.

    Args:
        path: the module's.

    Raises:
        PartitionError: a module in it is pinned elsewhere.
    """
    pin = module.__dict__.get(PIN)
    for name, inner in module.named_modules(prefix=path):
        own = inner.__dict__.get(PIN)
        if own is not None and (pin is None or own.partition != pin.partition):
            raise PartitionError(
                f"smp: module {name!r} is pinned to partition {own.partition}, but all of "
                f"{path!r} is replaced by one {type(new).__name__}: pin {path!r} instead"
            )
    if pin is not None:
        for inner in new.modules():
            inner.__dict__[PIN] = pin


def inherit_pin(module: nn.Module, new: nn.Module) -> None:
    """Put the new module where the replaced one was pinned, unless it has a pin of its own."""
    if PIN in module.__dict__:
        new.__dict__.setdefault(PIN, module.__dict__[PIN])


def pin_of(module: nn.Module) -> int | None:
    """The partition of the module's own pin."""
    pin = module.__dict__.get(PIN)
    return None if pin is None else pin.partition


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Pin the modules created inside to a partition; the innermost wins.

    Copies and unpickled modules count as created.

    Args:
        index: a pp_rank, from 0.

    Raises:
        TypeError, ValueError: not a partition.
        PartitionError: in the first step, as for :func:`set_partition`.

    Source: SageMaker Python SDK documentation, ``smp.partition``.
    """
    token = _innermost.set(_checked(index))
    try:
        with creation.noticed(_pin_created):
            yield
    finally:
        _innermost.reset(token)


def _pin_created(module: nn.Module) -> None:
    index = _innermost.get()
    if index is not None:
        module.__dict__[PIN] = _Pin(index, by_context=True)
