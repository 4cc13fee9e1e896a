"""Updated values on their way from the owners to the other replicas, in buckets."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from smp import ranks
from smp.collectives import objects
from smp.collectives.objects import refuse_if_forked
from smp.collectives.torch_process_groups import device_of_numbers
from smp.ranks import CommGroup
from smp.sharding.owners import Parts
from smp.state_mod import state

BUCKET_BYTES = 25 << 20
MOST_ON_THEIR_WAY = 2  # buckets
_CALLER = "smp.DistributedOptimizer.step"


class _Bucket(NamedTuple):
    owner: int  # rdp_rank
    pieces: list[Tensor]  # of one dtype and device


def agree(has_failed: bool, here: Sequence[bool]) -> tuple[list[int], list[bool]]:
    """The rdp_ranks with a failure, and what is so on any replica.

    Collective over the RDP_GROUP.

    Args:
        has_failed: whether this rank's update has.
        here: whether it is so on this rank.
    """
    job = state.job(_CALLER)
    refuse_if_forked(_CALLER, job.boot.rank, job.pid)
    group = ranks.get_rdp_process_group()
    failed = [has_failed and rank == ranks.rdp_rank() for rank in range(ranks.rdp_size())]
    flags = torch.tensor([*failed, *here], dtype=torch.int32, device="cpu")
    flags = flags.to(device_of_numbers(group))
    dist.all_reduce(flags, group=group)
    found = flags.bool().tolist()
    return [rank for rank, flag in enumerate(found[: len(failed)]) if flag], found[
        len(failed) :
    ]


def raise_failure(error: Exception | None, failed: Sequence[int]) -> None:
    """Raise on every replica.  Collective over the RDP_GROUP.

    Args:
        error: of this rank's update.
        failed: the rdp_ranks with one.

    Raises:
        Exception: ``error``.
        RuntimeError: another rank has one; the text names the rank, and has its exception.
    """
    own = "" if error is None else f"{type(error).__name__}: {error}"
    texts = objects.gather_bytes(_CALLER, CommGroup.RDP_GROUP, own.encode())
    if error is not None:
        raise error
    members = ranks.get_rdp_group()
    first, *others = (f"rank {members[rank]} (rdp_rank {rank})" for rank in failed)
    also = f", and on {', '.join(others)}" if others else ""
    raise RuntimeError(
        f"smp: optimizer.step() failed on {first}{also}, with {texts[failed[0]].decode()}; its "
        "share of the parameters has no update, or a part of it, and the other shares have "
        "theirs: the replicas have equal values, and may go on or load a checkpoint"
    )


def give(parameters: Iterable[tuple[Tensor, Parts]]) -> None:
    """Give all replicas the owners' values.  Collective over the RDP_GROUP.

    Args:
        parameters: and their parts by owner, alike on all replicas.
    """
    job = state.job(_CALLER)
    refuse_if_forked(_CALLER, job.boot.rank, job.pid)
    group, members = ranks.get_rdp_process_group(), ranks.get_rdp_group()
    under_way: deque[tuple[Any, Tensor, _Bucket]] = deque()
    for bucket in _buckets(parameters):
        if len(under_way) == MOST_ON_THEIR_WAY:
            _arrive(*under_way.popleft())
        row = _row(bucket, ranks.rdp_rank())
        root = members[bucket.owner]
        work = dist.broadcast(row, src=root, group=group, async_op=True)
        under_way.append((work, row, bucket))
    while under_way:
        _arrive(*under_way.popleft())


def _buckets(parameters: Iterable[tuple[Tensor, Parts]]) -> Iterator[_Bucket]:
    """In an order alike on all replicas."""
    filling: dict[tuple, tuple[_Bucket, int]] = {}
    for parameter, parts in parameters:
        value = parameter.detach().as_subclass(Tensor)
        for owner, start, end in parts:
            piece = value if end - start == value.numel() else value.view(-1)[start:end]
            kind = owner, piece.dtype, piece.device
            bucket, held = filling.get(kind, (_Bucket(owner, []), 0))
            if bucket.pieces and held + piece.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, held = _Bucket(owner, []), 0
            bucket.pieces.append(piece)
            filling[kind] = bucket, held + piece.nbytes
    yield from (bucket for bucket, _ in filling.values())


def _row(bucket: _Bucket, mine: int) -> Tensor:
    """The buffer of a broadcast: a single piece itself, or one for all."""
    first, *more = bucket.pieces
    if not more and first.is_contiguous():
        return first
    if bucket.owner == mine:
        return torch.cat([piece.reshape(-1) for piece in bucket.pieces])
    return first.new_empty(sum(piece.numel() for piece in bucket.pieces))


def _arrive(work: Any, row: Tensor, bucket: _Bucket) -> None:
    work.wait()
    if bucket.owner == ranks.rdp_rank() or row is bucket.pieces[0]:
        return
    parts = row.split([piece.numel() for piece in bucket.pieces])
    shaped = [part.view(p.shape) for part, p in zip(parts, bucket.pieces, strict=True)]
    with torch.no_grad():
        torch._foreach_copy_(bucket.pieces, shaped)
