"""Processes joined for collectives, connected through a store.

The ranks of a default group of ``smddp`` are connected once and serve all its sub-groups.  A
group beside a default group of another backend connects its own.
"""

import atexit
import hashlib
import secrets
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from smp import _core
from smp.collectives import dense
from smp.collectives.gather_times import Times
from smp.collectives.work import Work, forget_dropped
from smp.job import core_warnings, transports
from smp.job.bootstrap import Bootstrap, OverStore, running_mpi
from smp.job.config import Config, comm_environment

LONGEST_MS = 2**31 - 1
TOKEN_BYTES = 32  # hexadecimal digits


class PeerUse(NamedTuple):
    """Messages sent by this rank to another one by ``send``, and between hosts."""

    rank: int  # global
    transport: str  # "shm", "ucx", "tcp", "mpi"
    messages: int
    bytes: int


class PoolUse(NamedTuple):
    """The pool of this rank for groups of ``smddp``: ``allocate_tensor``, and messages."""

    bytes: int  # at most
    high: int  # in use, the most so far
    blocks: int  # tensors placed there
    fallbacks: int  # tensors that did not fit


@dataclass(frozen=True)
class GroupUse:
    """This rank's operations in a group of the backend ``smddp``."""

    name: str
    ranks: tuple[int, ...]  # global
    operations: int  # begun
    bytes: int  # of the tensors given to them by this rank
    on_host: str  # the way to the ranks of its host: "process_vm_readv", "shared memory", ""
    to_hosts: tuple[str, ...]  # transports to other hosts
    messages: int  # sent to other hosts
    sent: int  # their bytes
    device_operations: int = 0  # all-gathers between devices, a part of the operations
    device_bytes: int = 0  # ... and of the bytes
    device_why: str = ""  # the reason for NCCL to do those
    through_host: str = ""  # the reason for devices' other operations to go there
    device_straight: int = 0  # device_operations with tensors read where they lie
    device_times: tuple[Times, ...] = ()  # of device_operations and of NCCL's, as measured


