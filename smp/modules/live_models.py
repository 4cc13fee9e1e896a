"""The models of this rank, in order of creation: alike on all ranks.

They are the script's, free to drop them at any moment; so they are not held here.
"""

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from smp.modules.once_hooks import OnceHooks
from smp.pytorch import patches
from smp.runtime_state import Runtime
from smp.state_mod import state


class Entry(NamedTuple):
    """A target of other ranks' calls: numbered alike on every rank."""

    callable: Any
    module: nn.Module | None
    path: str
    owner: int


# By path of an ``nn.Sequential`` with children on several ranks: (number of an entry,
# children).
Runs = dict[str, list[tuple[int | None, list[nn.Module]]]]


class Partition(Protocol):
    """A `smp.partitioning.partition.Partition`, as rooms below it know it."""

    @property
    def rank_of(self) -> dict[str, int]: ...


class Parts(NamedTuple):
    """A model's partition as applied: alike on all ranks, but for the last field."""

    partition: Partition
    owners: dict[str, int]  # pp_rank of each parameter, by name
    entries: list[Entry]
    chainable: list[bool]  # by entry: its calls may be in a chain
    collective: list[bool]  # by entry: its calls have collectives of the TP_GROUP
    runs: Runs
    changing: dict[str, tuple[str, ...]]  # by path, names of buffers changed by the module
    stateful: list[nn.Module]  # of this rank, with a forward that changes their buffers


class TraceOptions(NamedTuple):
    """The user's choice for the run before the decision on the partition."""

    device: str = "gpu"
    times: bool = False
    memory: bool = False


@dataclass
class ModelRecord:
    """The state of a `smp.DistributedModel` beside its module."""

    rt: Runtime
    trace: TraceOptions
    parts: Parts | None = None  # None: not partitioned yet
    split_paths: tuple[str, ...] = ()  # of modules split by tensor parallelism
    counterparts: Any = None  # between the plain model's parameters and replaced ones
    replicas: Any = None  # the model's DataParallel, with replicas
    live_parameters: Any = None  # the model's LiveParameters, if they are sharded
    has_sync_norm: bool = False
    half: torch.dtype | None = None  # of its tensors; None: each its own
    deferred_loads: list[tuple] = field(default_factory=list)  # until the partition
    post_partition_hooks: OnceHooks = field(default_factory=OnceHooks)
    post_step_hooks: OnceHooks = field(default_factory=OnceHooks)


class LiveModel(nn.Module):
    """A `smp.DistributedModel`, as rooms below it know it."""

    _smp_record: ModelRecord

    if TYPE_CHECKING:

        @property
        def module(self) -> nn.Module: ...
        @property
        def partitioned(self) -> bool: ...
        def gathered_parameters(self) -> AbstractContextManager[None]: ...
        def local_modules(self) -> Iterator[nn.Module]: ...
        def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
        def local_parameters(self) -> Iterator[nn.Parameter]: ...
        def local_buffers(self) -> Iterator[Tensor]: ...
        def local_named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...
        def state_dict(  # type: ignore[override]
            self, gather_to_rank0: bool = False, cast_to_cpu: bool = True
        ) -> OrderedDict[str, Any]: ...
        def local_state_dict(self) -> OrderedDict[str, Any]: ...
        def load_state_dict(self, *args: Any, **options: Any) -> Any: ...  # type: ignore[override]


def record_of(model: LiveModel) -> ModelRecord:
    """The state of a model, for all rooms: the wrapper has no other for them."""
    return model._smp_record


def parts_of(model: LiveModel) -> Parts:
    """The applied partition of a partitioned model."""
    parts = model._smp_record.parts
    assert parts is not None
    return parts


_models: list[weakref.ref[LiveModel]] = []
_new: list[weakref.ref[LiveModel]] = []  # since the last step
_listeners: list[Callable[[LiveModel], None]] = []  # called with each new one


def add(model: LiveModel) -> None:
    """Add the newest one, made on all ranks."""
    _new.append(weakref.ref(model))
    _models.append(_new[-1])
    for listener in _listeners:
        listener(model)


def number_of_newest() -> int:
    """The number of the newest model, among all of the job: alike on all ranks."""
    return len(_models) - 1


def forget() -> None:
    """Forget all models: the job has ended."""
    _models.clear()
    _new.clear()


def collect_replaced() -> bool:
    """Before the first step after a model was made: end the models replaced by it.

    A dropped model may live in a cycle of references until the garbage is collected, on
    each rank at moments of its own.  Here all ranks collect.

    Returns:
        whether models may have ended here.
    """
    collects = bool(_new) and len(_models) > 1
    if collects:
        gc.collect()
    _new.clear()
    return collects


def living() -> list[LiveModel]:
    """The models still in existence."""
    return [model for model in (ref() for ref in _models) if model is not None]


def of_job(caller: str) -> list[LiveModel]:
    """The same, for a function in need of a job.

    Raises:
        RuntimeError: before ``smp.init``; the text names the caller.
    """
    state.job(caller)
    return living()


def partitioned() -> list[LiveModel]:
    """The partitioned ones of these."""
    return [model for model in living() if model.partitioned]


def change_while_any_lives(change: patches.Change, *given: Callable) -> None:
    """Have a change of PyTorch be in force while a model of now lives.

    Args:
        given: functions for the change.
    """
    for model in living():
        change.while_alive(model, *given)


def change_from_now(change: patches.Change, *given: Callable) -> Callable[[], None]:
    """Likewise, of models made from now on.

    Returns:
        undoes it.
    """

    def listener(model: LiveModel) -> None:
        change.while_alive(model, *given)

    def undo() -> None:
        _listeners.remove(listener)
        change.end()

    _listeners.append(listener)
    return undo


def home_of(module: nn.Module) -> tuple[str, int] | None:
    """Path and pp_rank of a module in a partitioned model."""
    for model in partitioned():
        for path, candidate in model.module.named_modules():
            if candidate is module:
                return path, parts_of(model).partition.rank_of[path]
    return None
