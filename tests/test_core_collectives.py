"""Spec: the core's collectives and messages as Python has them, csrc/python/collectives.

Two ranks are two objects of this process, each with a thread of its own; they go by the numbers
10 and 11.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import DistBackendError

from smp import _core
from tests import heap

NUMBERS = [10, 11]
LIMIT_S = 60.0
SECRET = "a secret of both"
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]


def on_both(do: Callable[[int], Any]) -> list:
    """What it returned, or raised, on either rank."""

    def done(rank: int) -> Any:
        try:
            return do(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(done, range(2), timeout=LIMIT_S))


def make_comms(*transports: str) -> list:
    return [_core.Comm(r, NUMBERS, 1 << 20, transports[r], None, SECRET) for r in range(2)]


@contextmanager
def ranks() -> Iterator[list]:
    """The comms of both, which are connected."""
    comms = make_comms("shm", "shm")
    cards = [comm.card() for comm in comms]
    try:
        assert on_both(lambda r: comms[r].connect(cards, 60_000)) == [None, None]
        yield comms
    finally:
        for comm in comms:
            comm.close()


@contextmanager
def groups() -> Iterator[list]:
    """One group, as both have it."""
    with ranks() as comms:
        made = on_both(lambda r: _core.Group(comms[r], [0, 1], 5, "mine", LIMIT_S))
        try:
            yield made
        finally:
            for group in made:
                group.close()


@pytest.fixture(scope="module")
def mine() -> Iterator[Any]:
    """A rank's group, in which nothing is run."""
    with groups() as pair:
        yield pair[0]


def call(
    group,
    operation: str,
    ins: list | None,
    outs: list | None,
    *,
    reduction: str = "sum",
    root: int = 0,
    counts: list | None = None,
    out_counts: list | None = None,
    timeout_s: float = 0.0,
    run: bool = True,
) -> Any:
    number = _core.operations[operation]
    arguments = (number, ins, outs, _core.reductions[reduction], root, 1.0)
    do = group.run if run else group.work_item
    return do(*arguments, counts, out_counts, timeout_s)


# ----------------------------------------------------------------------------- messages


