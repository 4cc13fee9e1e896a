"""Primitives of ``smp.nn.utils`` by dtype, against torch's operators in one process."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from smp.nn import utils as blocks
from smp.tensor_parallel import group
from tests.ranks import on_ranks
from tests.reference.whole_job import split_over_all_ranks
from tests.test_tensor_parallel_modules import moving

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32, torch.complex64)
Outputs = Callable[[list[Tensor]], list[Tensor]]  # by rank, of the inputs by rank


def drawn(dtype: torch.dtype, number: int, *shape: int) -> Tensor:
    """The same on all ranks: in halves any numbers, else such that every sum is exact."""
    generator = torch.Generator().manual_seed(number)
    if dtype in HALVES:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    parts = torch.randint(-64, 64, (*shape, 2), generator=generator) / 4
    return torch.view_as_complex(parts) if dtype.is_complex else parts[..., 0].to(dtype)


def wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALVES else x


def check_adjoint(operation: Callable[[Tensor], Tensor], inputs: list[Tensor], of: Outputs):
    """This rank's output, and its gradient, have the bits of sums that are rounded once.

    Args:
        operation: under test.
        inputs: by rank.
        of: the same by torch, computed of inputs in float32 where they are halves.
    """
    rank, dtype = group.rank(), inputs[0].dtype
    mine = inputs[rank].clone().requires_grad_()
    got = operation(mine)
    inputs = [x.clone().requires_grad_() for x in inputs]
    outputs = [out.to(dtype) for out in of([wide(x) for x in inputs])]
    assert got.dtype == dtype and torch.equal(got, outputs[rank])
    seeds = [drawn(dtype, 100 + r, *out.shape) for r, out in enumerate(outputs)]
    want = torch.autograd.grad(outputs, inputs, seeds)[rank]
    got.backward(seeds[rank])
    assert mine.grad.dtype == dtype and torch.equal(mine.grad, want)


def check_primitives(dtype: torch.dtype) -> None:
    size = group.size()
    uneven = [drawn(dtype, r, 3, r + 1, 5) for r in range(size)]
    even = [drawn(dtype, r, 3, 5, 6) for r in range(size)]
    alike = [drawn(dtype, 0, 3, 5, 6)] * size

    def exchanged(x: list[Tensor]) -> list[Tensor]:
        pieces = [one.tensor_split(size, 2) for one in x]
        return [torch.cat([piece[r] for piece in pieces], 1) for r in range(size)]

    check_adjoint(
        lambda x: blocks.fused_allgather_for_tp(x, 1),
        uneven,
        lambda x: [torch.cat(x, 1)] * size,
    )
    check_adjoint(
        lambda x: blocks.reduce_scatter_for_tp(x, 1),
        even,
        lambda x: list(torch.stack(x).sum(0).tensor_split(size, 1)),
    )
    check_adjoint(lambda x: blocks.scatter_and_merge_for_tp(x, 2, 1), uneven, exchanged)
    # All have one input, and so its gradient is of all outputs.
    check_adjoint(
        lambda x: blocks.shard_sequence(x, 1),
        alike,
        lambda x: list((sum(x) - (size - 1) * x[0].detach()).tensor_split(size, 1)),
    )
    x = drawn(dtype, group.rank(), 3, 5).requires_grad_()
    y = blocks.fwd_allreduce_for_tp(blocks.bwd_allreduce_for_tp(x))
    everyones = torch.stack([wide(drawn(dtype, r, 3, 5)) for r in range(size)])
    assert torch.equal(y, everyones.sum(0).to(dtype))
    y.backward(drawn(dtype, 50 + group.rank(), 3, 5))
    seeds = torch.stack([wide(drawn(dtype, 50 + r, 3, 5)) for r in range(size)])
    assert torch.equal(x.grad, seeds.sum(0).to(dtype))


@pytest.mark.parametrize("columns", [True, False], ids=["columns", "copies"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.sample(8)
@on_ranks(2, 4)
def test_each_primitive_is_exact_in_its_dtype(dtype, columns):
    split_over_all_ranks()
    with moving(columns):
        check_primitives(dtype)


@on_ranks(2, 3)
def test_each_primitive_over_gloo():
    """Which gathers slices of one length alone, and adds halves in halves."""
    split_over_all_ranks(ddp_dist_backend="gloo")
    for dtype in (torch.float32, torch.complex64):
        check_primitives(dtype)


@pytest.mark.parametrize("columns", [True, False], ids=["columns", "copies"])
@on_ranks(2, 4)
def test_what_is_true_or_false_travels(columns):
    """Masks do; they have no gradient."""
    split_over_all_ranks()
    size, rank = group.size(), group.rank()
    everyones = [drawn(torch.bool, r, 3, r + 1, 5) for r in range(size)]
    mine = everyones[rank]
    with moving(columns):
        whole = blocks.fused_allgather_for_tp(mine, 1)
        exchanged = blocks.scatter_and_merge_for_tp(mine, 2, 1)
    assert torch.equal(whole, torch.cat(everyones, 1)) and not whole.requires_grad
    pieces = [x.tensor_split(size, 2)[rank] for x in everyones]
    assert torch.equal(exchanged, torch.cat(pieces, 1))
    assert torch.equal(blocks.shard_sequence(whole, 1), whole.tensor_split(size, 1)[rank])
