"""The faster way of a group's GPUs to gather: their own copies, or NCCL.

Both give the same bytes.  The GPUs, the links between them and the size decide.  So a group
measures both in its first all-gather.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SIZES = (1 << 16, 1 << 20, 1 << 24)  # bytes of a rank
_CALLS = 5  # in a row
_ROUNDS = 3
# NCCL has to take less than this part of the copies' time: its kernels take multiprocessors
# from the model, and copies do not.
_NCCL_AHEAD = 0.9

# Every NCCL has these.
NCCL_DTYPES = {torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64}
NCCL_DTYPES |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}

Gather = Callable[[Tensor, Tensor], object]  # (out, own)


class Times(NamedTuple):
    """Seconds of an all-gather, on the slowest rank."""

    bytes: int  # of each rank
    copies: float
    nccl: float

    @property
    def is_nccl_ahead(self) -> bool:
        return self.nccl < _NCCL_AHEAD * self.copies


def of_size(measured: Sequence[Times], nbytes: int) -> Times:
    """The times of the measured size next to a rank's bytes."""
    return next((times for times in measured if nbytes <= 4 * times.bytes), measured[-1])


def measure(
    size: int,
    device: torch.device,
    copies: Gather,
    nccl: Gather,
    all_of: Callable[[list[float]], list[list[float]]],
) -> tuple[Times, ...]:
    """The times of all sizes; empty: one of the ranks has no memory for that, or no NCCL.

    Collective over the group.  Waits for the other ranks, and for the GPU.

    Args:
        size: of the group.
        device: of this rank, with its current stream.
        copies: an all-gather, ordered by this stream.
        nccl: another.
        all_of: the numbers of all ranks.
    """

    def all_can(attempt: Callable[[], object]) -> bool:
        try:
            attempt()
            can = 1.0
        except Exception:
            can = 0.0
        return all(given == [1.0] for given in all_of([can]))

    room: list[Tensor] = []

    def take_room() -> None:
        for ranks in (1, size):
            room.append(torch.zeros(ranks * SIZES[-1], dtype=torch.uint8, device=device))

    def first_of_nccl() -> None:
        nccl(room[1][: size * SIZES[0]], room[0][: SIZES[0]])
        _wait_for(device)

    if not all_can(take_room) or not all_can(first_of_nccl):
        return ()
    own: list[float] = []
    for nbytes in SIZES:
        out, part = room[1][: size * nbytes], room[0][:nbytes]
        rounds = [[_seconds(way, out, part) for way in (copies, nccl)] for _ in range(_ROUNDS)]
        own += map(min, zip(*rounds, strict=True))
    slowest = [max(each) for each in zip(*all_of(own), strict=True)]
    return tuple(map(Times, SIZES, slowest[::2], slowest[1::2]))


def _seconds(gather: Gather, out: Tensor, own: Tensor) -> float:
    """The time of a call, one of several in a row."""
    begin = time.perf_counter()
    for _ in range(_CALLS):
        gather(out, own)
    _wait_for(own.device)
    return (time.perf_counter() - begin) / _CALLS


def _wait_for(device: torch.device) -> None:
    torch.accelerator.current_stream(device).record_event().synchronize()
