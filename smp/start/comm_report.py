"""``smp.comm_report()``: this rank's peers, and the transport and number of bytes to each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from smp import _core, ranks
from smp.state_mod import state

if TYPE_CHECKING:
    from smp.collectives.ranks import GroupUse, PeerUse, PoolUse


@dataclass(frozen=True)
class Peer:
    """Another rank of the PP_GROUP, and the messages sent to that rank since ``smp.init``."""

    rank: int  # global
    pp_rank: int
    transport: str  # "shm", "ucx", "tcp", "mpi"
    messages: int
    bytes: int


@dataclass(frozen=True)
class CommReport:
    """The messages sent by one rank; ``print`` shows them.

    The peers and pools are the module server's; those called ``group_`` are of groups of the
    backend ``smddp``, with connections of their own.

    The pool is the shared memory for this rank's large tensors.  A fallback is a tensor that
    did not fit, and went by a slower way.  The device pool is the same in the memory of this
    rank's GPU, for GPUs of one host; a fallback there went through host memory.  The driver
    pins the parts of the pool that these tensors take.
    """

    rank: int  # global
    peers: tuple[Peer, ...]
    pool_bytes: int  # at most
    pool_high: int  # bytes in use, the most so far
    pool_blocks: int  # tensors sent in the pool
    pool_fallbacks: int
    device_pool_bytes: int = 0  # 0: none (yet)
    device_pool_high: int = 0
    device_pool_tensors: int = 0
    device_pool_fallbacks: int = 0
    device_pool_why: str = ""  # the reason for having none, in the driver's words
    pinned_bytes: int = 0  # of the pool, for tensors of the GPU through host memory
    pinned_why: str = ""  # the reason for pinning no more, in the driver's words
    groups: tuple["GroupUse", ...] = ()  # groups of the backend smddp with this rank
    group_peers: tuple["PeerUse", ...] = ()  # sends, and messages between hosts
    group_pools: tuple["PoolUse", ...] = ()  # one, but for groups beside another backend
    device_pool_landed: int = 0  # tensors of the pool's, straight into the receiver's memory

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
                    use.on_host or "none",
                    f"{use.messages} messages, {_mib(use.sent)} MiB by {by}" if by else "none",
                )
            )
        return [
            f"rank {self.rank} has done in groups of smddp:",
            *_table(rows),
            *(line for use in self.groups for line in _of_devices(use)),
            *self._of_group_peers(),
            *(_of_pool(*pool) for pool in self.group_pools),
        ]

    def _of_group_peers(self) -> list[str]:
        rows = [("to rank", "by", "messages", "MiB")]
        rows += [
            (str(p.rank), p.transport, str(p.messages), _mib(p.bytes)) for p in self.group_peers
        ]
        return _table(rows) if self.group_peers else []

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
            _of_pool(self.pool_bytes, self.pool_high, self.pool_blocks, self.pool_fallbacks),
            *self._of_device(),
            *self._of_pinned(),
        ]

    def _of_device(self) -> list[str]:
        through_host = f"{self.device_pool_fallbacks} went through host memory"
        if self.device_pool_why:
            return [f"device pool: none ({self.device_pool_why}); {through_host}"]
        if self.device_pool_bytes == 0:
            return []
        landed = ""
        if self.device_pool_landed:
            landed = f" ({self.device_pool_landed} straight into the receiver's memory)"
        return [
            f"device pool: {self.device_pool_tensors} tensors{landed}, at most "
            f"{_mib(self.device_pool_high)} MiB at a time, of "
            f"{_mib(self.device_pool_bytes)} MiB; {through_host}"
        ]

    def _of_pinned(self) -> list[str]:
        if not self.pinned_bytes and not self.pinned_why:
            return []
        why = f"; no more ({self.pinned_why})" if self.pinned_why else ""
        return [f"pinned in the pool: {_mib(self.pinned_bytes)} MiB{why}"]


def comm_report() -> CommReport:
    """This rank's peers, and the transport and number of bytes to each.  Not collective.

    Raises:
        RuntimeError: before ``smp.init``, and without a group of the backend ``smddp``.
    """
    from smp.collectives.ranks import Ranks

    connected = list(Ranks.open)
    of_groups: dict[str, Any] = {
        "groups": tuple(use for each in connected for use in each.uses()),
        "group_peers": tuple(use for each in connected for use in each.peers()),
        "group_pools": tuple(each.pool() for each in connected),
    }
    if connected and not state.is_initialized:
        return CommReport(dist.get_rank(), (), 0, 0, 0, 0, **of_groups)
    job = state.job("smp.comm_report()")
    counters = _core.counters()
    peers = tuple(
        Peer(rank, job.placement.coordinates(rank).pp, transport, messages, sent)
        for rank, (transport, messages, sent) in zip(
            job.runtime.core_group, _core.peers(), strict=False
        )
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
        device_pool_landed=counters.get("device_landed", 0),
        device_pool_fallbacks=counters.get("device_fallbacks", 0),
        device_pool_why=counters.get("device_why", ""),
        pinned_bytes=counters.get("pinned_bytes", 0),
        pinned_why=counters.get("pinned_why", ""),
        **of_groups,
    )


def _of_pool(size: int, high: int, blocks: int, fallbacks: int) -> str:
    return (
        f"pool: {blocks} tensors, at most {_mib(high)} MiB at a time, of {_mib(size)} MiB; "
        f"{fallbacks} did not fit"
    )


def _of_devices(use: "GroupUse") -> list[str]:
    lines = []
    if use.through_host:
        lines = [f"group {use.name}: GPUs' tensors through host memory ({use.through_host})"]
    if use.device_why:
        way = "through host memory" if use.through_host else "by NCCL"
        return [*lines, f"group {use.name}: all-gathers of GPUs {way} ({use.device_why})"]
    if not use.device_operations:
        return lines
    return [
        *lines,
        f"group {use.name}: {use.device_operations} all-gathers of {_mib(use.device_bytes)} "
        f"MiB by the GPUs' own copies, {use.device_straight} straight from the tensors",
        *(
            f"group {use.name}: an all-gather of {times.bytes >> 10} KiB takes "
            f"{times.copies * 1e6:.0f} us by copies, {times.nccl * 1e6:.0f} by NCCL: "
            f"{'NCCL' if times.is_nccl_ahead else 'copies'}"
            for times in use.device_times
        ),
    ]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f}"
