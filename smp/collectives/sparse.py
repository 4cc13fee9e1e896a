"""Sums of sparse tensors, by all-gathers of their indices and values."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from smp.collectives import dense

# In the same order on all ranks: these have one torch.
_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_HEADER = 4 + 64  # 64: torch's limit of dimensions

_SIZES, _INDICES, _VALUES = 1, 2, 3  # the gathers, by their numbers in errors

# The gather's number, a rank's own rows, room for all ranks', and each rank's number of
# elements where these differ.  Returns the number of the operation.
Gather = Callable[..., int]


def summed(own: Tensor, names: list[int], gather: Gather, group: str) -> Tensor:
    """The sum of the members' tensors, in the order of dense ones.

    Args:
        own: coalesced.
        names: of the members, for errors.
        gather: called as ``gather(which, own, out)`` or ``gather(which, own, out, counts)``.
        group: its name, for errors.

    Raises:
        torch.distributed.DistBackendError: the tensors differ in shape or dtype; on all ranks,
            with two different ones.
    """
    sizes = _sizes(own, names, gather, group)
    indices = _rows(_INDICES, own.indices().T, sizes, gather)
    values = _rows(_VALUES, own.values(), sizes, gather)
    return _tree(
        [
            torch.sparse_coo_tensor(where.T, what, own.shape)
            for where, what in zip(indices, values, strict=True)
        ]
    )


def _sizes(own: Tensor, names: list[int], gather: Gather, group: str) -> Tensor:
    """The number of elements of each rank's tensor; all else is alike."""
    alike = [_DTYPES.index(own.dtype), own.sparse_dim(), own.dim(), *own.shape]
    said = torch.zeros(_HEADER, dtype=torch.int64, device="cpu")
    said[: 1 + len(alike)] = torch.tensor([own._nnz(), *alike], device="cpu")
    said_by_all = said.new_empty(len(names) * _HEADER)
    number = gather(_SIZES, said, said_by_all)
    rows = said_by_all.view(len(names), _HEADER)
    for member, row in enumerate(rows):
        if not row[1:].equal(rows[0, 1:]):
            one, other = (
                f"rank {names[m]} calls sparse all-reduce {number} of {_described(rows[m])}"
                for m in (0, member)
            )
            raise dist.DistBackendError(f"smp: group '{group}': {one}, {other}")
    return rows[:, 0].contiguous()


def _described(row: Tensor) -> str:
    _, dtype, sparse, dims, *shape = row.tolist()
    name = str(_DTYPES[dtype]).removeprefix("torch.")
    return f"a {name} of shape {tuple(shape[:dims])}, {sparse} of its dimensions sparse"


def _rows(which: int, rows: Tensor, sizes: Tensor, gather: Gather) -> tuple[Tensor, ...]:
    """Every rank's rows, as many as its number in `sizes`."""
    per_row = rows[0:1].numel() if len(rows) else rows.new_empty(1, *rows.shape[1:]).numel()
    out = rows.new_empty(int(sizes.sum()), *rows.shape[1:])
    gather(which, dense.dense(rows), out, (sizes * per_row).tolist())
    return out.split(sizes.tolist())


def _tree(terms: list[Tensor]) -> Tensor:
    """The sum along the tree of csrc/comm/collective/kernels/reduce.h."""
    if len(terms) == 1:
        return terms[0].coalesce()
    half = 1 << (len(terms) - 1).bit_length() - 1
    return (_tree(terms[:half]) + _tree(terms[half:])).coalesce()
