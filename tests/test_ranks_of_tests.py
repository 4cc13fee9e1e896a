"""The test infrastructure itself: tests/ranks.py."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.conftest import sample
from tests.ranks import (
    FORK_SERVER,
    TESTS,
    RanksFailed,
    call_on_ranks,
    mpirun,
    on_ranks,
    team_of,
    wait_until_gone,
)

wide = pytest.mark.wide  # ranks are started anew


def rank_and_size() -> tuple[int, int]:
    return int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])


def own_pid() -> int:
    return os.getpid()


def fail_on(rank: int) -> None:
    assert rank_and_size()[0] != rank, "told to fail"


def wait_forever_on(rank: int) -> None:
    if rank_and_size()[0] == rank:
        threading.Event().wait()


def kill_itself_on(rank: int) -> None:
    if rank_and_size()[0] == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def change_the_environment() -> None:
    os.environ["LEFT_BEHIND"] = "1"


def left_behind() -> bool:
    return "LEFT_BEHIND" in os.environ


@on_ranks(1, 2)
@pytest.mark.parametrize("factor", [2, 3])
def test_a_test_runs_in_ranks_with_its_arguments(factor, tmp_path):
    rank, size = rank_and_size()

    assert 0 <= rank < size and size in (1, 2)
    assert factor in (2, 3) and tmp_path.is_dir()


def test_results_come_back_by_rank():
    assert call_on_ranks(2, rank_and_size) == [(0, 2), (1, 2)]


def test_ranks_are_started_once_per_size():
    assert call_on_ranks(2, own_pid) == call_on_ranks(2, own_pid)


def test_a_failure_names_the_rank_and_its_values_and_the_next_call_works():
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 of 2:.*told to fail\nassert 1 != 1"):
        call_on_ranks(2, fail_on, 1)

    assert len(call_on_ranks(2, own_pid)) == 2


def test_a_hang_shows_the_stack_of_the_rank_that_hangs_and_leaves_no_process(capfd):
    pids = call_on_ranks(2, own_pid)  # both have started
    launcher = team_of(2).process
    with pytest.raises(RanksFailed, match="rank 1: no answer within 3 s"):
        call_on_ranks(2, wait_forever_on, 1, timeout_s=3)

    assert "in wait_forever_on" in capfd.readouterr().out
    assert launcher.poll() is not None
    wait_until_gone(pids)


@wide
def test_a_dead_rank_is_noticed_long_before_the_deadline():
    with pytest.raises(RanksFailed, match=r"rank \d died"):
        call_on_ranks(2, kill_itself_on, 1, timeout_s=600)


def test_what_a_test_changes_in_the_environment_does_not_stay():
    call_on_ranks(2, change_the_environment)

    assert call_on_ranks(2, left_behind) == [False, False]


def test_mpirun_gives_exit_code_and_output(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print('hello'); sys.exit(3)")

    done = mpirun(2, script)

    assert done.returncode == 3
    assert "hello" in done.stdout


SEEN = """
import os, sys
print(sys.argv[1:], __name__, os.environ["GIVEN"], os.getcwd(), sys.path[0], flush=True)
raise ValueError("nobody catches this")
"""


def test_a_forked_rank_sees_and_shows_what_one_of_its_own_would(tmp_path):
    """Arguments, environment, folders; a traceback does not tell of the fork."""
    script = tmp_path / "script.py"
    script.write_text(SEEN)

    forked, own = (
        mpirun(1, script, "a", "b", env={"GIVEN": "x"}, fresh=fresh) for fresh in (False, True)
    )

    assert forked.stdout == own.stdout == f"['a', 'b'] __main__ x {os.getcwd()} {tmp_path}\n"
    assert forked.returncode == own.returncode != 0
    assert "fork_server" not in forked.stderr
    assert forked.stderr.count("ValueError: nobody catches this") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1])
def test_a_forked_process_and_the_one_that_asked_for_it_end_by_the_same_signal(
    number, tmp_path
):
    script = tmp_path / "script.py"
    script.write_text("import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()")
    for signal_the_child in (False, True):
        with subprocess.Popen(
            [*FORK_SERVER.command(), script], stdout=subprocess.PIPE, text=True
        ) as asks:
            child = int(asks.stdout.readline())
            os.kill(child if signal_the_child else asks.pid, number)
            assert asks.wait(60) == -number
        wait_until_gone([child])


class Case:
    """What `sample` looks at in a case."""

    def __init__(self, **params) -> None:
        self.callspec = SimpleNamespace(params=params)


def test_a_sample_of_cases_has_every_value_and_more_pairs_than_it_must():
    values = {"size": [1, 2, 3], "over": ["shm", "tcp"], "late": [False, True]}
    every = itertools.product(*values.values())
    cases = [Case(**dict(zip(values, case, strict=True))) for case in every]

    chosen = [case.callspec.params for case in sample(cases, 6)]

    assert len(chosen) == 6
    for name, own in values.items():
        assert {case[name] for case in chosen} == set(own)
    assert len({(case["size"], case["over"]) for case in chosen}) == 6
    assert [case.callspec.params for case in sample(cases, 9)][:6] == chosen  # stress goes on


INTERRUPTED = """
import os, signal
from tests.ranks import on_ranks

def test_a():
    from tests.ranks import TEAMS, call_on_ranks
    from tests.test_ranks_of_tests import own_pid
    print("pids", *call_on_ranks(1, own_pid), flush=True)
    os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
"""


@wide
@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_ranks_end_when_pytest_is(name, tmp_path):
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_interrupted.py").write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={
            **os.environ,
            "SIGNAL": name,
            "PYTHONPATH": str(TESTS.parent),
        },
        timeout=120,
    )

    [line] = [x for x in done.stdout.splitlines() if "pids" in x]
    [pid] = [int(word) for word in line.split("pids")[1].split()]
    wait_until_gone([pid])
