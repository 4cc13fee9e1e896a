"""Seeds of dropout, drawn by a sample's own rank: see ``kernels.Dropout``."""

import torch
from torch import Tensor

from smp.tensor_parallel import group
from smp.tensor_parallel.rows import kernels
from smp.tensor_parallel.rows.kernels import Dropout


def new_seed() -> int:
    """A seed of dropout, above 0; drawn from torch's generator on the host."""
    return int(torch.randint(1, 2**62, (), device="cpu").item())


def seeds_of(seed: int) -> list[int]:
    """Each source's; ranks with the same samples have tp_rank 0's, if they drop anything."""
    if group.size() == 1 or (group.same_samples() and seed == 0):
        return [seed]
    everyones = [one for (one,) in group.gather_numbers([seed])]
    return everyones[:1] if group.same_samples() else everyones


def dropout_of_stream(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout of whole own samples."""
    return kernels.dropout(x, new_dropout(x, p)) if training and p else x


def new_dropout(x: Tensor, p: float) -> Dropout:
    """One with a new seed; ranks with the same samples drop the same."""
    seed = new_seed()
    return Dropout(p, seeds_of(seed)[0] if group.same_samples() else seed)
