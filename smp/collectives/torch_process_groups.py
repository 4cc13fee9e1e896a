"""torch.distributed's groups for the job: the default group, and one for each of ours.

The default group is made over all ranks where the script has not made it.  Its store is
served by rank 0, on loopback when all ranks share a network; nothing is written to RANK,
WORLD_SIZE, MASTER_ADDR or the like.
"""

import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from smp.collectives import backend as smddp
from smp.collectives import ranks, shared_gpus
from smp.job import addresses
from smp.job.bootstrap import Bootstrap
from smp.job.config import Config
from smp.job.placement import AXES_OF_GROUP, Groups, Placement

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# smp.send, smp.recv_from and smp.allgather wait until they are matched, however long
# the other rank takes to get there.
OBJECTS_TIMEOUT = timedelta(days=7)


def form(boot: Bootstrap, placement: Placement, cfg: Config) -> Groups:
    """Make all groups.  Collective over all ranks.

    Raises:
        RuntimeError: the script's own default group has other ranks than the job.
    """
    owns_default = not dist.is_initialized()
    interface = addresses.interface(boot, cfg.comm_interface)
    # A script with a default group of its own has chosen a backend, unless the configuration
    # names one.
    takes = owns_default or cfg.ddp_dist_backend != "auto"
    backend = backend_of(cfg, boot) if takes else None
    try:
        if owns_default:
            _form_default(boot, cfg, interface, backend)
        elif (dist.get_rank(), dist.get_world_size()) != (boot.rank, boot.size):
            raise RuntimeError(
                f"torch.distributed is initialised as rank {dist.get_rank()} of "
                f"{dist.get_world_size()}, but this is rank {boot.rank} of {boot.size} "
                "of the job: let smp.init() initialise it"
            )
        with _gloo_on(interface), ranks.with_settings(vars(cfg)):
            every = None if owns_default else backend
            by_kind = _form_kinds(boot, placement, every)
            if cfg.sharded_data_parallel_degree > 1:
                by_kind["shards"] = _form_shards(boot, placement, every)
            objects = dist.new_group(backend="gloo", timeout=OBJECTS_TIMEOUT)
        # Rank 0 serves the store to the others until here.
        boot.barrier()
    except BaseException:
        if owns_default and dist.is_initialized():
            dist.destroy_process_group()
        raise
    return Groups(by_kind, objects, owns_default)


def destroy(groups: Groups) -> None:
    """Leave all groups made by `form`; does not wait for other ranks."""
    if not dist.is_initialized():
        return
    if groups.owns_default:
        dist.destroy_process_group()
        return
    for group in {*groups.by_kind.values(), groups.objects} - {dist.group.WORLD}:
        dist.destroy_process_group(group)


def backend_of(cfg: Config, boot: Bootstrap) -> str:
    """The backend for init_process_group; torch.cuda is left alone on machines without one.

    Collective where the configuration wants NCCL.
    """
    wanted = cfg.ddp_dist_backend
    if wanted == "nccl":
        has_cuda = torch.backends.cuda.is_built() and torch.cuda.is_available()
        mine = shared_gpus.visible() if has_cuda else []
        all_of_them = boot.allgather_bytes("\n".join(mine).encode())
        why = _why_not_nccl([set(gpus.decode().splitlines()) for gpus in all_of_them])
        if not why:
            return "cpu:gloo,cuda:nccl"
        warnings.warn(f"smp: ddp_dist_backend='nccl' {why}: using 'smddp'", stacklevel=2)
    if wanted == "gloo":
        return wanted
    smddp.register()
    return "smddp"


def _why_not_nccl(visible: list[set[str]]) -> str:
    """Why NCCL cannot serve the job; "": it can, if the ranks choose different GPUs.

    Args:
        visible: the GPUs for each rank to use.
    """
    if set() in visible:
        return f"needs a GPU for each rank, and rank {visible.index(set())} has none"
    for mine in visible:
        sharing = [rank for rank, theirs in enumerate(visible) if theirs <= mine]
        if len(sharing) > len(mine):
            ranks_have = f"ranks {', '.join(map(str, sharing))} have {len(mine)} in all"
            return f"needs a GPU for each rank, and {ranks_have}"
    return ""


def _form_default(
    boot: Bootstrap, cfg: Config, interface: str | None, backend: str | None
) -> None:
    hook = sys.excepthook
    settings = ranks.with_settings(vars(cfg))
    with _gloo_on(interface), settings, smddp.called("WORLD"):
        dist.init_process_group(
            backend, store=_store(boot, cfg), rank=boot.rank, world_size=boot.size
        )
    sys.excepthook = hook  # torch adds one each time and never takes it out again


def _store(boot: Bootstrap, cfg: Config) -> dist.Store:
    if boot.size == 1:
        return dist.HashStore()
    if boot.rank == 0:
        listener = socket.socket()
        listener.bind((addresses.address(boot, cfg.comm_interface), 0))
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


def _form_kinds(
    boot: Bootstrap, placement: Placement, backend: str | None
) -> dict[str, dist.ProcessGroup]:
    """One torch group for each set of ranks; one set of several kinds has one.

    A TP_GROUP has one of its own: its collectives come in the order of the modules, those of
    gradients when these are complete.

    Args:
        backend: of all of them; None: the default group's, which is one of them.
    """
    made: dict[tuple, dist.ProcessGroup] = {}
    if backend in (None, dist.get_backend(), dist.get_backend_config()):
        assert dist.group.WORLD is not None
        made[tuple(range(placement.size))] = dist.group.WORLD
    by_kind = {}
    for kind in AXES_OF_GROUP:
        for members in map(tuple, placement.groups(kind)):
            key = (kind, *members) if kind == "tp" and len(members) > 1 else members
            if key not in made:
                with smddp.called(f"{kind.upper()}_GROUP"):
                    made[key] = dist.new_group(list(members), backend=backend)
            if boot.rank in members:
                by_kind[kind] = made[key]
    return by_kind


def _form_shards(
    boot: Bootstrap, placement: Placement, backend: str | None
) -> dist.ProcessGroup:
    """This rank's RDP_GROUP once more: gathers of parameters come in the order of modules, and
    collectives of gradients when these are complete.
    """
    mine = None
    for members in placement.groups("rdp"):
        with smddp.called("RDP_GROUP (sharded parameters)"):
            made = dist.new_group(list(members), backend=backend)
        if boot.rank in members:
            mine = made
    assert mine is not None
    return mine


def device_of_numbers(group: dist.ProcessGroup) -> torch.device:
    """The place of a group's small tensors: a group made for NCCL alone takes none of hosts."""
    devices = {device.type for device in group._device_types}
    return torch.device("cpu" if "cpu" in devices else "cuda")


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
