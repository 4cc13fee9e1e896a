"""Two hosts for a benchmark: network namespaces of this machine, joined by a veth pair.

Needs root and ``ip``.
"""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SPACES = ("smp-bench-0", "smp-bench-1")
ADDRESSES = ("10.78.0.1", "10.78.0.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextmanager
def two_hosts() -> Iterator[None]:
    try:
        for space in SPACES:
            ip("netns", "add", space)
        near, far = SPACES
        ip(*f"link add net netns {near} type veth peer name net netns {far}".split())
        for space, address in zip(SPACES, ADDRESSES, strict=True):
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "net")
            ip("-n", space, "link", "set", "net", "up")
            ip("-n", space, "link", "set", "lo", "up")
        for space in SPACES:  # the carrier comes a moment after both ends are up
            deadline = time.monotonic() + 10
            while "LOWER_UP" not in output("ip", "-n", space, "link", "show", "net"):
                if time.monotonic() > deadline:
                    raise SystemExit("the veth pair does not come up")
        yield
    finally:
        for space in SPACES:
            subprocess.run(["ip", "netns", "del", space], check=False)


def on(host: int, *command: str | Path) -> list[str]:
    return ["ip", "netns", "exec", SPACES[host], *map(str, command)]
