"""The models of this rank, in order of creation: alike on all ranks.

They are the script's, free to drop them at any moment; so they are not held here.
"""

import gc
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from smp.state_mod import state


class LiveModel(nn.Module):
    """A `smp.DistributedModel`, as rooms below it know it."""

    _smp_module: nn.Module
    _smp_runtime: Any
    _smp_decision: Any
    _smp_counterparts: Any
    _smp_data_parallel: Any
    _smp_runs: Any
    _smp_entries: list[Any]
    _smp_owners: dict[str, int]
    _smp_changing: dict[str, tuple[str, ...]]
    _smp_stateful: list[nn.Module]
    _smp_deferred_loads: list[tuple]
    _smp_trace_times: bool
    _smp_trace_memory: bool
    _smp_trace_device: Any
    _smp_has_sync_norm: bool

    if TYPE_CHECKING:

        @property
        def partitioned(self) -> bool: ...
        def _smp_has_hooks(self) -> bool: ...
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
        def _smp_apply_partition(self, *args: Any) -> None: ...
        def _smp_run_post_partition_hooks(self) -> None: ...
        def _smp_run_post_step_hooks(self) -> None: ...


_models: list[weakref.ref[LiveModel]] = []
_new: list[weakref.ref[LiveModel]] = []  # since the last step


def add(model: LiveModel) -> None:
    """Add the newest one, made on all ranks."""
    _new.append(weakref.ref(model))
    _models.append(_new[-1])


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


def home_of(module: nn.Module) -> tuple[str, int] | None:
    """Path and pp_rank of a module in a partitioned model."""
    for model in living():
        if model._smp_decision is not None:
            for path, candidate in model._smp_module.named_modules():
                if candidate is module:
                    return path, model._smp_decision.rank_of[path]
    return None
