"""The models of this rank, in order of creation: alike on all ranks.

They are the script's, free to drop them at any moment; so they are not held here.
"""

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn


class LiveModel(nn.Module):
    """A `smp.DistributedModel`, as rooms below it know it."""

    _smp_module: nn.Module
    _smp_runtime: Any
    _smp_decision: Any
    _smp_counterparts: Any
    _smp_data_parallel: Any
    _smp_runs: Any
    _smp_entries: list[Any]
    _smp_chainable: list[bool]
    _smp_owners: dict[str, int]
    _smp_changing: dict[str, tuple[str, ...]]
    _smp_stateful: list[nn.Module]
    _smp_deferred_loads: list[tuple]
    _smp_half: Any
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


def add(model: LiveModel) -> None:
    """Add the newest one."""
    _models.append(weakref.ref(model))


def forget() -> None:
    """Forget all models: the job has ended."""
    _models.clear()


def made() -> int:
    """The number of models so far in this job."""
    return len(_models)


def living() -> list[LiveModel]:
    """The models still in existence."""
    return [model for model in (ref() for ref in _models) if model is not None]


def home_of(module: nn.Module) -> tuple[str, int] | None:
    """Path and pp_rank of a module in a partitioned model."""
    for model in living():
        if model._smp_decision is not None:
            for path, candidate in model._smp_module.named_modules():
                if candidate is module:
                    return path, model._smp_decision.rank_of[path]
    return None
