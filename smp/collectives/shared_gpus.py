"""Ranks of a group with their tensors on one GPU: NCCL makes no communicator for these.

A rank puts the place of its first CUDA tensor into the group's store.  The ranks of a
collective read all places, and so choose the same way; the two ends of a send read each
other's.
"""

import warnings
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

_warned = False  # in this process: the other groups of a job are of the same ranks


class SharedGpus:
    """The GPUs of a group's ranks, as shown in the store.

    Args:
        store: its keys are this object's alone.
        rank: of this process in the group.
        global_ranks: of the members, named so in errors and warnings.
    """

    def __init__(self, store: dist.Store, rank: int, global_ranks: list[int]):
        self._store = store
        self._rank = rank
        self._global_ranks = global_ranks
        self._gpus: dict[int, str] = {}  # by member

    def found(
        self, device: torch.device, members: Iterable[int], timeout: timedelta
    ) -> list[int]:
        """The first members on one GPU, this rank among the members; empty: none share one.

        Waits until each of the members has a CUDA tensor in an operation of the group.

        Args:
            device: of this rank's tensor.
            members: by their number in the group.

        Raises:
            torch.distributed.DistBackendError: a member had none within the timeout.
        """
        if self._rank not in self._gpus:
            self._gpus[self._rank] = name_of(device)
            self._store.set(str(self._rank), self._gpus[self._rank])
        ranks_of: dict[str, list[int]] = {}
        for member in sorted({self._rank, *members}):
            ranks_of.setdefault(self._gpu(member, timeout), []).append(member)
        shared = {gpu: ranks for gpu, ranks in ranks_of.items() if len(ranks) > 1}
        for gpu, ranks in shared.items():
            if ranks[0] == self._rank:
                _warn(gpu, [self._global_ranks[member] for member in ranks])
        return next(([self._global_ranks[m] for m in ranks] for ranks in shared.values()), [])

    def _gpu(self, member: int, timeout: timedelta) -> str:
        if member not in self._gpus:
            try:
                self._store.wait([str(member)], timeout)
            except RuntimeError as error:  # each store has its own
                raise dist.DistBackendError(
                    f"smp: rank {self._global_ranks[member]} had no CUDA tensor in an "
                    f"operation of this group within {timeout.total_seconds():g} s ({error}): "
                    "its operation is another one, or of tensors in host memory"
                ) from error
            self._gpus[member] = self._store.get(str(member)).decode()
        return self._gpus[member]


def name_of(device: torch.device) -> str:
    """A GPU's model and number, unlike any other's in the job."""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, GPU-{properties.uuid}"


def visible() -> list[str]:
    """The GPUs usable by this process."""
    return [name_of(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]


def _warn(gpu: str, ranks: list[int]) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    *rest, last = map(str, ranks)
    warnings.warn(
        f"smp: ranks {', '.join(rest)} and {last} share a GPU ({gpu}), which NCCL refuses: "
        "collectives of their CUDA tensors go through host memory.  NVIDIA's MPS "
        "(nvidia-cuda-mps-control -d, before the job) makes ranks that share a GPU faster; "
        "with a GPU for each, NCCL serves them",
        stacklevel=2,
    )
