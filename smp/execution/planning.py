"""Looking at a partition before running anything."""

import copy
import warnings
from typing import Any

import torch
from torch import nn

from smp.checkpointing import activation_checkpointing
from smp.partitioning.partition import make_partition
from smp.partitioning.report import PartitionReport
from smp.partitioning.tracing import trace
from smp.runtime.microbatches import Splitter
from smp.tensor_parallel import group
from smp.tensor_parallel.splits import in_place, marking

_MEMORY_WEIGHT = 0.8  # the default of optimize="memory"


def plan(
    module: nn.Module,
    *args: Any,
    pipeline_parallel_degree: int,
    memory_weight: float = _MEMORY_WEIGHT,
    microbatches: int = 1,
    tensor_parallel_degree: int = 1,
    trace_memory_usage: bool = False,
    **kwargs: Any,
) -> PartitionReport:
    """The partition of ``module``, without ``smp.init`` and in this process alone.

    Args:
        module: the model; on the meta device it takes no memory, whatever its size.
        args, kwargs: of the module's call, a whole batch; real or meta tensors.  Without any
            the model is not run: the order of definition counts then, and activations do not.
        pipeline_parallel_degree: number of partitions.
        memory_weight: the paper's alpha: 1 balances memory, 0 computation.
        microbatches: number of pieces in a step's cut of the batch; the model is run on the
            first one.
        tensor_parallel_degree: number of ranks for the split of marked modules; parameters and
            costs are then those of tp_rank 0, with the largest slices.
        trace_memory_usage: measure autograd's memory for each module's backward; the report
            shows it, and it counts as the module's memory.

    Returns:
        a :class:`smp.partitioning.report.PartitionReport`.

    Raises:
        PartitionError: pins out of range, or at odds with a shared parameter.
        ValueError: a number is out of range, or the batch is refused as in a step.
        RuntimeError: the model is on the meta device and cannot run there.
    """
    if tensor_parallel_degree < 1:
        raise ValueError(
            f"smp: tensor_parallel_degree must be at least 1, got {tensor_parallel_degree}"
        )
    if microbatches < 1:
        raise ValueError(f"smp: microbatches must be at least 1, got {microbatches}")
    traced = None
    if args or kwargs:
        if microbatches > 1:
            splitter = Splitter(module.forward)
            count = splitter.count(microbatches, args, kwargs)
            args, kwargs = splitter.split(count, args, kwargs)[0][0]
        meta = any(p.is_meta for p in module.parameters())
        traced = trace(
            module, lambda: module(*args, **kwargs), meta=meta, memory=trace_memory_usage
        )
    else:
        warnings.warn(
            "smp.plan: no inputs given, so the model is not run: its modules count in "
            "definition order and without activations",
            stacklevel=2,
        )
    outcomes: list[in_place.Outcome] = []
    if tensor_parallel_degree > 1 or marking.is_marked(module):
        module, outcomes = _split(module, tensor_parallel_degree)
    decision = make_partition(
        module, traced, degree=pipeline_parallel_degree, memory_weight=memory_weight
    )
    return PartitionReport(decision, outcomes)


def _split(module: nn.Module, size: int) -> tuple[nn.Module, list[in_place.Outcome]]:
    """A copy of the model as tp_rank 0 would have it, on the meta device."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        twin = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, tensor.requires_grad)
        memo[id(tensor)] = twin
    copied = copy.deepcopy(module, memo)
    with group.planned(size), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "smp: module .* was replaced by")
        return activation_checkpointing.split_in_place(copied)
