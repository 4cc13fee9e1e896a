"""Ctrl-C and SIGTERM during a step.

The main thread sleeps while the workers run a step.  Python's own signal handler only leaves a
mark, so it also writes to a descriptor of the core.  The write wakes that sleep, whichever
thread took the signal.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from smp import _core

NOWHERE = -1


@contextmanager
def heard() -> Iterator[None]:
    """Within it signals wake the step, and SIGTERM raises KeyboardInterrupt as Ctrl-C does.

    Outside a step SIGTERM ends the process at once, as it does without this library: the
    main thread may be waiting where it cannot be woken.  A handler of the script's own is
    left as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.set_wakeup_fd(_core.signal_fd(), warn_on_full_buffer=False)
    _core.forward_signals(before)
    takes_sigterm = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if takes_sigterm:
        signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        if takes_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(before)
        _core.forward_signals(NOWHERE)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)
