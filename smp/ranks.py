"""This rank's place: ranks, sizes and groups, for the world and for pp, tp, dp, rdp and mp.

All of them raise RuntimeError before ``smp.init``.  The arithmetic is in
``smp.job.placement``.
"""

from collections.abc import Callable
from enum import Enum

from torch.distributed import ProcessGroup

from smp.state_mod import state


class CommGroup(Enum):
    """A set of ranks around this one."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"


class RankType(Enum):
    """The meaning of a rank's number: the position in a group of this rank."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"


WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP

WORLD_RANK = RankType.WORLD_RANK
MP_RANK = RankType.MP_RANK
DP_RANK = RankType.DP_RANK
PP_RANK = RankType.PP_RANK
TP_RANK = RankType.TP_RANK
RDP_RANK = RankType.RDP_RANK


def rank() -> int:
    """This rank among all ranks of the job."""
    return state.job("smp.rank()").boot.rank


def size() -> int:
    """Number of ranks of the job."""
    return state.job("smp.size()").boot.size


def local_rank() -> int:
    """This rank among the ranks of its host."""
    return state.job("smp.local_rank()").boot.local_rank


def local_size() -> int:
    """Number of ranks on this host."""
    return state.job("smp.local_size()").boot.local_size


def instance_id() -> int:
    """The number of this host among the job's hosts, in order of their lowest ranks."""
    return state.job("smp.instance_id()").boot.host


def is_multi_node() -> bool:
    """Whether the job has ranks on more than one host."""
    return state.job("smp.is_multi_node()").boot.hosts > 1


def _rank_in(kind: str) -> Callable[[], int]:
    def function() -> int:
        job = state.job(f"smp.{kind}_rank()")
        return job.groups[kind].index(job.boot.rank)

    return _named(function, f"{kind}_rank", f"This rank in its {kind.upper()}_GROUP.")


def _size_of(kind: str) -> Callable[[], int]:
    def function() -> int:
        return len(state.job(f"smp.{kind}_size()").groups[kind])

    return _named(function, f"{kind}_size", f"Number of ranks in a {kind.upper()}_GROUP.")


def _group_of(kind: str) -> Callable[[], list[int]]:
    def function() -> list[int]:
        return list(state.job(f"smp.get_{kind}_group()").groups[kind])

    return _named(
        function,
        f"get_{kind}_group",
        f"The global ranks of this rank's {kind.upper()}_GROUP, in order.",
    )


def _process_group_of(kind: str) -> Callable[[], ProcessGroup]:
    def function() -> ProcessGroup:
        return state.job(f"smp.get_{kind}_process_group()").torch_groups.by_kind[kind]

    return _named(
        function,
        f"get_{kind}_process_group",
        "The torch.distributed group of "
        + ("all ranks." if kind == "world" else f"this rank's {kind.upper()}_GROUP."),
    )


def _named(function: Callable, name: str, doc: str) -> Callable:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


pp_rank = _rank_in("pp")
tp_rank = _rank_in("tp")
dp_rank = _rank_in("dp")
rdp_rank = _rank_in("rdp")
mp_rank = _rank_in("mp")

pp_size = _size_of("pp")
tp_size = _size_of("tp")
dp_size = _size_of("dp")
rdp_size = _size_of("rdp")
mp_size = _size_of("mp")

get_pp_group = _group_of("pp")
get_tp_group = _group_of("tp")
get_dp_group = _group_of("dp")
get_rdp_group = _group_of("rdp")
get_mp_group = _group_of("mp")

get_world_process_group = _process_group_of("world")
get_pp_process_group = _process_group_of("pp")
get_tp_process_group = _process_group_of("tp")
get_dp_process_group = _process_group_of("dp")
get_rdp_process_group = _process_group_of("rdp")
get_mp_process_group = _process_group_of("mp")
