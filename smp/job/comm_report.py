"""``smp.comm_report()``: who this rank talks to, by which transport, and how much."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from smp import _core, ranks
from smp.state_mod import state

if TYPE_CHECKING:
    from smp.collectives.ranks import GroupUse


@dataclass(frozen=True)
class Peer:
    """Another rank of the PP_GROUP, and what this rank has sent to it since ``smp.init``."""

    rank: int  # global
    pp_rank: int
    transport: str  # "shm", "tcp", "mpi"
    messages: int
    bytes: int


@dataclass(frozen=True)
class CommReport:
    """What the module server of one rank has sent; ``print`` it.

    The pool is the shared memory that this rank's large tensors travel in.  A fallback is
    one that did not fit, and went by a slower way.  The device pool is the same in the
    memory of this rank's GPU, for GPUs of one host; a fallback there went through host
    memory.
    """

    rank: int  # global
    peers: tuple[Peer, ...]
    pool_bytes: int  # at most
    pool_high: int  # bytes in use, the most so far
    pool_blocks: int  # tensors that travelled in it
    pool_fallbacks: int
    device_pool_bytes: int = 0  # 0: there is none (yet)
    device_pool_high: int = 0
    device_pool_tensors: int = 0
    device_pool_fallbacks: int = 0
    device_pool_why: str = ""  # why there is none, in the driver's words
    groups: tuple["GroupUse", ...] = ()  # of the backend smddp that this rank is in

    def __str__(self) -> str:
        return "\n".join([*self._of_pipeline(), *self._of_groups()])

    def _of_groups(self) -> list[str]:
        if not self.groups:
            return []
        rows = [("group", "ranks", "operations", "MiB", "on this host by", "to other hosts")]
        for use in self.groups:
            by = ", ".join(use.to_hosts)
            rows.append(
                (
                    use.name,
                    str(len(use.ranks)),
                    str(use.operations),
                    _mib(use.bytes),
                    "process_vm_readv" if use.reads_memory else "shared memory",
                    f"{use.messages} messages, {_mib(use.sent)} MiB by {by}" if by else "none",
                )
            )
        return [f"rank {self.rank} has done in groups of smddp:", *_table(rows)]

    def _of_pipeline(self) -> list[str]:
        if not self.peers:
            alone = f"rank {self.rank}: no other pipeline rank to talk to"
            return [] if any(len(use.ranks) > 1 for use in self.groups) else [alone]
        rows = [("to rank", "pp_rank", "by", "messages", "MiB")]
        rows += [
            (str(p.rank), str(p.pp_rank), p.transport, str(p.messages), _mib(p.bytes))
            for p in self.peers
        ]
        return [
            f"rank {self.rank} has sent:",
            *_table(rows),
            f"pool: {self.pool_blocks} tensors, at most {_mib(self.pool_high)} MiB at a "
            f"time, of {_mib(self.pool_bytes)} MiB; {self.pool_fallbacks} did not fit",
            *self._of_device(),
        ]

    def _of_device(self) -> list[str]:
        through_host = f"{self.device_pool_fallbacks} went through host memory"
        if self.device_pool_why:
            return [f"device pool: none ({self.device_pool_why}); {through_host}"]
        if self.device_pool_bytes == 0:
            return []
        return [
            f"device pool: {self.device_pool_tensors} tensors, at most "
            f"{_mib(self.device_pool_high)} MiB at a time, of "
            f"{_mib(self.device_pool_bytes)} MiB; {through_host}"
        ]


def comm_report() -> CommReport:
    """Who this rank talks to, how, and how much.  Not collective.

    Raises:
        RuntimeError: before ``smp.init``, and without a group of the backend ``smddp``.
    """
    from smp.collectives.ranks import Ranks

    groups = tuple(use for each in list(Ranks.open) for use in each.uses())
    if groups and not state.is_initialized:
        return CommReport(dist.get_rank(), (), 0, 0, 0, 0, groups=groups)
    group = state.job("smp.comm_report()").groups["pp"]
    counters = _core.counters()
    peers = tuple(
        Peer(group[pp_rank], pp_rank, transport, messages, sent)
        for pp_rank, (transport, messages, sent) in enumerate(_core.peers())
        if transport is not None
    )
    return CommReport(
        rank=ranks.rank(),
        peers=peers,
        pool_bytes=counters.get("pool_size", 0),
        pool_high=counters.get("pool_high", 0),
        pool_blocks=counters.get("pool_blocks", 0),
        pool_fallbacks=counters.get("pool_fallbacks", 0),
        device_pool_bytes=counters.get("device_size", 0),
        device_pool_high=counters.get("device_high", 0),
        device_pool_tensors=counters.get("device_tensors", 0),
        device_pool_fallbacks=counters.get("device_fallbacks", 0),
        device_pool_why=counters.get("device_why", ""),
        groups=groups,
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f}"
