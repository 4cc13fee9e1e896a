"""What a collective returns: something to wait for."""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smp import _core
from smp.collectives import dense, profile

_making_future = threading.Lock()


def _are_small(tensors: Sequence[Tensor]) -> bool:
    """Whether their memory, in all, is next to nothing."""
    if not all(t.is_cpu and t.layout == torch.strided for t in tensors):
        return False
    return sum(t.untyped_storage().nbytes() for t in tensors) <= 4096


class Ended:
    """In the place of a work item that is over and gone."""

    def wait(self, limit_s: float) -> bool:
        return True

    def is_over(self) -> bool:
        return True

    def check(self) -> None:
        pass


class Work(dist.Work):
    """An operation under way.

    Args:
        item: what the core carries out.
        results: the tensors that it fills.
        finish: what is left to do then, in Python: copies to where results belong.
    """

    _item: Any = Ended()
    # Most works need none of these.  Who takes an event or a pending future out of the
    # work, which is one step, ends it.
    _completed = False
    _failure: Exception | None = None  # beside what the work item says
    _event: profile.Event | None = None
    _future: torch.futures.Future[list[Tensor]] | None = None
    _pending: torch.futures.Future[None] | None = None  # completes the future
    _finish: Callable[[], None] | None = None
    _lock: threading.RLock  # with a finish: one does it, others wait

    def __init__(
        self,
        item: _core.WorkItem | _core.Receipt,
        results: Sequence[Tensor] = (),
        finish: Callable[[], None] | None = None,
    ):
        dist.Work.__init__(self)
        self._item = item
        self._results = results
        if finish is not None:
            self._finish = finish
            self._lock = threading.RLock()

    def __del__(self) -> None:
        """C++ may have kept its half, which would then wait by the methods of its base, for
        ever: DDP's join does so.  So what Python drops stays for a while, with small results
        alone."""
        if sys.is_finalizing():
            return
        if (failure := self.exception()) is not None:
            self._failure = failure.with_traceback(None)  # without what its frames hold
        self._future = self._pending = None
        self._results = self._results if _are_small(self._results) else ()
        self._item = Ended()
        _dropped.append(self)

    @property
    def is_awaited(self) -> bool:
        """Whether completing it runs what others attached to its future."""
        return self._pending is not None

    def complete(self) -> None:
        """The work item is over: put results in place and complete the future, once."""
        if self._finish is not None:
            with self._lock:
                self._do_finish()
        self._completed = True
        own = self.__dict__
        if (event := own.pop("_event", None)) is not None:
            event.end()
        if (pending := own.pop("_pending", None)) is not None:
            pending.set_result(None)

    def _do_finish(self) -> None:
        """Under the lock."""
        if self._finish is not None and self.exception() is None:
            try:
                self._finish()
            except Exception as error:
                self._failure = error
        self._finish = None

    def ends(self, event: profile.Event) -> None:
        """The profile's event ends when this completes."""
        self._event = event
        if self._completed:
            self.complete()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is over.

        Raises:
            torch.distributed.DistBackendError: it failed, or did not end in time.
        """
        limit_s = timeout.total_seconds() if timeout else 0
        if not self._item.wait(limit_s):
            what = self._item.describe()
            if what is not None or not self._item.is_over():
                raise dist.DistBackendError(
                    f"smp: {what or 'an operation'}; not over after {limit_s:g} s"
                )
        self.complete()
        self._check()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._completed and self._item.is_over():
            self.complete()
        return self._completed

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What went wrong; None while it is under way, too."""
        if self._failure is not None or self._item.is_over():
            try:
                self._check()
            except Exception as error:
                return error
        return None

    def result(self) -> list[Tensor]:
        return list(self._results)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Completes with the results, or with the error, although nobody waits."""
        with _making_future:
            if self._future is None:
                pending = self._make_pending()
                # Only an error that is raised in a callback is one for C++ too.
                self._future = pending.then(self._value)
                self._pending = pending
        if self._completed:
            self.complete()
        return self._future

    def _make_pending(self) -> torch.futures.Future[None]:
        return torch.futures.Future(devices=dense.devices_of(self._results))

    def _value(self, _: Any) -> list[Tensor]:
        self._check()
        return list(self._results)

    def _check(self) -> None:
        """Raise what went wrong; it is over."""
        if self._failure is not None:  # also one after which nobody waits for the item
            raise self._failure
        self._item.check()


# More than there are operations between DDP's forward, which drops one, and its wait.
_dropped: deque[Work] = deque(maxlen=64)


def forget_dropped() -> None:
    """The ranks are left: C++ waits for nothing any more."""
    _dropped.clear()


class DeviceWork(Work):
    """An all-gather between devices.

    The core's part is over when all ranks have called it; the copies follow.

    Args:
        item: as above.
        device: of this rank.
        results: as above.
    """

    def __init__(
        self, item: _core.WorkItem, device: torch.device, results: Sequence[Tensor] = ()
    ):
        super().__init__(item, results)
        self._device = device

    def __del__(self) -> None:
        pass  # C++ keeps none

    def wait(self, timeout: timedelta | None = None) -> bool:
        """What the current stream is told from now on comes after the copies."""
        super().wait(timeout)
        self._item.join()
        return True

    def is_completed(self) -> bool:
        return super().is_completed() and self._item.is_done()

    def _make_pending(self) -> torch.futures.Future[None]:
        """The future is complete when the other ranks have called: its tensors are in order
        on the stream of who waits for it, and of its callbacks."""
        return torch.futures.Future(devices=[self._device])

    def _value(self, _: Any) -> list[Tensor]:
        """In a stream that the future gives its callbacks."""
        self._check()
        self._item.join()
        return list(self._results)


class OverOnDevice(dist.Work):
    """What the current stream has been told already.

    Args:
        device: of the stream.
        results: the tensors that it fills.
    """

    def __init__(self, device: torch.device, results: Sequence[Tensor] = ()):
        super().__init__()
        self._device = device
        self._results = results
        self._event = torch.accelerator.current_stream(device).record_event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The same for the stream that is current now."""
        torch.accelerator.current_stream(self._device).wait_event(self._event)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._event.query()

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return list(self._results)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        devices: list[int | str | torch.device] = [self._device]
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)
        self.wait()
        future.set_result(list(self._results))
        return future


