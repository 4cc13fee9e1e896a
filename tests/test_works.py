"""What an operation returns, with stand-ins for what the core carries out."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from smp.collectives import work as works
from smp.collectives.work import AllOf, Over, Received, Work


class Item:
    """Over when a test says so, or when the time that it takes has passed."""

    def __init__(self, clock: "Clock | None" = None, takes_s: float = float("inf")):
        self.clock, self.takes_s = clock, takes_s
        self.over, self.error, self.limits, self.withdrawn = False, None, [], 0
        self.words: str | None = "all-reduce 7"

    def wait(self, limit_s: float) -> bool:
        self.limits.append(limit_s)
        if self.clock is not None and not self.over:
            left_s = self.takes_s - self.clock.now_s
            self.over = left_s <= limit_s
            self.clock.now_s += min(left_s, limit_s)
        return self.over

    def is_over(self) -> bool:
        return self.over

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def describe(self) -> str | None:
        return self.words

    def withdraw(self) -> bool:
        """Whether it had come after all."""
        self.withdrawn += 1
        return self.over

    def source(self) -> int:
        return 5


class Clock:
    """A time that waiting moves."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Event:
    """Of a profile."""

    ended = 0

    def end(self) -> None:
        self.ended += 1


def test_what_is_left_to_do_is_done_once_when_the_operation_is_over():
    item, calls, event = Item(), [], Event()
    work = Work(item, [torch.ones(2)], lambda: calls.append(1))
    work.ends(event)
    assert not work.is_completed() and not work.is_success() and work.exception() is None
    assert calls == [] and event.ended == 0
    item.over = True
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.wait() and work.wait(timedelta(seconds=1)) and work.is_completed()
    work.synchronize()
    assert calls == [1] and event.ended == 1 and item.limits == [0, 1, 0]
    late = Event()
    work.ends(late)
    assert late.ended == 1
    work.result().clear()  # a list of the caller's own
    assert [t.tolist() for t in work.result()] == [[1, 1]]


def test_an_operation_that_failed_leaves_nothing_to_do_and_says_so_to_all_who_ask():
    item, calls, event = Item(), [], Event()
    work = Work(item, (), lambda: calls.append(1))
    work.ends(event)
    future = work.get_future()
    item.over, item.error = True, dist.DistBackendError("lost")
    for _ in range(2):
        with pytest.raises(dist.DistBackendError, match="lost"):
            work.wait()
    assert work.is_completed() and not work.is_success() and work.exception() is item.error
    assert calls == [] and event.ended == 1
    with pytest.raises(RuntimeError, match="lost"):
        future.wait()


def test_an_error_in_what_is_left_to_do_is_the_works():
    item = Item()
    item.over = True

    calls = []

    def fail() -> None:
        calls.append(1)
        raise LookupError("no room")

    work = Work(item, (), fail)
    for _ in range(2):
        with pytest.raises(LookupError, match="no room"):
            work.wait()
    assert calls == [1]  # it is not tried again
    assert work.is_completed() and not work.is_success()
    assert isinstance(work.exception(), LookupError)


def test_a_wait_that_ends_too_early_names_the_operation_and_may_come_again():
    item = Item()
    work = Work(item)
    with pytest.raises(dist.DistBackendError, match=r"all-reduce 7; not over after 2.5 s"):
        work.wait(timedelta(seconds=2.5))
    assert not work.is_completed()
    item.words = None  # nobody knows
    with pytest.raises(dist.DistBackendError, match="an operation; not over after 2.5 s"):
        work.wait(timedelta(seconds=2.5))
    assert not work.is_completed()
    item.over = True
    assert work.wait(timedelta(seconds=2.5))


@pytest.mark.parametrize("asked", ["before", "after"])
def test_a_future_is_one_and_has_the_results(asked):
    item, (result,) = Item(), [torch.arange(3)]
    work = Work(item, [result])
    future = work.get_future() if asked == "before" else None
    assert work.is_awaited == (asked == "before")
    item.over = True
    work.complete()
    future = future or work.get_future()
    assert work.get_future() is future and future.done()
    assert future.wait()[0] is result or torch.equal(future.wait()[0], result)
    assert not work.is_awaited


def test_what_was_over_at_once():
    event, result = Event(), torch.ones(1)
    over = Over([result])
    over.ends(event)
    assert event.ended == 1 and over.wait() and over.is_completed() and over.is_success()
    assert over.exception() is None and over.result() == [result]
    assert over.get_future().wait()[0].tolist() == [1]


