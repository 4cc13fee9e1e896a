"""Where ranks reach each other: addresses and network interfaces of this host.

Loopback where all ranks share a network namespace; else the interface named by
``comm_interface``, or the address of the host's name.
"""

import fcntl
import socket
import struct

from smp import _core
from smp.job.bootstrap import Bootstrap
from smp.job.transports import check_interface

SIOCGIFADDR = 0x8915


def interface(boot: Bootstrap, comm_interface: str | None) -> str | None:
    """The network interface towards the other ranks; None: unknown.  Collective."""
    if boot.has_one_network:
        return _name_of_interface("127.")
    cards = boot.allgather_bytes(f"{boot.network} {address(boot, comm_interface)}".encode())
    if comm_interface is not None:
        return _chosen(comm_interface)[0]
    there = next(
        at
        for network, at in (card.decode().split() for card in cards)
        if network != boot.network
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((there, 9))  # sends nothing: the kernel picks the route
        return _name_of_interface(sock.getsockname()[0])


def _name_of_interface(address: str) -> str | None:
    """The interface with an address that begins so."""
    return next((name for name, at in _interfaces().items() if at.startswith(address)), None)


def address(boot: Bootstrap, comm_interface: str | None) -> str:
    """Where the other ranks reach this one.

    Raises:
        ConfigError: ``comm_interface`` names no interface or address of this host.
    """
    if boot.has_one_network:
        return "127.0.0.1"
    if comm_interface is None:
        return _own_address()
    return _chosen(comm_interface)[1]


def _chosen(comm_interface: str) -> tuple[str, str]:
    """Name and address of the interface named by ``comm_interface``, IPv4 if there is one."""
    check_interface(comm_interface)
    found = [text.split() for text in _core.addresses(comm_interface)]
    name, network = min(found, key=lambda each: ":" in each[1])
    return name, network.split("/")[0]


def _own_address() -> str:
    """The address of the host's name; where that is loopback, the first other interface's."""
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = "127.0.0.1"
    if not named.startswith("127."):
        return named
    return next((at for at in _interfaces().values() if not at.startswith("127.")), named)


def _interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface with one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(sock, SIOCGIFADDR, request)
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found
