"""One rank of a test team: runs what ``tests/ranks.py`` sends, and reports.

    mpirun -np N python rank_worker.py SOCKET

Output of this rank goes to ``rank<r>.out`` beside the socket, the stacks that it dumps
on SIGUSR1 into the pipe ``rank<r>.stacks``.
"""

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from _pytest.config import _prepareconfig

from tests.ranks import Outcome, die_with_parent

# Before any rank imports torch or a test module: a plain `assert` in a rank explains
# itself as it does in pytest, whose own hook this installs.
_prepareconfig(["--noconftest", "--capture=no", "-p", "no:cacheprovider", "-p", "no:warnings"])

import torch  # noqa: E402

import smp  # noqa: E402

CLOSED = (EOFError, ConnectionError)


@contextlib.contextmanager
def as_it_was() -> Iterator[None]:
    """Put back what a test may have changed in this process."""
    environment = dict(os.environ)
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(0)


def run(module: str, name: str, args: tuple, kwargs: dict) -> Outcome:
    """Call it, and leave this rank ready for the next call."""
    failure = value = None
    begin_s = time.process_time()
    with as_it_was():
        try:
            function = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            value = function(*args, **kwargs)
        except BaseException:
            failure = traceback.format_exc()
        for given in (*args, *kwargs.values()):
            if isinstance(given, pytest.MonkeyPatch):
                given.undo()  # pytest has one of its own
        if failure is None:
            try:
                smp.reset()
                pickle.dumps(value)
            except BaseException:
                failure = "after the test: " + traceback.format_exc()
                value = None
    return Outcome(failure, value, time.process_time() - begin_s)


def main(address: str) -> None:
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    folder = Path(address).parent
    output = os.open(folder / f"rank{rank}.out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()
    # Open for reading too, so that neither opening nor writing needs a reader.
    stacks = os.open(folder / f"rank{rank}.stacks", os.O_RDWR)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    # A child that collects what an earlier test has left of a group of gloo hangs in the
    # group's destructor, which waits for threads that are the parent's.
    os.register_at_fork(before=gc.disable, after_in_parent=gc.enable)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        connection = Connection(sock.detach())
    connection.send((rank, os.getpid()))
    with contextlib.suppress(*CLOSED):
        while (message := pickle.loads(connection.recv_bytes())) is not None:
            outcome = run(*message)
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send(tuple(outcome))


if __name__ == "__main__":
    die_with_parent()
    main(sys.argv[1])
