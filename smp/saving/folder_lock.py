"""One job at a time saves into a folder.

The kernel's lock on a file ends with its process, so a killed job keeps no other out.  A file
system without locks keeps no job out either.
"""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from smp.saving.saved_files import CheckpointError

_LOCK = ".lock"


@contextmanager
def held(folder: str) -> Iterator[None]:
    """Keep other jobs out; the file exists only meanwhile.

    Raises:
        CheckpointError: another job is saving.
    """
    path = os.path.join(folder, _LOCK)
    fd = _take(path)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)
        os.close(fd)


def _take(path: str) -> int:
    while True:
        fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = os.pread(fd, 1000, 0).decode(errors="replace")
                os.close(fd)
                raise CheckpointError(
                    f"smp: another job saves into {os.path.dirname(path)}: {holder}; give each "
                    "job a folder of its own"
                ) from None
        if _is_at(path, fd):
            return fd
        os.close(fd)  # its holder has removed it


def _is_at(path: str, fd: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(fd))
    return False
