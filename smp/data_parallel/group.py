"""The replicas of this rank's part of the model: the ranks of its DP_GROUP.

Collectives on gradients are in ``smp.data_parallel.reduction``; those before the first step are
here.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from smp import ranks
from smp.collectives.objects import refuse_if_forked
from smp.collectives.torch_process_groups import device_of_numbers
from smp.pytorch.restore import write
from smp.sharding.owners import parts_of
from smp.sharding.shards import averages_of
from smp.slicing.slices import slices_of


class Layout(NamedTuple):
    """The tensors to be alike on all replicas: name, shape and dtype of each."""

    tensors: tuple[tuple[str, tuple[int, ...], str], ...]

    @staticmethod
    def of(named: Sequence[tuple[str, Tensor]]) -> "Layout":
        return Layout(tuple(_described(name, tensor) for name, tensor in named))

    def signature(self) -> int:
        """56 bits, different where layouts are."""
        return int.from_bytes(hashlib.sha256(self.to_bytes()).digest()[:7], "little")

    def to_bytes(self) -> bytes:
        lines = ["\t".join((n, ",".join(map(str, s)), d)) for n, s, d in self.tensors]
        return "\n".join(lines).encode()

    @staticmethod
    def from_bytes(data: bytes) -> "Layout":
        tensors = []
        for line in data.decode().splitlines():
            name, shape, dtype = line.split("\t")
            tensors.append((name, tuple(int(n) for n in shape.split(",") if n), dtype))
        return Layout(tuple(tensors))

    def first_difference(self, other: "Layout") -> str:
        """The difference of ``other``, as in "'a.weight' [4] float32, not ..."; or ""."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=False):
            if mine != theirs:
                return f"{_in_words(theirs)}, not {_in_words(mine)}"
        if len(self.tensors) == len(other.tensors):
            return ""
        if len(self.tensors) < len(other.tensors):
            return f"{_in_words(other.tensors[len(self.tensors)])}, which is one too many"
        return f"no {_in_words(self.tensors[len(other.tensors)])}"


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of the gradient, present or future, of a parameter."""
    if (averages := averages_of(parameter)) is not None:
        return averages.dtype
    if parameter.grad is not None:
        return parameter.grad.dtype
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _described(name: str, tensor: Tensor) -> tuple[str, tuple[int, ...], str]:
    """Name, shape and dtype; of a slice, the whole's shape and the cut."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if (parts := parts_of(tensor)) is not None:
        dtype += f" of rdp_rank {', '.join(str(part.owner) for part in parts)}"
    if tensor.requires_grad and gradient_dtype(tensor) != tensor.dtype:
        dtype += " with gradients of " + str(gradient_dtype(tensor)).removeprefix("torch.")
    slices = slices_of(tensor)
    if slices is None:
        return name, tuple(tensor.shape), dtype
    blocks = len(slices.ranges[0])
    cut = f"{dtype} cut along axis {slices.axis}" + (f" in {blocks} blocks" * (blocks > 1))
    return name, tuple(slices.full_shape(tensor.shape)), cut


def _in_words(tensor: tuple[str, tuple[int, ...], str]) -> str:
    name, shape, dtype = tensor
    return f"'{name}' {list(shape)} {dtype}"


class ReplicasDiffer(RuntimeError):
    """The replicas have different parameters."""


class Holders(NamedTuple):
    """The ranks averaging the gradients of a parameter."""

    group: dist.ProcessGroup
    ranks: list[int]  # global
    owners: Sequence[int] = ()  # global, by rdp_rank: where the sum of an owner's elements goes

    @property
    def owners_share(self) -> bool:
        """Whether an owner's TP_GROUP has the sum on its tp_rank 0 alone."""
        return len(self.owners) < len(self.ranks)


class Replicas:
    """The ranks of the DP_GROUP, by dp_rank.  All methods are collective over them.

    Attributes:
        of_slices: the ranks of the RDP_GROUP, with the same slices of parameters.
        have_one_rank: each replica is one rank, without any other kind of parallelism.
    """

    def __init__(self) -> None:
        job = ranks.state.job("smp.DistributedModel")
        refuse_if_forked("smp.DistributedModel", job.boot.rank, job.pid)
        self.group = ranks.get_dp_process_group()
        self.global_ranks = ranks.get_dp_group()
        self.rank = ranks.dp_rank()
        self.size = ranks.dp_size()
        peers = ranks.get_rdp_group()
        self.of_slices = Holders(ranks.get_rdp_process_group(), peers, peers)
        coordinates = ranks.state.job("smp").placement.coordinates
        first = [rank for rank in self.global_ranks if coordinates(rank).tp == 0]
        first.sort(key=lambda rank: coordinates(rank).rdp)
        self.of_all = Holders(self.group, self.global_ranks, first)
        self.have_one_rank = ranks.rdp_size() == ranks.size()
        self.control_device = device_of_numbers(self.group)

    def numbers(self, *shape: int) -> Tensor:
        """Zeros to exchange, int64."""
        return torch.zeros(shape, dtype=torch.int64, device=self.control_device)

    def sum(self, tensor: Tensor) -> dist.Work:
        """Begin to sum in place."""
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        return work

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """Every replica's bytes, by dp_rank."""
        lengths = self.numbers(self.size)
        lengths[self.rank] = len(mine)
        self.sum(lengths).wait()
        sizes: list[int] = lengths.tolist()
        longest = max(sizes)
        if longest == 0:
            return [b""] * self.size
        padded = bytearray(mine.ljust(longest, b"\0"))
        sent = torch.frombuffer(padded, dtype=torch.uint8).to(self.control_device)
        got = [torch.empty_like(sent) for _ in sizes]
        dist.all_gather(got, sent, group=self.group)
        return [t[:size].cpu().numpy().tobytes() for t, size in zip(got, sizes, strict=True)]

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        """Copy dp_rank ``source``'s values to all; of slices, those of its RDP_GROUP's peers.

        A message for each dtype and device.
        """
        whole = [t for t in tensors if slices_of(t) is None]
        self._broadcast(whole, self.of_all, self.global_ranks[source])
        slices = [t for t in tensors if slices_of(t) is not None]
        # A TP_GROUP begins and ends as one: the source has a peer in each RDP_GROUP.
        replica = ranks.state.job("smp").placement.coordinates(self.global_ranks[source]).rdp
        self._broadcast(slices, self.of_slices, self.of_slices.ranks[replica])

    def _broadcast(self, tensors: Sequence[Tensor], holders: "Holders", source: int) -> None:
        if len(holders.ranks) == 1:
            return
        kinds: dict[tuple, list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
        for alike in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            dist.broadcast(flat, src=source, group=holders.group)
            if source == self.global_ranks[self.rank]:
                continue
            parts = flat.split([tensor.numel() for tensor in alike])
            with torch.no_grad():
                for tensor, part in zip(alike, parts, strict=True):
                    write(tensor, part.view(tensor.shape))

    def check_alike(self, layout: Layout) -> None:
        """Compare the replicas' layouts.

        Raises:
            ReplicasDiffer: on every replica; names the first difference.
        """
        layouts = [Layout.from_bytes(one) for one in self.gather_bytes(layout.to_bytes())]
        for dp_rank, other in enumerate(layouts):
            if difference := layouts[0].first_difference(other):
                raise ReplicasDiffer(
                    f"smp: dp_rank {dp_rank} (rank {self.global_ranks[dp_rank]}) has another "
                    f"model than dp_rank 0 (rank {self.global_ranks[0]}): it has {difference}"
                )
