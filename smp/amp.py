"""``smp.amp.GradScaler``: loss scaling, agreed on by all ranks of a model.

``torch.amp.GradScaler`` does the same for the parameters of a model of several ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from smp.collectives.objects import refuse_if_forked
from smp.modules import live_models
from smp.pytorch import patches
from smp.sharding import owners
from smp.state_mod import state
from smp.tensor_parallel.backward.norms import shared_parameters


class GradScaler(torch.amp.GradScaler):
    """torch's, with one answer to "did a gradient overflow?" for the MP_GROUP.

    A rank sees the gradients of its own modules only.  When one rank found an infinity, all
    ranks of the MP_GROUP skip the step and lower the scale.  So `unscale_` and `step` are
    collective over the MP_GROUP, and over all ranks with sharded optimizer state.

    Args:
        device: ``"cuda"``, ``"cpu"``; None: the machine's accelerator.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if device is None:
            found = torch.accelerator.current_accelerator(check_available=True)
            device = "cpu" if found is None else found.type
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        # A model of smp.delay_param_initialization is traced with tensors without values.
        super()._lazy_init_scale_growth_tracker(
            torch.device(self._device) if dev.type == "meta" else dev
        )

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        # Only the rank of the step function has called scale().
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return _agreed(found, found_inf)


def _agreed(
    found: dict[torch.device, torch.Tensor], found_inf: torch.Tensor
) -> dict[torch.device, torch.Tensor]:
    """The answer of all ranks, for each device of this one with gradients."""
    for tensor in found.values():
        torch.maximum(found_inf, tensor.to(found_inf.device), out=found_inf)
    agree(found_inf)
    # A rank without gradients has an entry too: torch refuses a step without any.
    return {found_inf.device: found_inf, **{d: found_inf.to(d) for d in found}}


def agree_from_now() -> Callable[[], None]:
    """Have torch's scalers agree where they unscale gradients of a model of several ranks.

    Returns:
        undoes it.
    """
    return live_models.change_from_now(patches.scalers, _with_scale, _agreeing)


def _with_scale(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``_check_scale_growth_tracker`` of a scaler whose ``scale()`` was not called here."""

    def _check_scale_growth_tracker(self: Any, funcname: str) -> Any:
        if self._scale is None and shared_parameters():
            # The rank of the step function has called scale().
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return plain(self, funcname)

    return _check_scale_growth_tracker


def _agreeing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``_unscale_grads_`` with one answer of all ranks."""

    def _unscale_grads_(
        self: Any,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        found = plain(self, optimizer, inv_scale, found_inf, allow_fp16)
        if isinstance(self, GradScaler):
            return found
        shared = shared_parameters()
        given = (p for group in optimizer.param_groups for p in group["params"])
        ids = (id(owners.model_parameter(p)) for p in given)
        return _agreed(found, found_inf) if any(one in shared for one in ids) else found

    return _unscale_grads_


def agree(found_inf: torch.Tensor) -> None:
    """Make it the largest of the MP_GROUP's, or with sharded state of all, in place."""
    if state.is_initialized:
        job = state.job("smp.amp.GradScaler")
        kind = owners.group_with_each_element()
        if len(job.groups[kind]) > 1:
            refuse_if_forked("smp.amp.GradScaler", job.boot.rank, job.pid)
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=job.torch_groups.by_kind[kind])
