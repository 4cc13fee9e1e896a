"""Spec: what an exception that nobody catches says, and with what the job ends.

In this process, which ends only as far as it says so; ``test_initialization.py`` has jobs.
"""

import fcntl
import io
import os
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from smp.job import job_end
from smp.job.bootstrap import OverMPI
from smp.job.config import ConfigError
from smp.job.job_end import Watch
from smp.start import initialization


class Ended(BaseException):
    """In place of the end of the process."""


class Rank:
    """A rank of a job of two, or one, with its exception hooks."""

    def __init__(self, size: int, failed_first: str = "") -> None:
        self.codes: list[int] = []
        self.boot: Any = SimpleNamespace(
            rank=size - 1,
            size=size,
            local_rank=0,
            host=0,
            allgather_bytes=lambda mine: [mine],
            barrier=lambda: None,
        )
        self.watch = Watch(self.boot)
        if failed_first:
            assert self.watch.first.claim(0, failed_first) == (0, True)
            self.watch.first.told()

    def end(self, boot: Any, code: int) -> None:
        assert boot is self.boot
        self.codes.append(code)
        raise Ended

    def fails(self, error: BaseException) -> None:
        """As the main thread does."""
        try:
            raise error
        except BaseException as raised:  # noqa: BLE001 - any kind
            caught = raised
        sys.excepthook(type(caught), caught, caught.__traceback__)


@pytest.fixture
def begin(monkeypatch):
    """Begins a rank; all is as before when the test is over."""
    begun: list[Rank] = []
    for hooks in (sys, threading):
        monkeypatch.setattr(hooks, "excepthook", hooks.__excepthook__)
    monkeypatch.setattr(job_end, "is_interactive", lambda: False)

    def rank(size: int, failed_first: str = "") -> Rank:
        begun.append(Rank(size, failed_first))
        monkeypatch.setattr(job_end, "end_all_ranks", begun[-1].end)
        begun[-1].watch.start()
        return begun[-1]

    yield rank
    for one in begun:
        one.watch.stop()


def test_the_first_to_fail_shows_its_traceback_and_ends_the_job(begin, capsys):
    rank = begin(2)
    with pytest.raises(Ended):
        rank.fails(ValueError("no good"))

    said = capsys.readouterr().err
    assert said.startswith("Traceback") and "ValueError: no good" in said
    assert said.endswith("smp: rank 1 of 2: not caught; ending all ranks\n")
    assert rank.codes == [1]


@pytest.mark.parametrize(
    ("error", "told", "code"),
    [
        (ConfigError("no such option"), "ConfigError: no such option (at {at})", 1),
        (KeyboardInterrupt(), "interrupted at {at}", 130),
    ],
)
def test_what_says_enough_by_itself_is_one_line(begin, capsys, error, told, code):
    rank = begin(2)
    with pytest.raises(Ended):
        rank.fails(error)

    said = capsys.readouterr().err
    line = Rank.fails.__code__.co_firstlineno + 3
    assert said == f"smp: rank 1 of 2: {told.format(at=f'{__file__}:{line}')}\n"
    assert rank.codes == [code]


@pytest.mark.parametrize("error", [ValueError("no\ngood"), ConfigError("mine")])
def test_who_fails_later_by_something_else_says_a_line(begin, capsys, error):
    rank = begin(2, failed_first="what rank 0 has seen")
    with pytest.raises(Ended):
        rank.fails(error)

    first = str(error).splitlines()[0]
    told = f"smp: rank 1 of 2, after rank 0 failed: {type(error).__name__}: {first}\n"
    assert capsys.readouterr().err == told
    assert rank.codes == [1]


def test_who_fails_later_by_the_same_says_nothing(begin, capsys):
    rank = begin(2, failed_first="KeyboardInterrupt")
    with pytest.raises(Ended):
        rank.fails(KeyboardInterrupt())

    assert capsys.readouterr().err == "" and rank.codes == [130]


def test_a_hook_of_the_scripts_own_shows_what_it_wants(begin, capsys, monkeypatch):
    seen: list[tuple] = []
    monkeypatch.setattr(sys, "excepthook", lambda *given: seen.append(given))
    rank, error = begin(2), ConfigError("no such option")
    with pytest.raises(Ended):
        rank.fails(error)

    assert seen == [(ConfigError, error, error.__traceback__)]
    assert capsys.readouterr().err == "smp: rank 1 of 2: not caught; ending all ranks\n"


