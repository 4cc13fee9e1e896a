"""``nn.SyncBatchNorm`` in a pipeline: its ranks, and the cases where it cannot work.

Its statistics are those of all ranks with samples of their own at the same place of the model.
It calls collectives by itself: all work of these ranks must be in one order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from smp import ranks
from smp.runtime_state import Runtime

if TYPE_CHECKING:
    from smp.modules.live_models import LiveModel


def prepare(models: Sequence["LiveModel"], rt: Runtime) -> None:
    """Give the models' SyncBatchNorms the group of this rank's stage, before they run.

    Without a group of its own a module is torch's over all ranks of the job, of other stages,
    too.

    Raises:
        RuntimeError: without ``deterministic_server``.
        ValueError: a module's own group has ranks of other stages.
    """
    for path, module in _modules(models):
        if len(ranks.get_dp_group()) > 1 and not rt.in_sequence:
            raise RuntimeError(
                f"smp: module '{path}' ({type(module).__name__}) exchanges statistics with "
                "other data-parallel ranks in its forward, and with pipeline_parallel_degree="
                f"{rt.pp_size} these run microbatches in orders of their own: set "
                "'deterministic_server': True in the configuration, or use nn.BatchNorm*"
            )
        given = module.process_group
        if given is None or given is dist.group.WORLD:
            module.process_group = _group(rt)
        elif not set(dist.get_process_group_ranks(given)) <= set(ranks.get_dp_group()):
            raise ValueError(
                f"smp: module '{path}' ({type(module).__name__}) has the process group of "
                f"ranks {dist.get_process_group_ranks(given)}, of which some run other parts "
                f"of the model: use ranks of this DP_GROUP ({ranks.get_dp_group()}), "
                "or no process_group"
            )


def is_in(model: nn.Module) -> bool:
    """Whether a step of the model exchanges statistics with other data-parallel ranks."""
    norms = (isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    return len(ranks.get_dp_group()) > 1 and any(norms)


@contextmanager
def alone(models: Sequence["LiveModel"]) -> Iterator[None]:
    """Have the models' SyncBatchNorms take the statistics of their inputs, as BatchNorm does.

    They refuse tensors of the CPU and of no device, and a model may be traced on these.
    """
    norms = [m for _, m in _modules(models) if type(m).forward is nn.SyncBatchNorm.forward]
    for module in norms:
        module.forward = MethodType(nn.modules.batchnorm._BatchNorm.forward, module)
    try:
        yield
    finally:
        for module in norms:
            del module.forward


def _modules(models: Sequence["LiveModel"]) -> Iterator[tuple[str, Any]]:
    for one in models:
        for path, module in one.module.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                yield path, module


def _group(rt: Runtime) -> dist.ProcessGroup:
    """The group of the ranks with samples of their own."""
    if rt.cfg.prescaled_batch:
        return ranks.get_rdp_process_group()
    return ranks.get_dp_process_group()
