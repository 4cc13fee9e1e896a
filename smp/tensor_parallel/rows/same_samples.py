"""A check of ranks declared to have the same batch (``prescaled_batch``).

Each adds up the parts of a sum over channels or classes, and takes the others' parts for those
of its own sum.  So ranks with other samples would silently train another model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from smp import ranks
from smp.marks import COMPARED_CALLS, PATH
from smp.tensor_parallel import group

# Calls of each module, and steps in a pipeline; then the ranks' samples are taken to be the
# same.
_CALLS_TO_COMPARE = 2
COMPARED_STEPS = 2
_WAVES = (0.7548776662, 1.2207440846, 1.8191725134, 2.4142135624)  # radians an element

# Relative to the norm.  Ranks may round differently; a sample of a batch of 64 moves a sum by
# 0.1.
_TOLERANCE = 0.02


def check(module: nn.Module, x: object) -> None:
    """Compare a module's inputs on such ranks, in its first calls.  Collective then.

    The comparison is of the norm and a few weighted sums: the sizes alone of normalised values
    are all alike.

    Raises:
        ValueError: on every tp_rank; the inputs differ.
    """
    calls = module.__dict__.get(COMPARED_CALLS, 0)
    if (
        group.size() == 1
        or not group.same_samples()
        or calls >= _CALLS_TO_COMPARE
        or ranks.pp_size() > 1  # where the inputs of steps are compared
        or not isinstance(x, Tensor)
        or group.is_traced()
    ):
        return
    module.__dict__[COMPARED_CALLS] = calls + 1
    everyones = group.gather_numbers(_numbers_of(x))
    rank = _other_rank(everyones)
    if rank is not None:
        path = module.__dict__.get(PATH, type(module).__name__)
        raise ValueError(f"smp: '{path}' got {_said_of(rank)}")


def inputs_differ(step: str, inputs: Sequence[Tensor] | None) -> ValueError | None:
    """Compare the inputs of a step on such ranks.  Collective over the TP_GROUP.

    In a pipeline, where modules' calls come in another order on each rank.

    Args:
        step: its function's name.
        inputs: the tensors among its arguments; None: these were refused on this rank, and the
            step fails in any case.

    Returns:
        the error for all ranks: the inputs differ; alike on all tp_ranks.
    """
    tensors = list(filter(_is_compared, inputs or ()))
    before = group.call_of("the inputs of a step")
    try:
        rank = _rank_with_others(None if inputs is None else tensors)
    finally:
        group.call_of(before)
    return None if rank is None else ValueError(f"smp: the step {step} got {_said_of(rank)}")


def _rank_with_others(tensors: list[Tensor] | None) -> int | None:
    """The first tp_rank with other inputs than tp_rank 0; None: none, or some has none."""
    own = -1 if tensors is None else len(tensors)
    counts = [count for (count,) in group.gather_numbers([own])]
    if -1 in counts:
        return None
    rank = next((rank for rank, count in enumerate(counts) if count != counts[0]), None)
    for tensor in tensors or ():
        if rank is None:
            rank = _other_rank(group.gather_numbers(_numbers_of(tensor)))
    return rank


def _is_compared(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_meta and not x.is_complex()


def _said_of(rank: int) -> str:
    return (
        f"other samples on tp_rank {rank} than on tp_rank 0, and prescaled_batch says that the "
        "ranks of a TP_GROUP are fed the same batch: have the sampler use smp.rdp_rank() and "
        "smp.rdp_size() (torch's random numbers are alike, others must be seeded so), or leave "
        "prescaled_batch out"
    )


def _numbers_of(x: Tensor) -> list[int]:
    return [x.numel(), *_bits(_sums(x.detach()))]


def _other_rank(everyones: list[list[int]]) -> int | None:
    """The first tp_rank with a tensor other than tp_rank 0's, by their numbers."""
    (count, *first), *others = ((n, *_floats(bits)) for n, *bits in everyones)
    for rank, (their_count, *theirs) in enumerate(others, 1):
        most = _TOLERANCE * max(first[0], theirs[0])
        if their_count != count or any(
            abs(a - b) > most for a, b in zip(first, theirs, strict=True)
        ):
            return rank
    return None


def _sums(x: Tensor) -> Tensor:
    """The norm, and sums with weights between -1 and 1."""
    values = x.reshape(-1).double().nan_to_num()
    at = torch.arange(1, len(values) + 1, dtype=torch.float64, device=x.device)
    return torch.stack([values.norm(), *(values @ (at * wave).cos() for wave in _WAVES)])


def _bits(values: Tensor) -> list[int]:
    return values.view(torch.int64).tolist()


def _floats(bits: list[int]) -> list[float]:
    return torch.tensor(bits, dtype=torch.int64, device="cpu").view(torch.float64).tolist()