def filled(count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bits that the dtype may have."""
    if dtype is torch.bool:
        return torch.arange(count) % 3 == seed % 3
    size = torch.empty(0, dtype=dtype).element_size()
    bits = (torch.arange(count * size) * 7 + seed).to(torch.uint8)
    return bits.view(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_a_message_of_any_dtype_and_size_arrives_bit_by_bit():
    with groups() as (mine, theirs):
        for number, dtype in enumerate(DTYPES):
            for count in (0, 1, 5, 40_000):
                sent = filled(count, dtype, number)
                got = torch.empty_like(sent)
                _core.send(mine, 1, 3, sent)
                receipt = _core.receive(theirs, 0, 3, got)
                assert receipt.wait(LIMIT_S), (dtype, count)
                receipt.check()
                assert receipt.source() == 0
                assert same(got, sent), (dtype, count)


def test_a_rank_may_send_to_itself():
    with groups() as (_, theirs):
        for count in (0, 3, 40_000):
            got = torch.zeros(count)
            _core.send(theirs, 1, 9, filled(count, torch.float32))
            receipt = _core.receive(theirs, _core.ANY_SOURCE, 9, got)
            assert receipt.wait(LIMIT_S)
            assert receipt.source() == 1
            assert same(got, filled(count, torch.float32))


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), max_size=40), st.randoms())
def test_receives_take_what_was_sent_with_their_tag_in_its_order(sends, shuffle):
    """From whichever rank, in whatever order they are posted, before the sends or after."""
    with groups() as pair:
        wanted = list(sends)
        shuffle.shuffle(wanted)
        early = wanted[: len(wanted) // 2]
        posted = []

        def post(source: int, tag: int) -> None:
            got = torch.full((1,), -1)
            posted.append((source, tag, got, _core.receive(pair[1], source, tag, got)))

        for source, tag in early:
            post(source, tag)
        for number, (source, tag) in enumerate(sends):
            _core.send(pair[source], 1, tag, torch.tensor([number]))
        for source, tag in wanted[len(early) :]:
            post(source, tag)
        for key in set(sends):
            numbers = [n for n, one in enumerate(sends) if one == key]
            mine = [(got, receipt) for s, t, got, receipt in posted if (s, t) == key]
            assert all(receipt.wait(LIMIT_S) for _, receipt in mine)
            assert [got.item() for got, _ in mine] == numbers


@pytest.mark.parametrize("how", ["withdrawn", "forgotten"])
def test_what_comes_for_a_receive_that_is_given_up_is_the_next_ones(how):
    """Nothing goes into its tensor any more."""
    with groups() as (mine, theirs):
        first, second = torch.zeros(2), torch.zeros(2)
        receipt = _core.receive(theirs, 0, 0, first)
        assert not receipt.is_over()
        if how == "withdrawn":
            assert not receipt.withdraw()
        else:
            del receipt
            gc.collect()
        _core.send(mine, 1, 0, torch.tensor([1.0, 2.0]))
        later = _core.receive(theirs, 0, 0, second)
        assert later.wait(LIMIT_S)
        assert later.withdraw()  # it is over after all
        assert second.tolist() == [1, 2] and first.tolist() == [0, 0]


def test_a_receive_keeps_its_tensor():
    with groups() as (_, theirs):
        got = torch.zeros(2)
        kept = weakref.ref(got)
        receipt = _core.receive(theirs, 0, 0, got)
        del got
        gc.collect()
        assert kept() is not None
        del receipt
        gc.collect()
        assert kept() is None


@pytest.mark.parametrize(
    ("sent", "wanted", "words"),
    [
        (torch.ones(3), torch.ones(4), "3 float32, rank 11 wants 4 float32"),
        (torch.ones(4), torch.ones(4).int(), "4 float32, rank 11 wants 4 int32"),
        (torch.ones(2, dtype=torch.complex64), torch.ones(4), "2 complex64, .* 4 float32"),
        (torch.ones(2).to(torch.int16), torch.ones(2).to(torch.uint16), "2 int16, .* 2 uint16"),
        (
            torch.ones(2).to(torch.float8_e4m3fn),
            torch.ones(2).to(torch.float8_e5m2),
            "2 float8_e4m3fn, .* 2 float8_e5m2",
        ),
    ],
)
def test_a_message_of_another_kind_says_both(sent, wanted, words):
    with groups() as (mine, theirs):
        before = wanted.clone()
        receipt = _core.receive(theirs, 0, 4, wanted)
        _core.send(mine, 1, 4, sent)
        assert receipt.wait(LIMIT_S)
        said = rf"group 'mine': receive \(tag 4\) from rank 10: rank 10 sent {words}"
        with pytest.raises(DistBackendError, match=said):
            receipt.check()
        assert same(wanted, before)


def test_who_has_left_is_named_to_who_sends_and_receives():
    with ranks() as comms:
        mine, theirs = on_both(lambda r: _core.Group(comms[r], [0, 1], 5, "mine", LIMIT_S))
        early = _core.receive(mine, 1, 2, torch.zeros(1))
        _core.send(theirs, 0, 1, torch.ones(1))
        theirs.close()
        comms[1].close()

        got = torch.zeros(1)
        last = _core.receive(mine, 1, 1, got)  # it was sent before
        assert last.wait(LIMIT_S) and got.item() == 1
        assert early.wait(LIMIT_S)
        whole = (
            r"group 'mine': receive \(tag 2\) from rank 11: rank 11 has left \[SMP_ERR_CLOSED"
        )
        with pytest.raises(DistBackendError, match=whole):
            early.check()
        late = _core.receive(mine, _core.ANY_SOURCE, 2, torch.zeros(1))
        assert late.wait(LIMIT_S)
        with pytest.raises(DistBackendError, match="from any rank: all ranks have left"):
            late.check()
        for count in (1, 40_000):
            with pytest.raises(
                DistBackendError,
                match=r"group 'mine': send \(tag 7\) to rank 11: rank 11 has left \[SMP",
            ):
                _core.send(mine, 1, 7, torch.zeros(count))
        mine.close()


def test_a_receive_that_waits_says_for_what():
    with groups() as (mine, _):
        tensor = torch.zeros(1)
        one = _core.receive(mine, 1, 6, tensor)
        assert one.describe() == "group 'mine': receive (tag 6) from rank 11"
        assert not one.wait(0.001)
        any_rank = _core.receive(mine, _core.ANY_SOURCE, 6, tensor)
        assert any_rank.describe() == "group 'mine': receive (tag 6) from any rank"


def test_a_message_is_a_dense_tensor_in_host_memory():
    with groups() as (mine, _):
        for tensor in (torch.zeros(2, 3).t(), torch.zeros(4)[::2], torch.zeros(2).expand(3, 2)):
            for do in (_core.send, _core.receive):
                with pytest.raises(BufferError, match="not a dense tensor in host memory"):
                    do(mine, 1, 0, tensor)
        with pytest.raises(TypeError, match="a tensor is wanted, not int"):
            _core.send(mine, 1, 0, 3)
        # Strides of what is empty, and of axes of one element, mean nothing.
        _core.send(mine, 1, 0, torch.zeros(0, 3).t())
        _core.send(mine, 1, 0, torch.zeros(4, 8)[:, :1].t()[:, :1])


# --------------------------------------------------------------------------- what fits


ELEMENTS = "an input of {} and an output of {} elements do not go together"


@pytest.mark.parametrize(
    ("operation", "sizes", "options"),
    [
        ("all-reduce", (4, 5), {}),
        ("broadcast", (4, 5), {}),
        ("reduce", (4, 5), {}),
        ("reduce-scatter", (8, 3), {}),
        ("reduce-scatter", (8, 4), {"counts": [3, 5]}),
        ("reduce-scatter", (9, 3), {"counts": [3, 5]}),
        ("all-gather", (4, 7), {}),
        ("all-gather", (4, 8), {"counts": [3, 5]}),
        ("all-gather", (3, 9), {"counts": [3, 5]}),
        ("gather", (4, 7), {}),
        ("scatter", (7, 4), {}),
        ("all-to-all", (4, 6), {}),
        ("all-to-all", (5, 5), {}),
        ("all-to-all", (4, 4), {"counts": [2, 2], "out_counts": [1, 2]}),
        ("all-to-all", (4, 4), {"counts": [2, 1], "out_counts": [2, 2]}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_sizes_that_do_not_go_together_are_refused(mine, operation, sizes, options, dtype):
    """Before anybody waits; the numbers are of elements."""
    ins, outs = (torch.ones(n, dtype=dtype) for n in sizes)
    words = f"group 'mine' of 2 ranks: {operation}: {ELEMENTS.format(*sizes)}"
    with pytest.raises(ValueError, match=words):
        call(mine, operation, [ins], [outs], **options, run=False)


def test_what_is_no_part_of_an_operation_may_have_any_size():
    """The root alone gives to a scatter, and gets from a gather."""
    with groups() as pair:
        four, eight, odd = torch.ones(4), torch.arange(8.0), torch.zeros(3)

        def both(operation: str, at_root: tuple, elsewhere: tuple) -> list:
            sides = [at_root, elsewhere]
            return on_both(lambda r: call(pair[r], operation, *([x] for x in sides[r])))

        got = torch.zeros(8)
        assert both("gather", (four, got), (four, odd)) == [None, None]
        assert got.eq(1).all()
        last = torch.zeros(4)
        assert both("scatter", (eight, torch.zeros(4)), (odd, last)) == [None, None]
        assert last.tolist() == [4, 5, 6, 7]
        with pytest.raises(ValueError, match="gather: an input of 4 and an output of 3"):
            call(pair[0], "gather", [four], [odd], run=False)
        with pytest.raises(ValueError, match="scatter: an input of 3 and an output of 4"):
            call(pair[1], "scatter", [odd], [four], root=1, run=False)


@pytest.mark.parametrize("into", [torch.int32, torch.complex64, torch.uint16])
def test_dtypes_that_differ_are_refused(mine, into):
    ins = torch.ones(4, dtype=torch.int16 if into is torch.uint16 else torch.float32)
    for operation in ("all-gather", "broadcast"):
        out = torch.ones(8 if operation == "all-gather" else 4, dtype=into)
        said = f"group 'mine': {operation}: the input and the output have other dtypes"
        with pytest.raises(TypeError, match=said):
            call(mine, operation, [ins], [out], run=False)


def is_defined(dtype: torch.dtype, reduction: str) -> bool:
    if dtype in (torch.int16, torch.uint16):
        return False
    if dtype.is_complex:
        return reduction in ("sum", "avg", "premultiplied sum")
    if dtype.is_floating_point:
        return reduction not in ("band", "bor", "bxor")
    if dtype is torch.bool:
        return reduction not in ("avg", "premultiplied sum")
    return reduction != "premultiplied sum"


@pytest.mark.parametrize("operation", ["all-reduce", "reduce", "reduce-scatter"])
def test_a_reduction_that_a_dtype_does_not_have_is_refused(mine, operation):
    for dtype in DTYPES:
        ins = torch.ones(4).to(dtype)
        outs = torch.ones(2 if operation == "reduce-scatter" else 4).to(dtype)
        for reduction in _core.reductions:
            said = rf"'mine': {operation} \({reduction}\) of {dtype} is not defined"
            undefined = pytest.raises(TypeError, match=said)
            with nullcontext() if is_defined(dtype, reduction) else undefined:
                call(mine, operation, [ins], [outs], reduction=reduction, run=False)


def test_split_sizes_that_make_no_sense_are_named(mine):
    four = torch.ones(4)
    for given_counts, words in (
        ([2, -1], "size 1 is -1, which is negative"),
        ([4], "1 sizes, one for each rank is wanted"),
    ):
        for which in ("counts", "out_counts"):
            options = {"counts": [2, 2], "out_counts": [2, 2], which: given_counts}
            with pytest.raises(ValueError, match=f"all-to-all: {words}"):
                call(mine, "all-to-all", [four], [four.clone()], **options, run=False)
    with pytest.raises(TypeError, match="integer"):
        call(mine, "all-to-all", [four], [four.clone()], counts=[2, "2"], run=False)


# -------------------------------------------------------------------------- work items


def test_a_work_item_from_its_issue_to_its_end():
    with groups() as (mine, theirs):
        tensor = torch.ones(4)
        item = call(mine, "all-reduce", None, [tensor], run=False)
        assert not item.is_over() and mine.issued() == 0
        item.issue("its owner")
        with pytest.raises(RuntimeError, match="issued already"):
            item.issue("its owner")
        assert not item.wait(0.001) and not item.is_done()
        assert (
            item.describe() == "group 'mine': all-reduce 1 (sum) of 4 float32 waits for rank 11"
        )
        assert (mine.issued(), theirs.issued()) == (1, 0)

        call(theirs, "all-reduce", None, [torch.ones(4)])
        assert item.wait(LIMIT_S) and item.is_over() and item.is_done()
        item.check()
        assert item.describe() is None
        assert tensor.tolist() == [2] * 4
        assert [group.sequence() for group in (mine, theirs)] == [1, 1]
        assert mine.use()[:2] == theirs.use()[:2] == (1, 16)


def test_owners_of_work_items_come_in_the_order_of_their_end():
    with ranks() as comms:
        pair = on_both(lambda r: _core.Group(comms[r], [0, 1], 5, "mine", LIMIT_S))
        for number in range(3):
            call(pair[0], "barrier", None, None, run=False).issue(number)
        call(pair[0], "barrier", None, None, run=False)  # it is never issued
        for _ in range(3):
            call(pair[1], "barrier", None, None)
        assert [comms[0].finished() for _ in range(3)] == [0, 1, 2]
        comms[0].stop()
        assert comms[0].finished() is None
        for group in pair:
            group.close()


def test_the_end_of_a_group_ends_what_waits_in_it():
    with groups() as (mine, _):
        item = call(mine, "all-reduce", None, [torch.ones(4)], run=False)
        item.issue("nobody")
        mine.close()
        assert item.wait(LIMIT_S)
        with pytest.raises(DistBackendError, match=r"group 'mine': closed \[SMP_ERR_CLOSED\]"):
            item.check()
        with pytest.raises(DistBackendError, match="group 'mine' was destroyed"):
            call(mine, "barrier", None, None)
        assert (mine.sequence(), mine.issued(), mine.use()[:2]) == (0, 0, (0, 0))
        assert not mine.is_on_one_host()


def test_a_time_out_of_one_call_says_who_is_missing_and_what_to_do():
    with groups() as (mine, _):
        said = (
            r"'mine': broadcast 1 of 4 float32 with root 0: timed out after \d.\d s without "
            r"rank 11; a longer timeout can be given to the group \[SMP_ERR_TIMED_OUT\]"
        )
        item = call(mine, "broadcast", None, [torch.ones(4)], timeout_s=0.01, run=False)
        item.issue("nobody")
        assert item.wait(LIMIT_S)
        with pytest.raises(DistBackendError, match=said):
            item.check()
        with pytest.raises(DistBackendError, match="the group ended before: broadcast 1 of 4"):
            call(mine, "broadcast", None, [torch.ones(4)])


def test_a_root_that_is_no_member_is_refused_on_this_rank_alone():
    with groups() as (mine, theirs):
        for root in (-1, 2):
            with pytest.raises(
                ValueError, match="no such operation, .* root or count .SMP_ERR_IN"
            ):
                call(mine, "broadcast", None, [torch.ones(4)], root=root)
        assert on_both(lambda r: call((mine, theirs)[r], "barrier", None, None)) == [None] * 2


def test_a_name_changes_before_the_first_operation_alone():
    with groups() as (mine, theirs):
        on_both(lambda r: (mine, theirs)[r].rename("renamed"))
        with pytest.raises(ValueError, match="group 'renamed' of 2 ranks"):
            call(mine, "gather", [torch.ones(1)], [torch.ones(1)], run=False)
        assert on_both(lambda r: call((mine, theirs)[r], "barrier", None, None)) == [None] * 2
        mine.rename("too late")
        with pytest.raises(ValueError, match="group 'renamed' of 2 ranks"):
            call(mine, "gather", [torch.ones(1)], [torch.ones(1)], run=False)


# ------------------------------------------------------------------------------- ranks


def test_a_pool_that_nobody_has_is_said_with_its_size():
    with pytest.raises(MemoryError, match="preparing the collectives.*1099511627776 MiB"):
        _core.Comm(0, NUMBERS, 1 << 60, "shm", None, SECRET)


def test_ranks_that_share_no_transport_are_told_so():
    comms = make_comms("shm", "tcp")
    cards = [comm.card() for comm in comms]
    for rank, said in enumerate(on_both(lambda r: comms[r].connect(cards, 60_000))):
        other = NUMBERS[1 - rank]
        assert isinstance(said, DistBackendError)
        assert str(said) == (
            f"smp: connecting rank {NUMBERS[rank]} to rank {other}: no transport reaches that "
            "rank [SMP_ERR_UNREACHABLE]"
        )
    for comm in comms:
        comm.close()


def test_cards_that_are_none_are_refused():
    [comm, other] = make_comms("shm", "shm")
    with pytest.raises(ValueError, match="needs 2 cards"):
        comm.connect([comm.card()], 1000)
    with pytest.raises(TypeError, match="bytes"):
        comm.connect([comm.card(), "text"], 1000)
    with pytest.raises(DistBackendError, match="connecting rank 10 to rank 11: bytes that no"):
        comm.connect([comm.card(), comm.card()], 1000)
    comm.close()
    other.close()


def test_what_is_asked_of_ranks_that_were_left_says_so():
    with groups() as (mine, _):
        receipt = _core.receive(mine, 1, 0, torch.zeros(1))
        with ranks() as [comm, _]:
            pass
        for ask in (comm.card, comm.peers, comm.pool, lambda: comm.transport(1)):
            with pytest.raises(RuntimeError, match="these ranks have been left"):
                ask()
        with pytest.raises(RuntimeError, match="these ranks have been left"):
            _core.Group(comm, [0, 1], 5, "late", 1.0)
        assert comm.finished() is None
        assert not receipt.is_over()


def test_ranks_are_not_left_while_groups_are_open():
    with ranks() as comms:
        made = on_both(lambda r: _core.Group(comms[r], [0, 1], 5, "mine", LIMIT_S))
        with pytest.raises(RuntimeError, match="1 groups are open"):
            comms[0].close()
        assert on_both(lambda r: call(made[r], "barrier", None, None)) == [None, None]
        for group in made:
            group.close()
            group.close()  # a second time does nothing


def test_transports_and_traffic_are_by_rank():
    with groups() as (mine, _), ranks() as [comm, _]:
        assert [comm.transport(r) for r in range(2)] == [None, "shm"]
        for rank in (-2, 2):
            with pytest.raises(ValueError, match=f"no rank {rank}"):
                comm.transport(rank)
        assert comm.peers() == [(None, 0, 0), ("shm", 0, 0)]
        assert mine.is_on_one_host()


def test_memory_of_the_pool_comes_back_when_its_tensor_goes():
    with ranks() as [comm, _]:
        size, high, blocks, fallbacks = comm.pool()
        assert (size, high, blocks, fallbacks) == (1 << 20, 0, 0, 0)
        for number in range(1, 40):  # many times what it holds
            tensor = comm.allocate(100_000)
            assert tensor.dtype is torch.uint8 and tensor.shape == (100_000,)
            tensor.fill_(7)
            _, high, blocks, fallbacks = comm.pool()
            assert (blocks, fallbacks) == (number, 0)
        assert 100_000 <= high <= 300_000
        assert comm.allocate(2 << 20).numel() == 2 << 20  # which does not fit
        assert comm.pool()[3] == 1


def test_what_was_refused_keeps_no_memory():
    four, nine = torch.ones(4), torch.ones(9)
    with groups() as (mine, theirs):

        def refused() -> None:
            for _ in range(20):
                for counts in (None, [1, -1], [2, 2]):
                    with pytest.raises(ValueError):
                        call(mine, "all-gather", [four], [nine], counts=counts, run=False)
                _core.send(mine, 1, 0, torch.ones(2000))
                receipt = _core.receive(theirs, 0, 0, four)
                assert receipt.wait(LIMIT_S)
                with pytest.raises(DistBackendError):
                    receipt.check()
                _core.receive(theirs, 0, 1, four)

        refused()
        before = heap.bytes_in_use()
        refused()
        assert heap.bytes_in_use() - before < 10_000
