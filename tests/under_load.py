"""Runs a command on a busy machine that stalls: ``python -m tests.under_load make test``.

Beside it run two busy loops.  At random moments one of the command's processes is stopped for
up to 0.3 s, as an overcommitted machine stops a virtual core.  What the gate says must not
depend on that.  Exits as the command does.
"""

import os
import random
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

LOOPS = 2
PAUSE_S = 0.5  # at most, from one stop to the next
STOP_S = 0.3  # at most


def descendants(pid: int) -> list[int]:
    """The processes below this one."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def is_stopped(pid: int) -> bool:
    """Whether somebody else has stopped it: then it is not ours to continue."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
    return True


def main(command: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what is to be undone
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(LOOPS)]
    process = subprocess.Popen(command)
    over = os.pidfd_open(process.pid)
    stops = 0
    try:
        while not select.select([over], [], [], random.uniform(0, PAUSE_S))[0]:
            below = [pid for pid in descendants(process.pid) if not is_stopped(pid)]
            with suppress(IndexError, ProcessLookupError):
                victim = random.choice(below)
                os.kill(victim, signal.SIGSTOP)
                try:
                    select.select([over], [], [], random.uniform(0, STOP_S))
                finally:
                    os.kill(victim, signal.SIGCONT)
                stops += 1
        return process.wait()
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
        print(f"{stops} stops beside {LOOPS} busy loops", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