def test_one_rank_alone_and_a_forked_child_end_by_themselves(begin, capsys, monkeypatch):
    alone = begin(1)
    assert threading.excepthook is threading.__excepthook__
    alone.fails(ConfigError("no such option"))
    assert capsys.readouterr().err.startswith("smp: ConfigError: no such option (at ")
    alone.fails(ValueError("no good"))
    assert "ValueError: no good" in capsys.readouterr().err
    alone.watch.stop()

    child = begin(2)
    monkeypatch.setattr(os, "getpid", lambda: child.watch.pid + 1)
    child.fails(ConfigError("no such option"))
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and "smp: rank" not in said
    assert alone.codes == child.codes == []


def in_a_thread(rank: Rank, target: Any) -> None:
    """Run it, and have the exception hook's own end stay in the thread."""
    hook = threading.excepthook

    def ends(args: Any) -> None:
        with suppress(Ended):
            hook(args)

    threading.excepthook = ends
    try:
        thread = threading.Thread(target=target, name="mine")
        thread.start()
        thread.join()
    finally:
        threading.excepthook = hook


def test_a_thread_that_other_ranks_wait_for_ends_the_job(begin, capsys):
    rank = begin(2)
    in_a_thread(rank, lambda: 1 // 0)
    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said and "smp: rank" not in said and rank.codes == []

    code: dict[str, Any] = {"__name__": "smp.of_a_test"}
    exec("def fails(): 1 // 0", code)
    in_a_thread(rank, code["fails"])
    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said
    assert said.endswith("smp: rank 1 of 2: not caught in thread 'mine'; ending all ranks\n")
    assert rank.codes == [1]


def test_what_torch_collects_is_said_at_once(begin, monkeypatch):
    """Its own hook puts a StringIO in the place of stderr."""
    told = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", told)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    rank = begin(2)
    with pytest.raises(Ended):
        rank.fails(ValueError("no good"))

    assert "not caught" in told.getvalue() and sys.stderr.getvalue() == ""


def test_hooks_that_a_script_has_put_around_ours_are_left_alone(begin, monkeypatch):
    rank = begin(2)
    assert sys.excepthook != sys.__excepthook__
    rank.watch.stop()
    assert (sys.excepthook, threading.excepthook) == (
        sys.__excepthook__,
        threading.__excepthook__,
    )

    rank = begin(2)

    def own(*given: Any) -> None: ...

    monkeypatch.setattr(sys, "excepthook", own)
    monkeypatch.setattr(threading, "excepthook", own)
    rank.watch.stop()
    assert sys.excepthook is threading.excepthook is own
    rank.watch.stop()  # again


@pytest.mark.parametrize("how", ["prompt", "flag", "notebook", "script"])
def test_at_a_prompt_or_in_a_notebook_an_exception_is_an_answer(how, monkeypatch):
    """... and not an end: no hook is there."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch's may be there
    monkeypatch.delattr(sys, "ps1", raising=False)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    if how == "prompt":
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    elif how == "flag":
        monkeypatch.setattr(sys, "flags", SimpleNamespace(interactive=1))
    elif how == "notebook":
        monkeypatch.setitem(sys.modules, "ipykernel", job_end)
    watch = Rank(2).watch
    watch.start()
    try:
        assert (sys.excepthook == sys.__excepthook__) is (how != "script")
    finally:
        watch.stop()


@pytest.mark.parametrize("stream", [None, "closed", "open"])
def test_the_end_of_all_ranks_flushes_what_was_said(stream, monkeypatch):
    """... as far as there is a stream; without MPI the process ends by itself."""
    out = io.StringIO()
    flushed: list[int] = []
    out.flush = lambda: flushed.append(1)
    if stream == "closed":
        out.close()
        del out.flush
    monkeypatch.setattr(sys, "stdout", None if stream is None else out)
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)

    job_end.end_all_ranks(SimpleNamespace(), 7)

    assert codes == [7] and flushed == ([1] if stream == "open" else [])


def test_over_mpi_the_end_is_that_of_all_its_ranks(monkeypatch):
    codes: list[tuple] = []
    comm = SimpleNamespace(Abort=lambda code: codes.append(("MPI", code)))

    class OverMPI(SimpleNamespace): ...

    monkeypatch.setattr(job_end, "OverMPI", OverMPI)
    monkeypatch.setattr(os, "_exit", lambda code: codes.append(("process", code)))

    job_end.end_all_ranks(OverMPI(comm=comm), 7)

    assert codes[0] == ("MPI", 7)


def test_without_stderr_nothing_is_said(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    job_end.say("to nobody")


def is_held_for_others(fd: int) -> bool:
    """Whether another process would have to wait for the first failure to be shown."""
    child = os.fork()
    if child == 0:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, job_end.TELLING)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_who_failed_first_holds_up_the_others_until_it_is_shown(begin, capsys):
    rank = begin(2)
    fd = rank.watch.first._fd
    held: list[bool] = []
    shows = rank.watch.previous[0]

    def show(*given: Any) -> None:
        held.append(is_held_for_others(fd))
        shows(*given)

    rank.watch.previous = (show, rank.watch.previous[1])
    assert not is_held_for_others(fd)
    with pytest.raises(Ended):
        rank.fails(ValueError("no good"))

    assert held == [True] and not is_held_for_others(fd)
    rank.watch.stop()
    with pytest.raises(OSError):
        os.fstat(fd)


@pytest.mark.parametrize("over_mpi", [False, True])
@pytest.mark.parametrize("failed", [None, RuntimeError, ConfigError])
def test_an_init_that_failed_leaves_the_hooks_where_they_end_the_job(over_mpi, failed):
    """Over MPI, and where all ranks would say the same; until the next init, or shutdown."""
    initialization._stop_failed()
    stopped: list[int] = []
    boot = OverMPI.__new__(OverMPI) if over_mpi else SimpleNamespace()
    watch: Any = SimpleNamespace(boot=boot, stop=lambda: stopped.append(1))
    initialization._end_watch(watch, failed)
    stays = failed is not None and (over_mpi or failed is ConfigError)
    assert stopped == ([] if stays else [1])
    initialization.shutdown()
    initialization.shutdown()
    assert stopped == [1]


def test_a_line_tells_where_the_script_itself_was(begin, capsys):
    """Not in a function of a library that it called, nor in what calls the script."""
    begin(2)
    code: dict[str, Any] = {"__name__": "__main__", "error": ConfigError("no such option")}
    library: dict[str, Any] = {"__name__": "smp.of_a_test"}
    exec(compile("def init(error):\n raise error", "library.py", "exec"), library)
    exec(compile("def run():\n\n\n init(error)", "train.py", "exec"), code)
    code["init"] = library["init"]
    try:
        code["run"]()
    except ConfigError as error:
        with pytest.raises(Ended):
            sys.excepthook(type(error), error, error.__traceback__)
    assert capsys.readouterr().err.endswith("no such option (at train.py:4)\n")


def test_a_thread_of_a_forked_child_ends_nothing(begin, capsys, monkeypatch):
    rank = begin(2)
    monkeypatch.setattr(os, "getpid", lambda: rank.watch.pid + 1)
    code: dict[str, Any] = {"__name__": "smp.of_a_test"}
    exec("def fails(): 1 // 0", code)
    in_a_thread(rank, code["fails"])
    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said and "smp: rank" not in said and rank.codes == []


@pytest.mark.parametrize(
    ("module", "took"),
    [
        ("smp", True),
        ("smp.execution.steps", True),
        ("smpeg", False),
        ("torch.distributed", True),
        ("torch.distributed.distributed_c10d", True),
        ("torch.distributed_tools", False),
        ("torch", False),
        ("torch.distributions", False),
        ("mpi4py", True),
        ("mpi4py.MPI", True),
        ("__main__", False),
        (None, False),
    ],
)
def test_who_waits_for_other_ranks_is_in_a_module_that_does(module, took):
    code: dict[str, Any] = {"__name__": module}
    exec("def fails(): 1 // 0", code)
    try:
        code["fails"]()
    except ZeroDivisionError as error:
        assert job_end.took_part(error.__traceback__) is took
    assert not job_end.took_part(None)


def test_another_file_under_the_number_of_the_first_ranks_is_left_alone(tmp_path):
    """Numbers of processes may mean others here."""
    path = tmp_path / "file"
    path.touch()
    known = job_end._file_of(str(path))
    assert job_end._open_of(str(path), f"{known}0") is None
    assert job_end._open_of(str(tmp_path / "none"), known) is None
    fd = job_end._open_of(str(path), known)
    assert fd is not None and fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.pwrite(fd, b"x", 0)
    os.close(fd)


def test_where_there_is_no_file_every_rank_is_the_first(begin, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    first = begin(2).watch.first
    assert first.claim(1, "x") == (1, True)
    first.told()
    first.wait_until_told()
    first.close()
