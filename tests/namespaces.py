"""Ranks in namespaces of their own, as containers have them.

A test that needs what this machine may refuse (root, ``unshare``, ``ip``) says so through
`need` and `cannot`: it is skipped, but fails where ``SMP_TEST_NO_SKIPS`` is set, as the
checks of every change set it.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from tests import spent
from tests.ranks import FORK_SERVER, rank_environment

STRICT = "SMP_TEST_NO_SKIPS"


def cannot(reason: str) -> NoReturn:
    """This machine cannot run the test."""
    if os.environ.get(STRICT):
        pytest.fail(f"{reason}; {STRICT} is set")
    pytest.skip(reason)


def need(*programs: str) -> None:
    """Root and these programs."""
    if os.geteuid() != 0:
        cannot("needs root")
    for program in programs:
        if shutil.which(program) is None:
            cannot(f"needs the program {program}")


def own(*flags: str, first: str = "") -> list[str]:
    """The command before a rank's that gives it namespaces of its own.

    Args:
        flags: of ``unshare``; none: the rank stays where it is.
        first: a shell command that runs there before the rank.
    """
    if not flags:
        return []
    need("unshare")
    command = ["unshare", *flags]
    if subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        cannot(f"{' '.join(command)} is not permitted here")
    return [*command, "sh", "-c", f'{first} && exec "$@"', "sh"] if first else command


def without_mpi() -> dict[str, str]:
    """The environment of a rank that no MPI launcher started."""
    return {k: v for k, v in rank_environment().items() if not k.startswith(("OMPI_", "PMI"))}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def ranks_behind(
    before: Sequence[list[str]], *argv: str | Path, env: dict[str, str] | None = None
) -> Iterator[list[subprocess.Popen]]:
    """Ranks of one job that no launcher started; whatever still runs at the end is killed.

    Args:
        before: for each rank, what comes before ``python argv...``.
    """
    port = str(free_port())
    python = FORK_SERVER.command()  # of a rank that stays where it is
    started: list[subprocess.Popen] = []
    try:
        for rank, command in enumerate(before):
            started.append(
                subprocess.Popen(
                    [*([*command, sys.executable] if command else python), *map(str, argv)],
                    env={
                        **without_mpi(),
                        "RANK": str(rank),
                        "WORLD_SIZE": str(len(before)),
                        "LOCAL_RANK": str(rank),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port,
                        **(env or {}),
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        with spent.on("jobs"):
            yield started
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdout, process.stderr):
                stream.close()


def outputs(started: list[subprocess.Popen], timeout_s: float = 120) -> list[str]:
    """What each rank prints; all end well.

    Raises:
        AssertionError: a rank has failed; with what all have said.
    """
    said = [process.communicate(timeout=timeout_s) for process in started]
    assert not any(process.returncode for process in started), said
    return [out for out, _ in said]


def process_of(started: subprocess.Popen, is_behind: bool) -> int:
    """The number, here, of the process that runs Python.

    Args:
        is_behind: an ``unshare --fork`` stands between.
    """
    if not is_behind:
        return started.pid
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
    [child] = children.read_text().split()
    return int(child)