class Ranks:
    """This process's end.  Making one is collective over all of them.

    Args:
        store: its keys are those of these ranks alone.
        rank: of this process, among ``size``.
        timeout: for connecting.
        global_ranks: of these ranks, named so in reports and errors.

    Raises:
        ConfigError: ``comm_interface`` or ``SMP_SECRET_FILE`` is wrong here.
        RuntimeError: another rank cannot start; the text names the rank.
    """

    open: "weakref.WeakSet[Ranks]" = weakref.WeakSet()

    of_default = False  # whether they are those of torch's default group

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        global_ranks: Sequence[int],
    ):
        given = comm_environment() if _settings is None else _settings
        # The size of each group's memory on this rank's GPU, for all-gathers.
        self.gather_bytes: int = given.get(
            "comm_device_gather_bytes", Config.comm_device_gather_bytes
        )
        self.global_ranks = list(global_ranks)
        boot = OverStore(store, rank, size, "ranks", self.global_ranks)
        token, carrier = share_token(boot)

        self.report_s: float = given.get("watchdog_report_s", Config.watchdog_report_s)
        self.rank = rank
        self.global_rank = self.global_ranks[rank]
        with ExitStack() as on_failure:

            def open_comm() -> bytes:
                wanted = given.get("comm_transports")
                interface = given.get("comm_interface")
                transports.offer(boot, wanted)
                transports.check_interface(interface)
                self.comm = _core.Comm(
                    rank,
                    self.global_ranks,
                    given.get("comm_pool_bytes") or 0,
                    ",".join(wanted) if wanted else None,
                    interface,
                    transports.job_secret(carrier, token),
                )
                # Close its file too, though a traceback holds on to the comm.
                on_failure.callback(self.comm.close)
                return self.comm.card()

            cards = boot.gather_made(open_comm)
            self.comm.report_after(self.report_s)
            self.comm.connect(cards, min(int(timeout.total_seconds() * 1000), LONGEST_MS))
            boot.barrier()  # a rank leaves the store after all have read it
            on_failure.pop_all()
        core_warnings.pass_on()
        self._groups: dict[_core.Group, tuple[str, list[int]]] = {}  # with name and members
        self.through_host: dict[_core.Group, str] = {}  # the reasons, by group
        self.gather_times: dict[tuple[int, ...], tuple[Times, ...]] = {}  # by members
        self._lock = threading.Lock()  # guards the two below
        self._idle = 0  # threads awaiting the end of the next operation
        self._threads: list[threading.Thread] = []
        Ranks.open.add(self)

    @staticmethod
    def number(name: str) -> int:
        """The core's number of a group; not 0."""
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") or 1

    def group(
        self, members: list[int], name: str, timeout: timedelta, shown: str
    ) -> _core.Group:
        """Meet the other members, perhaps on several hosts.

        Args:
            name: unlike any other group's.
            shown: the name in errors and reports.
        """
        number = self.number(name)
        group = _core.Group(self.comm, members, number, shown, timeout.total_seconds())
        self._groups[group] = (shown, members)
        return group

    def rename(self, group: _core.Group, shown: str) -> None:
        """Change the name of a group without operations in errors and reports."""
        group.rename(shown)
        self._groups[group] = (shown, self._groups[group][1])

    @property
    def is_open(self) -> bool:
        return self in Ranks.open

    def leave(self, group: _core.Group) -> None:
        """The group's operations end with an error.  After the last group, leave the ranks."""
        group.close()
        self._groups.pop(group, None)
        self.through_host.pop(group, None)
        self.close_unused()

    def close_unused(self) -> None:
        """Leave the other ranks if this one has no group with them."""
        if not self._groups:
            self.close()

    def issue(self, item: _core.WorkItem, work: Work) -> None:
        """Begin; the work completes when the item is over, with or without a wait."""
        if not self._threads:
            self._listen()
        item.issue(work)

    def attend(self) -> None:
        """After a signal ended a wait: let go of the operation once over."""
        if self.is_open and not self._threads:
            self._listen()

    def send(self, group: _core.Group, to: int, tag: int, tensor: Tensor) -> None:
        """Send a copy, without waiting for the receiver."""
        try:
            _core.send(group, to, tag, tensor)
        except BufferError:
            _core.send(group, to, tag, dense.in_host_memory(tensor))

    def receive(
        self, group: _core.Group, source: int, tag: int, tensor: Tensor
    ) -> tuple[_core.Receipt, Tensor]:
        """The receipt, for waiting, and the tensor to fill, perhaps a dense copy."""
        try:
            return _core.receive(group, source, tag, tensor), tensor
        except BufferError:
            copy = dense.in_host_memory(tensor)
            return _core.receive(group, source, tag, copy), copy

    def uses(self) -> list[GroupUse]:
        """This rank's operations in each of the groups."""
        uses = []
        for group, (name, members) in list(self._groups.items()):
            operations, moved, messages, sent, reads, *device, why = group.use()
            gathers, gathered, straight = device
            others = (self.comm.transport(rank) for rank in members if rank != self.rank)
            ways = {way for way in others if way is not None}
            here = "process_vm_readv" if reads else "shared memory"
            uses.append(
                GroupUse(
                    name,
                    tuple(self.global_ranks[rank] for rank in members),
                    operations,
                    moved,
                    here if "shm" in ways else "",
                    tuple(sorted(ways - {"shm"})),
                    messages,
                    sent,
                    gathers,
                    gathered,
                    why,
                    self.through_host.get(group, ""),
                    straight,
                    self.gather_times.get(tuple(members), ()),
                )
            )
        return uses

    def peers(self) -> list[PeerUse]:
        """Messages sent by this rank to each of the others."""
        return [
            PeerUse(rank, way, messages, sent)
            for rank, (way, messages, sent) in zip(
                self.global_ranks, self.comm.peers(), strict=True
            )
            if way is not None
        ]

    def pool(self) -> PoolUse:
        return PoolUse(*self.comm.pool())

    def close(self) -> None:
        """Leave all groups and the other ranks."""
        for group in self._groups:
            group.close()
        self._groups.clear()
        self.comm.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self.comm.close()
        forget_dropped()
        Ranks.open.discard(self)

    def _listen(self) -> None:
        with self._lock:
            if self._idle:
                return
            thread = threading.Thread(target=self._complete, name="smp-complete", daemon=True)
            thread.start()
            self._threads.append(thread)  # joined by close()
            self._idle += 1

    def _complete(self) -> None:
        """Complete finished operations; the C core carries them out and never takes the GIL.

        A script's callback of a future may itself wait for another operation: while one thread
        runs the callback, another listens.
        """
        while (work := self.comm.finished()) is not None:
            with self._lock:
                self._idle -= 1
            try:
                if work.is_awaited:
                    self._listen()
                work.complete()
            except Exception:  # of this work alone: others are over later
                told = (*sys.exc_info(), threading.current_thread())
                threading.excepthook(threading.ExceptHookArgs(told))
                del told
            finally:
                del work  # with its tensors
                with self._lock:
                    self._idle += 1


def share_token(boot: OverStore) -> tuple[bytes, Bootstrap]:
    """A random token for these ranks, and its carrier.  Collective over them.

    The carrier is MPI where one job of MPI runs on all of them: no other process can read the
    token there.  Else the carrier is the store.
    """
    token = secrets.token_hex(TOKEN_BYTES // 2).encode() if boot.rank == 0 else b""
    mpi = running_mpi()
    cards = boot.allgather_bytes(f"{mpi.job} {mpi.rank}".encode() if mpi else b"")
    jobs = {card.split()[0] if card else b"" for card in cards}
    if mpi is None or len(jobs) != 1:
        return boot.allgather_bytes(token)[0], boot
    return mpi.tell([int(card.split()[1]) for card in cards], token, TOKEN_BYTES), mpi


_settings: Mapping[str, Any] | None = None  # None: the environment's


@contextmanager
def with_settings(given: Mapping[str, Any]) -> Iterator[None]:
    """Ranks made meanwhile take ``comm_transports`` and so on from here."""
    global _settings
    _settings = given
    try:
        yield
    finally:
        _settings = None


@atexit.register
def _close_all() -> None:
    """Before the interpreter ends: no thread may wake up in it later."""
    for ranks in list(Ranks.open):
        ranks.close()