class Received(Work):
    """A tensor on its way.

    Args:
        receipt: where the core puts it.
        tensor: what the script wants filled.
        filled: what the core fills: the tensor, or a dense copy.
        timeout_s: of a wait without one.
        members: of the group, as the core numbers them.
        reporter: this rank, as torch numbers it, and after how many seconds a wait is
            reported; 0: never.
    """

    def __init__(
        self,
        receipt: _core.Receipt,
        tensor: Tensor,
        filled: Tensor,
        timeout_s: float,
        members: list[int],
        reporter: tuple[int, float],
    ):
        finish = None if filled is tensor else dense.copied_back([filled], [tensor])
        Work.__init__(self, receipt, (tensor,), finish)
        self._timeout_s = timeout_s
        self._members = members
        self._reporter = reporter

    def __del__(self) -> None:
        pass  # C++ keeps none; the receipt is withdrawn

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._failure is not None:
            raise self._failure
        limit_s = timeout.total_seconds() if timeout else self._timeout_s
        if not self._wait(limit_s) and (timeout or not self._item.withdraw()):
            late = dist.DistBackendError(
                f"smp: {self._item.describe()}: timed out after {round(limit_s, 3):g} s"
            )
            if not timeout:  # else who waits may wait again
                self._failure = late
                self.complete()
            raise late
        self.complete()
        self._check()
        return True

    def _wait(self, limit_s: float) -> bool:
        """Whether it is over by then; says so where it takes long."""
        rank, report_s = self._reporter
        if not 0 < report_s < limit_s:
            return self._item.wait(limit_s)
        if self._item.wait(report_s):
            return True
        began, next_s = time.monotonic() - report_s, report_s
        while True:
            waited_s = time.monotonic() - began
            if waited_s >= next_s:
                what = f"{self._item.describe()}; for {waited_s:.1f} s so far"
                print(f"smp: rank {rank}: {what}", file=sys.stderr, flush=True)
                next_s = 2 * waited_s
            if self._item.wait(max(min(next_s, limit_s) - waited_s, 1e-3)):
                return True
            if time.monotonic() - began >= limit_s:
                return False

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
            if not self._completed:
                self._failure = error
            self.complete()

    def source_rank(self) -> int:
        """In the group; it is over."""
        return self._members.index(self._item.source())

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
        devices = dense.devices_of(self._results)
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)
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
        """Until all are over; the time is for all of them together."""
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        for work in self._works:
            if deadline is None:
                work.wait()
            else:  # no time at all would be no limit
                left_s = max(deadline - time.monotonic(), 1e-3)
                work.wait(timedelta(seconds=left_s))
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What went wrong with the first that failed; None while it is under way, too."""
        errors = (work.exception() for work in self._works)
        return next((error for error in errors if error is not None), None)

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all([work.get_future() for work in self._works])
