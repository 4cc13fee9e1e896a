"""Whether ranks that are said to be fed the same batch (``prescaled_batch``) are.

Each adds up the parts of a sum over channels or classes that the others take for parts of its
own sum, so ranks with other samples train something else without a word.
"""

import torch
from torch import Tensor, nn

from smp import ranks
from smp.tensor_parallel import group
from smp.tensor_parallel.slices import PATH

_COMPARED_CALLS = 2  # of each module; then the ranks' samples are taken to be the same
_CALLS = "_smp_compared_calls"
_WAVES = (0.7548776662, 1.2207440846, 1.8191725134, 2.4142135624)  # radians an element

# Of the norm.  Ranks may round differently; a sample of a batch of 64 moves a sum by 0.1.
_TOLERANCE = 0.02


def check(module: nn.Module, x: object) -> None:
    """Compare what a module gets on such ranks, in its first calls.  Collective then.

    What is compared is the norm and a few weighted sums: of normalised values, sizes alone are
    all alike.

    Raises:
        ValueError: on every tp_rank; they differ.
    """
    calls = module.__dict__.get(_CALLS, 0)
    if (
        group.size() == 1
        or not group.same_samples()
        or calls >= _COMPARED_CALLS
        or ranks.pp_size() > 1  # where calls come in another order on each rank
        or not isinstance(x, Tensor)
        or group.is_traced()
    ):
        return
    module.__dict__[_CALLS] = calls + 1
    everyones = group.gather_numbers([x.numel(), *_bits(_sums(x.detach()))], x.device)
    (count, *first), *others = ((n, *_floats(bits)) for n, *bits in everyones)
    for rank, (their_count, *theirs) in enumerate(others, 1):
        most = _TOLERANCE * max(first[0], theirs[0])
        if their_count != count or any(
            abs(a - b) > most for a, b in zip(first, theirs, strict=True)
        ):
            path = module.__dict__.get(PATH, type(module).__name__)
            raise ValueError(
                f"smp: '{path}' got other samples on tp_rank {rank} than on tp_rank 0, and "
                "prescaled_batch says that the ranks of a TP_GROUP are fed the same batch: "
                "have the sampler use smp.rdp_rank() and smp.rdp_size() (torch's random "
                "numbers are alike, others must be seeded so), or leave prescaled_batch out"
            )


def _sums(x: Tensor) -> Tensor:
    """The norm, and sums with weights between -1 and 1."""
    values = x.reshape(-1).double().nan_to_num()
    at = torch.arange(1, len(values) + 1, dtype=torch.float64, device=x.device)
    return torch.stack([values.norm(), *(values @ (at * wave).cos() for wave in _WAVES)])


def _bits(values: Tensor) -> list[int]:
    return values.view(torch.int64).tolist()


def _floats(bits: list[int]) -> list[float]:
    return torch.tensor(bits, dtype=torch.int64, device="cpu").view(torch.float64).tolist()
