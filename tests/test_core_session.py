"""Spec: the core's session as Python has it, csrc/python/modules/session_binding.c: opened,
connected and closed in this process, whose other ranks do not exist or are of the collectives.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from smp import _core
from tests import heap

NAMES = ("pp_rank 0 of the test", "pp_rank 1 of the test")
SECRET = "a secret of both"


def opened(transports: str = "shm", names: tuple = NAMES, **options: Any) -> bytes:
    given = {
        "size": 2,
        "pipelines": 1,
        "pool": 1 << 20,
        "report_s": 0.0,
        "end_s": 0.0,
    } | options
    size, pipelines, pool, report_s, end_s = given.values()
    arguments = (0, size, pipelines, pool, 0, -1, transports, None, SECRET, report_s, end_s)
    return _core.open(*arguments, names)


@contextmanager
def session(**options: Any) -> Iterator[bytes]:
    """Its card."""
    card = opened(**options)
    try:
        yield card
    finally:
        _core.close()


def test_a_session_is_opened_once():
    with session():
        with pytest.raises(RuntimeError, match="the session is open already"):
            opened()
        assert _core.peers() == [(None, 0, 0)] * 2  # it still is
    assert _core.counters() == {}
    _core.close()  # once more
    with session():
        assert _core.counters()["lost"] == -1


def test_names_are_those_of_all_ranks():
    for names in (NAMES[:1], NAMES * 2):
        with pytest.raises(ValueError, match="needs the names of 2 ranks"):
            opened(names=names)
    with pytest.raises(TypeError):
        opened(names=(1, 2))
    with session():
        pass


def test_a_transport_that_is_none_is_refused_and_leaves_no_session():
    with pytest.raises(ValueError, match="preparing the communication: .*SMP_ERR_INVALID"):
        opened("pigeon")
    with session():
        pass


def test_ranks_that_share_no_transport_are_named():
    with session() as card:
        other = _core.Comm(1, [0, 1], 0, "tcp", None, SECRET)
        with pytest.raises(
            ConnectionError,
            match=f"no transport reaches {NAMES[1]} from {NAMES[0]} .comm_transports",
        ):
            _core.connect([card, other.card()], 60_000)
        other.close()


def test_a_card_that_no_rank_wrote_names_whose_it_should_be():
    with session() as card:
        for wrong in (b"", card, card[:-1], bytes(len(card))):
            with pytest.raises(
                ConnectionError,
                match=f"connecting {NAMES[0]} to {NAMES[1]}: .*SMP_ERR_MALFORMED",
            ):
                _core.connect([card, wrong], 1000)


def test_cards_are_bytes_of_every_rank():
    with session() as card:
        for cards in ([card], [card] * 3):
            with pytest.raises(ValueError, match="needs the cards of 2 ranks"):
                _core.connect(cards, 1000)
        with pytest.raises(TypeError, match="cards are bytes"):
            _core.connect([card, "text"], 1000)
    with pytest.raises(ValueError, match="needs the cards of"):
        _core.connect([b"", b""], 1000)  # of no session


def test_a_rank_that_never_comes_is_named_when_the_time_is_over():
    with session() as card:
        other = _core.Comm(1, [0, 1], 0, "shm", None, SECRET)
        with pytest.raises(ConnectionError, match=f"to {NAMES[1]}: .*SMP_ERR_TIMED_OUT"):
            _core.connect([card, other.card()], 10)
        other.close()


def test_what_is_configured_has_a_name_of_the_core():
    with pytest.raises(TypeError, match=r"configure\(\) has no 'unknown'"):
        _core.configure(unknown=1)
    with pytest.raises(TypeError):
        _core.configure()
    with pytest.raises(TypeError):
        _core.configure(1)


def test_modules_are_listed_with_their_owners():
    with session():
        for wrong in ((), [()], [(1, 2, 3, 4)], [(print, None, "path")]):
            with pytest.raises(TypeError):
                _core.set_entries(wrong)
        _core.set_entries([(print, None, "path", 0)])
        with pytest.raises(
            RuntimeError, match="only be called inside a function with @smp.step"
        ):
            _core.call_entry(0, ())
        for number in (-1, 1):
            with pytest.raises(RuntimeError, match="only be called inside"):
                _core.call_entry(number, ())


def test_seeds_are_mixed_from_both_numbers():
    mixed = {_core.mix(a, b) for a in range(30) for b in range(30)}
    assert len(mixed) == 30 * 30
    assert all(0 <= number < 2**64 for number in mixed)


def test_outside_a_step_there_is_no_task():
    assert _core.current() is None
    assert _core.task_number() is None
    assert _core.distributed_call("a.path") is None
    assert not _core.await_turn(0)
    with pytest.raises(RuntimeError, match="only be called inside a function with @smp.step"):
        _core.begin_backward()
    with pytest.raises(RuntimeError, match="distributed module 'a.path', .* runs outside it"):
        _core.line_up(1, 0, 0, 0, 0, "a.path")


def test_the_pool_has_the_size_that_was_asked_for():
    for megabytes in (1, 3):
        with session(pool=megabytes << 20):
            counters = _core.counters()
            assert counters["pool_size"] == megabytes << 20
            assert counters["pool_in_use"] == counters["pool_fallbacks"] == 0


@pytest.mark.skipif(
    any(name.startswith("MALLOC_") for name in os.environ), reason="the user's own heap"
)
def test_the_heap_keeps_its_pages_until_it_is_trimmed():
    """Of blocks up to 32 MiB, which torch would else get afresh in each step."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    _core.share_heap()
    before, blocks = heap.bytes_of_system(), []
    while heap.bytes_of_system() == before and len(blocks) < 50:
        blocks.append(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(20 << 20))))
    most = heap.bytes_of_system()
    assert most > before, "they have pages of their own"
    for block in blocks:
        libc.free(block)
    assert heap.bytes_of_system() == most
    _core.trim_heap()
    assert heap.bytes_of_system() < most
