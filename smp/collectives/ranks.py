"""Processes that do collectives together, connected through a store.

The ranks of the default group, if that is an ``smddp`` one, are connected once and serve
all its sub-groups; a group beside a default group of another backend connects its own.
"""

import atexit
import hashlib
import secrets
import sys
import threading
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from smp import _core
from smp.collectives import dense
from smp.job import transports
from smp.job.bootstrap import OverStore
from smp.job.config import comm_environment

if TYPE_CHECKING:
    from smp.collectives.work import Work

LONGEST_MS = 2**31 - 1


@dataclass(frozen=True)
class GroupUse:
    """What this rank has done in a group of the backend ``smddp``."""

    name: str
    ranks: tuple[int, ...]  # as they are connected: global ones, but for odd groups
    operations: int  # begun
    bytes: int  # of the tensors that this rank gave to them
    reads_memory: bool  # of the ranks of its host, by process_vm_readv; else by a pool
    to_hosts: tuple[str, ...]  # transports to other hosts
    messages: int  # sent to other hosts
    sent: int  # their bytes


class Ranks:
    """This process's end.  Making one is collective over all of them.

    Args:
        store: of which these ranks, and nobody else, use the keys.
        rank: of this process, among ``size``.
        timeout: for connecting.
    """

    open: "weakref.WeakSet[Ranks]" = weakref.WeakSet()

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        environment = comm_environment()
        wanted = environment.get("comm_transports")
        interface = environment.get("comm_interface")
        boot = OverStore(store, rank, size, "ranks")
        transports.offer(boot, wanted)
        transports.check_interface(interface)
        token = boot.allgather_bytes(secrets.token_hex(16).encode() if rank == 0 else b"")[0]
        self.comm = _core.Comm(
            rank,
            size,
            environment.get("comm_pool_bytes", 0),
            ",".join(wanted) if wanted else None,
            interface,
            transports.job_secret(boot, token),
        )
        cards = boot.allgather_bytes(self.comm.card())
        self.rank = rank
        self.comm.connect(cards, min(int(timeout.total_seconds() * 1000), LONGEST_MS))
        boot.barrier()  # nobody leaves the store before all have read it
        self._groups: dict[_core.Group, tuple[str, list[int]]] = {}  # with name and members
        self._lock = threading.Lock()  # guards the two below
        self._idle = 0  # threads that wait for the next operation to end
        self._threads: list[threading.Thread] = []
        Ranks.open.add(self)

    @staticmethod
    def number(name: str) -> int:
        """By which the core knows a group; not 0."""
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") or 1

    def group(self, members: list[int], name: str, timeout: timedelta) -> _core.Group:
        """Meet the other members, which may be on several hosts."""
        number = self.number(name)
        group = _core.Group(self.comm, members, number, name, timeout.total_seconds())
        self._groups[group] = (name, members)
        return group

    @property
    def is_open(self) -> bool:
        return self in Ranks.open

    def leave(self, group: _core.Group) -> None:
        """What the group has under way ends with an error.  After the last, leave the ranks."""
        group.close()
        self._groups.pop(group, None)
        self.close_unused()

    def close_unused(self) -> None:
        """Leave the other ranks if this one has no group with them."""
        if not self._groups:
            self.close()

    def issue(self, order: _core.Order, work: "Work") -> None:
        """Begin; the work completes when the order is over, whoever waits for it."""
        if not self._threads:
            self._listen()
        order.issue(work)

    def attend(self) -> None:
        """A signal has ended a wait: what is left of it is let go when it is over."""
        if self.is_open and not self._threads:
            self._listen()

    def send(self, group: int, to: int, tag: int, tensor: Tensor) -> None:
        """A copy, without waiting for the receiver."""
        try:
            _core.send(self.comm, to, group, tag, tensor)
        except BufferError:
            _core.send(self.comm, to, group, tag, dense.dense(tensor))

    def receive(
        self, group: int, source: int, tag: int, tensor: Tensor
    ) -> tuple[_core.Receipt, Tensor]:
        """Where to wait for it, and what it fills: the tensor, or a copy without gaps."""
        try:
            return _core.Receipt(self.comm, source, group, tag, tensor), tensor
        except BufferError:
            copy = dense.dense(tensor)
            return _core.Receipt(self.comm, source, group, tag, copy), copy

    def uses(self) -> list[GroupUse]:
        """What this rank has done in each of the groups."""
        uses = []
        for group, (name, members) in list(self._groups.items()):
            operations, moved, messages, sent, reads = group.use()
            ways = {self.comm.transport(rank) for rank in members if rank != self.rank}
            uses.append(
                GroupUse(
                    name,
                    tuple(members),
                    operations,
                    moved,
                    reads,
                    tuple(sorted(ways - {"shm"})),
                    messages,
                    sent,
                )
            )
        return uses

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
        Ranks.open.discard(self)

    def _listen(self) -> None:
        with self._lock:
            if self._idle:
                return
            thread = threading.Thread(target=self._complete, name="smp-complete", daemon=True)
            thread.start()
            self._threads.append(thread)  # which close() joins
            self._idle += 1

    def _complete(self) -> None:
        """Complete what is over; the C core carries it out and never takes the GIL.

        What a script attached to a future may itself wait for another operation: while
        one thread runs that, another listens.
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


@atexit.register
def _close_all() -> None:
    """Before the interpreter ends: no thread may wake up in it later."""
    for ranks in list(Ranks.open):
        ranks.close()
