"""An uncaught exception ends the whole job.

Without this, the other ranks would wait for the failed one: MPI's own clean-up at exit waits
for them, and they wait for messages of the failed rank.  The first rank of a host to fail
prints its traceback; a failure that follows from the first (a closed connection) prints one
line.
"""

import fcntl
import io
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr, suppress
from types import TracebackType
from typing import Any
from zlib import crc32

from smp.job.bootstrap import Bootstrap, OverMPI
from smp.job.config import ConfigError

# A thread's exception ends the job when it came through one of these: then other ranks
# may wait for the thread.  Other threads are the script's own affair.
COLLECTIVE = ("smp", "torch.distributed", "mpi4py")
CLAIM, TELLING = range(2)  # bytes of the first failure's file, each with a lock of its own
TELLING_S = 10.0  # the most for an exception hook of the script's to hold up the end
POLL_S = 0.01
EXIT_INTERRUPTED = 130  # a shell's code for a program ended by Ctrl-C


class FirstFailure:
    """A flag shared by the ranks of a host: the first rank to fail.

    The file has no name (memfd): the host's first rank makes it and the others open it through
    /proc.  So the job leaves no file behind.
    """

    def __init__(self, boot: Bootstrap) -> None:
        self._fd: int | None = None
        mine = ""
        if boot.local_rank == 0 and hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("smp-first-failure")
            mine = f"{boot.host} {os.getpid()} {self._fd} {_file_of(self._fd)}"
        for card in boot.allgather_bytes(mine.encode()):
            host, _, rest = card.decode().partition(" ")
            if self._fd is None and host == str(boot.host):
                pid, fd, file = rest.split(maxsplit=2)
                self._fd = _open_of(f"/proc/{pid}/fd/{fd}", file)
        boot.barrier()  # the first rank's file stays open until all have it

    def claim(self, rank: int, what: str) -> tuple[int, bool]:
        """The rank that failed first: this one, where no rank claimed before.

        The first rank holds up the others in `wait_until_told` until it calls `told`, or ends.

        Returns:
            the first rank, and whether its failure has the same text.
        """
        if self._fd is None:
            return rank, True
        mine = f"{rank} {crc32(what.encode())}"
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, CLAIM)
        try:
            if said := os.pread(self._fd, 64, 0).decode():
                first, _, same = said.partition(" ")
                return int(first), same == mine.split()[1]
            os.pwrite(self._fd, mine.encode(), 0)
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, TELLING)
            return rank, True
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, CLAIM)

    def told(self) -> None:
        """The first failure has been shown."""
        if self._fd is not None:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, TELLING)

    def wait_until_told(self) -> None:
        """Wait for the first rank to show its failure, or for TELLING_S."""
        until = time.monotonic() + TELLING_S
        while self._fd is not None and time.monotonic() < until:
            with suppress(OSError):  # it is held
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, TELLING)
                self.told()
                return
            time.sleep(POLL_S)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _file_of(which: int | str) -> str:
    """The file's identity on this machine."""
    found = os.stat(which)
    return f"{found.st_dev} {found.st_ino}"


def _open_of(path: str, file: str) -> int | None:
    """Open the other rank's file; None: without one, every rank counts as first.

    The file may belong to another user.  Or the process number is another process's here, in
    another pid namespace, and that process's files are left alone.
    """
    try:
        if _file_of(path) == file:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        pass
    return None


class Watch:
    """The exception hooks of this process, from `start` to `stop`."""

    def __init__(self, boot: Bootstrap) -> None:
        self.boot = boot
        self.pid = os.getpid()
        self.first = FirstFailure(boot)
        self.previous: tuple[Callable, Callable] | None = None

    def start(self) -> None:
        if is_interactive():
            return
        self.previous = (sys.excepthook, threading.excepthook)
        sys.excepthook = self._main_failed
        if self.boot.size > 1:
            threading.excepthook = self._thread_failed

    def stop(self) -> None:
        if self.previous is not None:
            if sys.excepthook == self._main_failed:
                sys.excepthook = self.previous[0]
            if threading.excepthook == self._thread_failed:
                threading.excepthook = self.previous[1]
            self.previous = None
        self.first.close()

    def _main_failed(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        assert self.previous is not None
        show = self.previous[0]
        brief = _brief(error, trace) if show is sys.__excepthook__ else ""
        if self.boot.size == 1 and brief and isinstance(error, ConfigError):
            say(f"smp: {brief}")
            return
        if os.getpid() != self.pid or self.boot.size == 1:  # a forked child is not a rank
            show(kind, error, trace)
            return
        self._end(kind, error, lambda: show(kind, error, trace), "", brief)

    def _thread_failed(self, args: Any) -> None:
        assert self.previous is not None
        show = self.previous[1]
        if os.getpid() != self.pid or not took_part(args.exc_traceback):
            show(args)
            return
        name = args.thread.name if args.thread is not None else "?"
        self._end(args.exc_type, args.exc_value, lambda: show(args), f" in thread {name!r}")

    def _end(
        self,
        kind: type[BaseException],
        error: BaseException,
        show: Callable[[], None],
        where: str,
        brief: str = "",
    ) -> None:
        rank, size = self.boot.rank, self.boot.size
        # torch's hook, around this one since init_process_group, collects the output and would
        # show it later.
        is_collected = isinstance(sys.stderr, io.StringIO)
        try:
            with redirect_stderr(sys.__stderr__) if is_collected else nullcontext():
                what = kind.__name__ if issubclass(kind, KeyboardInterrupt) else brief
                first, same = self.first.claim(rank, what)
                if first == rank:
                    if brief:
                        say(f"smp: rank {rank} of {size}: {brief}")
                    else:
                        show()
                        say(f"smp: rank {rank} of {size}: not caught{where}; ending all ranks")
                    self.first.told()
                elif brief and same:
                    self.first.wait_until_told()
                else:
                    text = f"{kind.__name__}: {error}".splitlines()[0]  # without its notes
                    say(f"smp: rank {rank} of {size}, after rank {first} failed: {text}")
                    self.first.wait_until_told()
        finally:
            end_all_ranks(
                self.boot, EXIT_INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
            )


def _brief(error: BaseException, trace: TracebackType | None) -> str:
    """A line and its place in the script, where these need no traceback; else nothing."""
    if not isinstance(error, ConfigError | KeyboardInterrupt):
        return ""
    at = ""
    for frame, line in traceback.walk_tb(trace):
        if not at or frame.f_globals.get("__name__") == "__main__":
            at = f"{frame.f_code.co_filename}:{line}"
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted at {at}"
    return f"ConfigError: {error} (at {at})"


def end_all_ranks(boot: Bootstrap, code: int) -> None:
    """End this process now, and with it the job.  Does not return."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed, or none at all
            continue
    if isinstance(boot, OverMPI):
        boot.comm.Abort(code)
    os._exit(code)


def took_part(trace: TracebackType | None) -> bool:
    """Whether the exception passed through code with other ranks in it."""
    modules = [frame.f_globals.get("__name__") or "" for frame, _ in traceback.walk_tb(trace)]
    return any(f"{module}.".startswith(f"{name}.") for module in modules for name in COLLECTIVE)


def is_interactive() -> bool:
    """A prompt or a notebook: an exception there is an answer, not an end."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "ipykernel" in sys.modules


def say(line: str) -> None:
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)
