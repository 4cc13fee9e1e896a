"""torch.distributed's groups for the job: the default group, and one for each of ours.

The default group is made over all ranks where the script has not made it.  Its store is
served by rank 0, on loopback when all ranks share a host; nothing is written to RANK,
WORLD_SIZE, MASTER_ADDR or the like.
"""

import fcntl
import os
import socket
import struct
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from smp import _core
from smp.collectives import process_group
from smp.job.bootstrap import Bootstrap
from smp.job.config import Config
from smp.job.placement import AXES_OF_GROUP, Placement
from smp.job.transports import check_interface

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# smp.send, smp.recv_from and smp.allgather wait until they are matched, however long
# the other rank takes to get there.
OBJECTS_TIMEOUT = timedelta(days=7)
SIOCGIFADDR = 0x8915


class Groups(NamedTuple):
    by_kind: dict[str, dist.ProcessGroup]
    objects: dist.ProcessGroup
    owns_default: bool


def form(boot: Bootstrap, placement: Placement, cfg: Config) -> Groups:
    """Make all groups.  Collective over all ranks.

    Raises:
        RuntimeError: the script's own default group has other ranks than the job.
    """
    owns_default = not dist.is_initialized()
    interface = _interface(boot, cfg)
    try:
        if owns_default:
            _form_default(boot, cfg, interface)
        elif (dist.get_rank(), dist.get_world_size()) != (boot.rank, boot.size):
            raise RuntimeError(
                f"torch.distributed is initialised as rank {dist.get_rank()} of "
                f"{dist.get_world_size()}, but this is rank {boot.rank} of {boot.size} "
                "of the job: let smp.init() initialise it"
            )
        with _gloo_on(interface):
            by_kind = _form_kinds(boot, placement)
            objects = dist.new_group(backend="gloo", timeout=OBJECTS_TIMEOUT)
        # Rank 0 serves the store that the others read until here.
        boot.barrier()
    except BaseException:
        if owns_default and dist.is_initialized():
            dist.destroy_process_group()
        raise
    return Groups(by_kind, objects, owns_default)


def destroy(groups: Groups) -> None:
    """Leave all groups that `form` made; does not wait for other ranks."""
    if not dist.is_initialized():
        return
    if groups.owns_default:
        dist.destroy_process_group()
        return
    for group in {*groups.by_kind.values(), groups.objects} - {dist.group.WORLD}:
        dist.destroy_process_group(group)


def backend_of(cfg: Config) -> str:
    """What init_process_group calls it; torch.cuda is left alone where there is none."""
    wanted = cfg.ddp_dist_backend
    has_cuda = torch.backends.cuda.is_built() and torch.cuda.is_available()
    if has_cuda and wanted in ("auto", "nccl"):
        return "cpu:gloo,cuda:nccl"
    if wanted == "nccl":
        warnings.warn(
            "smp: ddp_dist_backend='nccl' needs a GPU and there is none: using 'smddp'",
            stacklevel=2,
        )
    if wanted == "gloo":
        return wanted
    process_group.register()
    return "smddp"


def _form_default(boot: Bootstrap, cfg: Config, interface: str | None) -> None:
    hook = sys.excepthook
    with _gloo_on(interface):
        dist.init_process_group(
            backend_of(cfg), store=_store(boot, cfg), rank=boot.rank, world_size=boot.size
        )
    sys.excepthook = hook  # torch adds one each time and never takes it out again


def _store(boot: Bootstrap, cfg: Config) -> dist.Store:
    if boot.size == 1:
        return dist.HashStore()
    if boot.rank == 0:
        listener = socket.socket()
        listener.bind((_address(boot, cfg), 0))
        listener.listen(boot.size)
        host, port = listener.getsockname()
        boot.allgather_bytes(f"{host}:{port}".encode())
        return dist.TCPStore(
            host,
            port,
            boot.size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    host, _, text = boot.allgather_bytes(b"")[0].decode().rpartition(":")
    return dist.TCPStore(host, int(text), boot.size, wait_for_workers=False)


def _form_kinds(boot: Bootstrap, placement: Placement) -> dict[str, dist.ProcessGroup]:
    """One torch group for each set of ranks; a set that serves several kinds is one."""
    world = dist.group.WORLD
    assert world is not None
    made = {tuple(range(placement.size)): world}
    by_kind = {}
    for kind in AXES_OF_GROUP:
        for members in map(tuple, placement.groups(kind)):
            if members not in made:
                made[members] = dist.new_group(list(members))
            if boot.rank in members:
                by_kind[kind] = made[members]
    return by_kind


@contextmanager
def _gloo_on(interface: str | None) -> Iterator[None]:
    """Have gloo listen on one network interface, unless the user named one."""
    if interface is None or GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[GLOO_INTERFACE] = interface
    try:
        yield
    finally:
        del os.environ[GLOO_INTERFACE]


def _interface(boot: Bootstrap, cfg: Config) -> str | None:
    """The network interface towards the other ranks; None: gloo finds one.  Collective."""
    if boot.hosts == 1:
        return _name_of_interface("127.")
    cards = boot.allgather_bytes(f"{boot.host} {_address(boot, cfg)}".encode())
    if cfg.comm_interface is not None:
        return _chosen(cfg.comm_interface)[0]
    there = next(
        address
        for host, address in (card.decode().split() for card in cards)
        if int(host) != boot.host
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((there, 9))  # sends nothing: the kernel picks the route
        return _name_of_interface(sock.getsockname()[0])


def _name_of_interface(address: str) -> str | None:
    """The interface whose address begins so."""
    return next((name for name, at in _interfaces().items() if at.startswith(address)), None)


def _address(boot: Bootstrap, cfg: Config) -> str:
    """Where the other ranks reach this one."""
    if boot.hosts == 1:
        return "127.0.0.1"
    if cfg.comm_interface is None:
        return _own_address()
    return _chosen(cfg.comm_interface)[1]


def _chosen(comm_interface: str) -> tuple[str, str]:
    """Name and address of the interface that ``comm_interface`` names, IPv4 if it has one."""
    check_interface(comm_interface)
    found = [text.split() for text in _core.addresses(comm_interface)]
    name, network = min(found, key=lambda each: ":" in each[1])
    return name, network.split("/")[0]


def _own_address() -> str:
    """What the host's name stands for; the first other interface where that is loopback."""
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = "127.0.0.1"
    if not named.startswith("127."):
        return named
    return next((at for at in _interfaces().values() if not at.startswith("127.")), named)


def _interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one."""
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
