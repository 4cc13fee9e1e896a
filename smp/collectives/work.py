"""The result of a collective's call: an operation to wait for."""

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
    """Whether the tensors' memory, in all, is next to nothing."""
    if not all(t.is_cpu and t.layout == torch.strided for t in tensors):
        return False
    return sum(t.untyped_storage().nbytes() for t in tensors) <= 4096


class Ended:
    """In the place of a finished work item."""

    def wait(self, limit_s: float) -> bool:
        return True

    def is_over(self) -> bool:
        return True

    def check(self) -> None:
        pass


class Work(dist.Work):
    """An operation under way.

    Args:
        item: the core's part of the operation.
        results: the tensors to fill.
        finish: the part left to Python then: copies to the results' places.
    """

    _item: Any = Ended()
    # Most works need none of these.  Taking the event or the pending future out of the work is
    # one step; the taker ends the one taken.
    _completed = False
    _failure: Exception | None = None  # beside the work item's own
    _event: profile.Event | None = None
    _future: torch.futures.Future[list[Tensor]] | None = None
    _pending: torch.futures.Future[None] | None = None  # completes the future
    _finish: Callable[[], None] | None = None
    _lock: threading.RLock  # with a finish: one thread runs it, others wait

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
        """C++ may have kept its half, and would then wait by the methods of its base, for ever,
        as DDP's join does.  So a work dropped by Python stays for a while, with small results
        alone.
        """
        if sys.is_finalizing():
            return
        if (failure := self.exception()) is not None:
            self._failure = failure.with_traceback(None)  # without its frames' objects
        self._future = self._pending = None
        self._results = self._results if _are_small(self._results) else ()
        self._item = Ended()
        _dropped.append(self)

    @property
    def is_awaited(self) -> bool:
        """Whether completing the work runs callbacks of its future."""
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
        """Wait for the operation's end.

        Raises:
            torch.distributed.DistBackendError: the operation failed, or did not end in time.
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
        """The operation's error; None while it is under way, too."""
        if self._failure is not None or self._item.is_over():
            try:
                self._check()
            except Exception as error:
                return error
        return None

    def result(self) -> list[Tensor]:
        return list(self._results)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future completed with the results, or with the error, even without a wait."""
        with _making_future:
            if self._future is None:
                pending = self._make_pending()
                # Only an error raised in a callback is one for C++ too.
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
        """Raise the error of the finished operation."""
        if self._failure is not None:  # also a failure that ends all waits for the item
            raise self._failure
        self._item.check()


# More than the operations between DDP's forward, where one is dropped, and its wait.
_dropped: deque[Work] = deque(maxlen=64)


def forget_dropped() -> None:
    """The ranks are left: no wait of C++'s remains."""
    _dropped.clear()


class DeviceWork(Work):
    """An all-gather between devices.

    The core's part is over once all ranks have called; the copies follow.

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
        """Later work of the current stream comes after the copies."""
        super().wait(timeout)
        self._item.join()
        return True

    def is_completed(self) -> bool:
        return super().is_completed() and self._item.is_done()

    def _make_pending(self) -> torch.futures.Future[None]:
        """A future complete once the other ranks have called.

        Its tensors are in order on the stream of each waiter, and of its callbacks.
        """
        return torch.futures.Future(devices=[self._device])

    def _value(self, _: Any) -> list[Tensor]:
        """In the stream given to callbacks by the future."""
        self._check()
        self._item.join()
        return list(self._results)


class OverOnDevice(dist.Work):
    """The earlier work of the current stream.

    Args:
        device: of the stream.
        results: the tensors to fill.
    """

    def __init__(self, device: torch.device, results: Sequence[Tensor] = ()):
        super().__init__()
        self._device = device
        self._results = results
        self._event = torch.accelerator.current_stream(device).record_event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the stream that is current now wait, too."""
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
        receipt: the core's place for the tensor.
        tensor: the script's, to be filled.
        filled: the core's: the tensor, or a dense copy.
        timeout_s: of a wait without one.
        members: of the group, by their numbers in the core.
        reporter: this rank, by torch's number, and the seconds until a wait is reported; 0:
            never.
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
            if not timeout:  # else another wait may follow
                self._failure = late
                self.complete()
            raise late
        self.complete()
        self._check()
        return True

    def _wait(self, limit_s: float) -> bool:
        """Whether the receive is over by then; a long wait is reported."""
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
        """Completes by a thread of its own: waiting threads sort messages in.

        A vain wait of that thread (the group's timeout is over, or the ranks are left) is the
        receive's failure: no other wait is possible.
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
        """The sender's number in the group, after the receive's end."""
        return self._members.index(self._item.source())

    _source_rank = source_rank


class Over(Work):
    """An operation finished before its call returned."""

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
    """Several operations issued as one: works of this module."""

    def __init__(self, works: Sequence[Any]):
        super().__init__()
        self._works = works

    def ends(self, event: profile.Event) -> None:
        self._works[-1].ends(event)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all; the time is for all of them together."""
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        for work in self._works:
            if deadline is None:
                work.wait()
            else:  # a time of zero would be no limit
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
        """The error of the first failed operation; None while it is under way, too."""
        errors = (work.exception() for work in self._works)
        return next((error for error in errors if error is not None), None)

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all([work.get_future() for work in self._works])