def test_works_that_are_one_end_with_the_last_and_fail_with_the_first_that_did():
    items, event = [Item(), Item(), Item()], Event()
    together = AllOf([Work(item, [torch.tensor(n)]) for n, item in enumerate(items)])
    together.ends(event)
    for item in items[:2]:
        item.over = True
    assert not together.is_completed() and not together.is_success() and event.ended == 0
    items[1].error, items[2].error = LookupError("second"), LookupError("third")
    items[2].over = True
    assert together.is_completed() and not together.is_success() and event.ended == 1
    assert together.exception() is items[1].error
    assert [int(t) for t in together.result()] == [0, 1, 2]
    for wait in (together.wait, together.synchronize):
        with pytest.raises(LookupError, match="second"):
            wait()
    assert items[2].limits == []


def test_the_future_of_works_that_are_one_has_the_futures_of_all():
    items = [Item(), Item()]
    together = AllOf([Work(item, [torch.tensor(n)]) for n, item in enumerate(items)])
    future = together.get_future()
    for item, work in zip(items, together._works, strict=True):
        assert not future.done()
        item.over = True
        assert work.is_completed()
    assert [int(one.wait()[0]) for one in future.wait()] == [0, 1]


def dropped(work: list[Work]) -> Work:
    """What is kept of the only reference, which the list has."""
    number = id(work[0])
    work.clear()
    (kept,) = (one for one in works._dropped if id(one) == number)
    return kept


@pytest.mark.parametrize("error", [None, LookupError("lost")], ids=["good", "failed"])
def test_a_work_that_is_dropped_stays_for_a_while_with_small_results_alone(error):
    """C++ may still ask it.  What the frames of a traceback hold is let go."""
    small, large, sparse = torch.ones(1000), torch.ones(2000), torch.eye(2).to_sparse()
    for results, stay in (
        ([small], True),
        ([large], False),
        ([small, small.clone()], False),
        ([sparse], False),
    ):
        item = Item()
        item.over, item.error = True, error
        kept = dropped([Work(item, results)])
        assert error is None or error.__traceback__ is None
        assert [*map(id, kept.result())] == ([*map(id, results)] if stay else [])
        assert kept.is_completed() and kept.exception() is error
        assert kept.is_success() == (error is None) and (error is not None or kept.wait())
    works.forget_dropped()
    assert kept not in works._dropped


def received(
    item: Item, into: Tensor, filled: Tensor | None = None, report_s: float = 0
) -> Received:
    """With 10 s for a wait, in a group of the core's ranks 3, 5 and 8."""
    filled = into if filled is None else filled
    return Received(item, into, filled, 10.0, [3, 5, 8], (4, report_s))


def test_a_tensor_that_arrives_in_a_copy_is_brought_to_its_place():
    item, wide = Item(), torch.zeros(4)
    work = received(item, wide[::2], torch.tensor([7.0, 8.0]))
    assert wide.sum() == 0
    item.over = True
    assert work.wait() and wide.tolist() == [7, 0, 8, 0]
    assert work.source_rank() == 1 and work.result()[0].tolist() == [7, 8]


def test_a_receive_in_vain_is_withdrawn_unless_the_caller_set_the_time():
    item = Item()
    work = received(item, torch.zeros(1))
    with pytest.raises(dist.DistBackendError, match="all-reduce 7: timed out after 0.5 s"):
        work.wait(timedelta(seconds=0.5))
    assert item.withdrawn == 0 and not work.is_completed()
    with pytest.raises(dist.DistBackendError, match="timed out after 10 s") as first:
        work.wait()
    assert item.withdrawn == 1 and item.limits == [0.5, 10.0]
    with pytest.raises(dist.DistBackendError) as again:
        work.wait()
    assert again.value is first.value and work.is_completed() and not work.is_success()
    assert item.limits == [0.5, 10.0]


def test_a_message_that_comes_at_the_last_moment_is_taken():
    item = Item()
    item.wait = lambda limit_s: False
    item.over = True
    assert received(item, torch.zeros(1)).wait() and item.withdrawn == 1


@pytest.mark.parametrize(
    "report_s, takes_s, told",
    [
        (0, 9.0, []),  # never
        (2.0, 1.5, []),
        (2.0, 9.0, ["2.0", "4.0", "8.0"]),
        (3.0, 60.0, ["3.0", "6.0"]),  # it has 10 s
        (20.0, 60.0, []),
    ],
)
def test_a_receive_that_takes_long_is_reported_at_twice_the_time(
    report_s, takes_s, told, capfd, monkeypatch
):
    clock = Clock()
    monkeypatch.setattr(works, "time", SimpleNamespace(monotonic=clock.monotonic))
    work = received(Item(clock, takes_s), torch.zeros(1), report_s=report_s)
    if takes_s < 10:
        assert work.wait() and clock.now_s == pytest.approx(takes_s)
    else:
        with pytest.raises(dist.DistBackendError, match="timed out after 10 s"):
            work.wait()
        assert clock.now_s == pytest.approx(10)
    lines = capfd.readouterr().err.splitlines()
    assert lines == [f"smp: rank 4: all-reduce 7; for {s} s so far" for s in told]
