"""The ranks that share the slices of a module: this rank's TP_GROUP."""

import torch
import torch.distributed as dist
from torch import Tensor

from smp import ranks
from smp.tensor_parallel.slices import share


def size() -> int:
    """Number of ranks; 1 before ``smp.init``: nothing is split there."""
    return ranks.tp_size() if ranks.state.is_initialized else 1


def rank() -> int:
    """This rank's tp_rank."""
    return ranks.tp_rank() if ranks.state.is_initialized else 0


def same_samples() -> bool:
    """Whether the ranks are fed the same batch (``prescaled_batch``)."""
    return ranks.state.is_initialized and ranks.state.job("smp").cfg.prescaled_batch


def shares(count: int) -> list[int]:
    """How many of ``count`` things each tp_rank gets."""
    return share(count, size())


def gather_numbers(mine: list[int], device: torch.device) -> list[list[int]]:
    """Every tp_rank's numbers; as many on each."""
    own = torch.tensor(mine, dtype=torch.int64, device=device)
    out = own.new_empty((size(), len(mine)))
    dist.all_gather_single(out, own, group=ranks.get_tp_process_group())
    return out.tolist()


def broadcast(tensor: Tensor) -> None:
    """Give all tp_ranks tp_rank 0's values."""
    dist.broadcast(tensor, ranks.get_tp_group()[0], group=ranks.get_tp_process_group())
