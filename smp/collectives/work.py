"""What a collective returns: something to wait for."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smp import _core
from smp.collectives import dense, profile


class Work(dist.Work):
    """An operation under way.

    Args:
        order: what the core carries out.
        results: the tensors that it fills.
        finish: what is left to do then, in Python: copies to where results belong.
    """

    # Guarded by the lock of each, as _finish is.  Most works need none of them.
    _completed = False
    _failure: Exception | None = None  # beside what the order says
    _event: profile.Event | None = None
    _future: torch.futures.Future[list[Tensor]] | None = None
    _pending: torch.futures.Future[None] | None = None  # completes the future

    def __init__(
        self,
        order: _core.Order | _core.Receipt,
        results: Sequence[Tensor] = (),
        finish: Callable[[], None] | None = None,
    ):
        dist.Work.__init__(self)
        self._order = order
        self._results = results
        self._finish = finish
        self._lock = threading.RLock()

    @property
    def is_awaited(self) -> bool:
        """Whether completing it runs what others attached to its future."""
        return self._pending is not None

    def complete(self) -> None:
        """The order is over: put results in place and complete the future, once."""
        with self._lock:
            if not self._completed:
                if self._finish is not None and self.exception() is None:
                    try:
                        self._finish()
                    except Exception as error:
                        self._failure = error
                self._finish = None
                self._completed = True
            event, self._event = self._event, None
            pending, self._pending = self._pending, None
        if event is not None:
            event.end()
        if pending is not None:
            pending.set_result(None)

    def ends(self, event: profile.Event) -> None:
        """The profile's event ends when this completes."""
        with self._lock:
            self._event = event
            completed = self._completed
        if completed:
            self.complete()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is over.

        Raises:
            torch.distributed.DistBackendError: it failed, or did not end in time.
        """
        limit_s = timeout.total_seconds() if timeout else 0
        if not self._order.wait(limit_s):
            raise dist.DistBackendError(f"smp: not over after {limit_s:g} s")
        self.complete()
        self._check()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._completed and self._order.is_over():
            self.complete()
        return self._completed

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What went wrong; None while it is under way, too."""
        if self._failure is not None or self._order.is_over():
            try:
                self._check()
            except Exception as error:
                return error
        return None

    def result(self) -> list[Tensor]:
        return list(self._results)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Completes with the results, or with the error, although nobody waits."""
        with self._lock:
            if self._future is None:
                self._pending = torch.futures.Future()
                # Only an error that is raised in a callback is one for C++ too.
                self._future = self._pending.then(self._value)
            completed = self._completed
        if completed:
            self.complete()
        return self._future

    def _value(self, _: Any) -> list[Tensor]:
        self._check()
        return list(self._results)

    def _check(self) -> None:
        """Raise what went wrong; it is over."""
        if self._failure is not None:  # also one after which nobody waits for the order
            raise self._failure
        self._order.check()


class Received(Work):
    """A tensor on its way.

    Args:
        receipt: where the core puts it.
        tensor: what the script wants filled.
        filled: what the core fills: the tensor, or a dense copy.
        timeout: of a wait without one.
        members: of the group, as the core numbers them.
        wanted: the group's name, the source and the tag, for errors.
    """

    def __init__(
        self,
        receipt: _core.Receipt,
        tensor: Tensor,
        filled: Tensor,
        timeout: timedelta,
        members: list[int],
        wanted: tuple[str, int, int],
    ):
        finish = None if filled is tensor else dense.copied_back([filled], [tensor])
        Work.__init__(self, receipt, (tensor,), finish)
        self._timeout = timeout
        self._members = members
        self._wanted = wanted

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._failure is not None:
            raise self._failure
        limit_s = (timeout or self._timeout).total_seconds()
        if not self._order.wait(limit_s):
            group, source, tag = self._wanted
            who = "any rank" if source == _core.ANY_SOURCE else f"rank {source}"
            raise dist.DistBackendError(
                f"smp: group '{group}': receive (tag {tag}) from {who}: timed out after "
                f"{limit_s:g} s"
            )
        self.complete()
        self._check()
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Completes by a thread of its own: messages are sorted in by who waits.

        If that waits in vain, for as long as the group's timeout or until the ranks are
        left, the receive has failed: nobody else can wait for it any more.
        """
        future = super().get_future()
        if not self._completed:
            threading.Thread(target=self._wait_for_future, daemon=True).start()
        return future

    def _wait_for_future(self) -> None:
        try:
            self.wait()
        except Exception as error:
            with self._lock:
                if not self._completed:
                    self._failure = error
            self.complete()

    def source_rank(self) -> int:
        """In the group; it is over."""
        return self._members.index(self._order.source())

    _source_rank = source_rank


class Over(Work):
    """An operation that was over when the call returned."""

    def __init__(self, results: Sequence[Tensor] = ()):
        dist.Work.__init__(self)
        self._results = results

    def ends(self, event: profile.Event) -> None:
        event.end()

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(list(self._results))
        return future


class AllOf(dist.Work):
    """Several operations that were issued as one: works of this module."""

    def __init__(self, works: Sequence[Any]):
        super().__init__()
        self._works = works

    def ends(self, event: profile.Event) -> None:
        self._works[-1].ends(event)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all([work.get_future() for work in self._works])
