"""What collectives mean, in plain torch on one process.

Every rank computes what all ranks put in (`drawn`), and from that what it has to get.
"""

import torch
from torch import Tensor

WIDENED = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def drawn(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What a rank puts in: small numbers, whose products do not overflow."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_complex:
        return (
            torch.randn(*shape, 2, generator=generator)
            .double()
            .view(torch.complex128)[..., 0]
            .to(dtype)
        )
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    lowest = 0 if dtype == torch.uint8 else -3
    return torch.randint(lowest, 4, shape, generator=generator).to(dtype)


def tree(op, terms: list[Tensor]) -> Tensor:
    """Source: csrc/comm/collective/kernels/reduce.h."""
    if len(terms) == 1:
        return terms[0]
    half = 1
    while half * 2 < len(terms):
        half *= 2
    return op(tree(op, terms[:half]), tree(op, terms[half:]))


def reduced(name: str, terms: list[Tensor]) -> Tensor:
    """What every rank gets from all-reduce; types below float32 are rounded once."""
    dtype = terms[0].dtype
    wide = [term.float() for term in terms] if dtype in WIDENED else terms
    if dtype == torch.bool:
        ops = {"SUM": torch.logical_or, "PRODUCT": torch.logical_and}
    else:
        ops = {"SUM": torch.add, "PRODUCT": torch.mul}
    ops |= {
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    if name == "AVG":
        total = tree(torch.add, wide)
        if dtype.is_floating_point or dtype.is_complex:
            return (total / len(terms)).to(dtype)
        return torch.div(total, len(terms), rounding_mode="trunc").to(dtype)
    return tree(ops[name], wide).to(dtype)
