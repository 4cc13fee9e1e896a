"""Objects sent between ranks: any picklable object, its tensors apart.

A message has two lengths; a pickle of the tensors' shapes, and one of the object with a number
for each tensor; the tensors' bytes.  The bytes go from and into the tensors' own memory.
Messages go over a torch group of their own (gloo), so a script's own ``torch.distributed.send``
never meets one.

Messages from one rank to another arrive in the order of sending.  Every call waits until it is
matched; it takes part on the calling thread.  Collective calls outside a step go this way,
checkpoints and the first step's agreement too.  Their messages name the call, and another call
is refused.
"""

import io
import os
import pickle
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp import _core
from smp.job import bootstrap
from smp.job.collective_calls import Call, CallMismatch
from smp.ranks import CommGroup, RankType
from smp.state_mod import Job, state

# Messages of one tag are in order.  One thread may send while another is in a collective;
# all collectives share a tag, so that two different ones meet.
TAG_SEND = 0
TAG_TOGETHER = 1


def broadcast(obj: Any, group: CommGroup) -> None:
    """Send ``obj`` to every other member of this rank's ``group``; they call `recv_from`.

    Waits until all of them have it.

    Args:
        obj: any picklable object; its tensors travel apart.
        group: ``smp.WORLD``, ``smp.PP_GROUP``, ...: this rank's of that kind.

    Raises:
        ConnectionError: a receiver is gone.
        TypeError: not a group.
    """
    job, members = _members("smp.broadcast()", group)
    parcel = Parcel.of(obj)
    others = [member for member in members if member != job.boot.rank]
    doing = f"smp.broadcast(..., {group})"
    sends = [(other, _post(job, parcel, other, TAG_SEND, doing)) for other in others]
    for other, works in sends:
        _wait(works, other, doing)


def send(obj: Any, dest_rank: int, rank_type: RankType) -> None:
    """Send ``obj`` to the rank ``dest_rank`` of this rank's group of type ``rank_type``.

    Returns when the receiver has taken it.

    Args:
        obj: any picklable object; its tensors travel apart.
        dest_rank: the receiver, as ``rank_type`` counts.
        rank_type: ``smp.RankType.PP_RANK`` counts in this rank's PP_GROUP, ``WORLD_RANK`` in
            the whole job, and so on.

    Raises:
        ConnectionError: the receiver is gone.
        TypeError: not a type of ranks.
        ValueError: no such rank, or this rank itself.
    """
    job, dest = _peer("smp.send()", dest_rank, rank_type)
    doing = f"smp.send(..., {dest_rank}, {rank_type})"
    _wait(_post(job, Parcel.of(obj), dest, TAG_SEND, doing), dest, doing)


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """The next object for this rank, sent or broadcast by rank ``src_rank`` of that type.

    A tensor from a GPU arrives on this rank's current one.

    Args:
        src_rank: the sender, as ``rank_type`` counts.
        rank_type: as for `send`.

    Raises:
        ConnectionError: the sender is gone.
        TypeError: not a type of ranks.
        ValueError: no such rank, or this rank itself.
    """
    job, src = _peer("smp.recv_from()", src_rank, rank_type)
    return _take(job, src, TAG_SEND, f"smp.recv_from({src_rank}, {rank_type})").open()


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """Every member's object, by its rank in the group.  Collective over the group.

    This rank's own object comes back as a copy, like those of the others.

    Args:
        obj: any picklable object; its tensors travel apart.
        group: ``smp.WORLD``, ``smp.PP_GROUP``, ...: this rank's of that kind.

    Raises:
        CallMismatch: a member makes another call.
        ConnectionError: a member is gone.
        TypeError: not a group.
    """
    job, members = _members("smp.allgather()", group)
    doing = f"smp.allgather(..., {group})"
    parcels = _exchange(_Together(job, "smp.allgather", group, doing), Parcel.of(obj))
    return [
        (parcel.copy() if member == job.boot.rank else parcel).open()
        for member, parcel in zip(members, parcels, strict=True)
    ]


def gather_bytes(what: str, group: CommGroup, data: bytes = b"") -> list[bytes]:
    """Every member's bytes, by its rank in the group.  Collective over the group.

    Args:
        what: the script's call around this one, for the error at another call.

    Raises:
        CallMismatch: a member makes another call.
        ConnectionError: a member is gone.
    """
    job, _ = _members(what, group)
    together = _Together(job, what, group, what)
    return [parcel.pickled for parcel in _exchange(together, Parcel([], data, []))]


def _exchange(together: "_Together", parcel: "Parcel") -> list["Parcel"]:
    """Every member's parcel."""
    with together:
        for member in together.others:
            together.post(member, parcel)
        return [
            together.take(member) if member in together.others else parcel
            for member in together.members
        ]


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Wait for every rank of ``group``.

    Args:
        group: ``smp.WORLD``, ``smp.PP_GROUP``, ...: this rank's of that kind.

    Raises:
        CallMismatch: a member makes another call.
        ConnectionError: a member is gone.
        TypeError: not a group.
    """
    job, members = _members("smp.barrier()", group)
    me, size = members.index(job.boot.rank), len(members)
    # Dissemination: after round i each rank has heard, through others, of the 2^i
    # ranks before it.
    step = 1
    with _Together(job, "smp.barrier", group, f"smp.barrier({group})") as together:
        while step < size:
            together.post(members[(me + step) % size], NOTHING)
            together.take(members[(me - step) % size])
            step *= 2


class PeerLost(ConnectionError):
    """Another rank has ended, or was killed, in the middle of a call."""

    def __init__(self, doing: str, rank: int) -> None:
        super().__init__(f"smp: {doing}: rank {rank} is gone (its process ended or was killed)")
        self.rank = rank
        bootstrap.miss_a_rank()


@contextmanager
def naming(doing: str, rank: int) -> Iterator[None]:
    """Name the other rank in the errors of torch's exchange.

    The watchdog names that rank meanwhile, if the exchange takes long.

    Raises:
        PeerLost: the other rank is gone.
    """
    _core.place(doing)
    try:
        yield
    except RuntimeError as error:
        if "timed out" in str(error).lower():
            raise TimeoutError(f"{doing}: {error}") from error
        raise PeerLost(doing, rank) from error
    finally:
        _core.place(None)


class _Together:
    """One call of all members of a group; on leaving, all that was sent has arrived."""

    def __init__(self, job: Job, what: str, group: CommGroup, doing: str) -> None:
        self.job = job
        self.call = job.calls.begin(what, group.name)
        self.members = job.groups[group.value]
        self.others = [member for member in self.members if member != job.boot.rank]
        self.doing = doing
        self._sent: dict[int, list[dist.Work]] = {}

    def post(self, member: int, parcel: "Parcel") -> None:
        """Begin to send."""
        parcel = replace(parcel, call=self.call)
        self._sent[member] = _post(self.job, parcel, member, TAG_TOGETHER, self.doing)

    def take(self, member: int) -> "Parcel":
        """The parcel of a member.

        Raises:
            CallMismatch: the member makes another call.
            ConnectionError: the member, or a rank awaited by the member, is gone.
        """
        parcel = _take(self.job, member, TAG_TOGETHER, self.doing)
        if parcel.lost is not None:
            raise PeerLost(self.doing, parcel.lost)
        assert parcel.call is not None
        if not self.call.matches(parcel.call):
            raise self.job.calls.refuse(self.call, self.job.boot.rank, parcel.call, member)
        return parcel

    def __enter__(self) -> "_Together":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            for member, works in self._sent.items():
                _wait(works, member, self.doing)
            return
        if isinstance(error, CallMismatch | PeerLost):
            lost = error.rank if isinstance(error, PeerLost) else None
            for member in self.others:  # a member may wait for this rank, and raises then
                if member not in self._sent:
                    with suppress(PeerLost):  # one that has raised may be gone
                        self.post(member, replace(NOTHING, lost=lost))
        _unmatched.extend(self._sent.values())


# Parcels for ranks that may never take them: the memory must stay.
_unmatched: list[list[dist.Work]] = []


def pp_barrier() -> None:
    """Wait for every rank of this PP_GROUP."""
    barrier(CommGroup.PP_GROUP)


def tp_barrier() -> None:
    """Wait for every rank of this TP_GROUP."""
    barrier(CommGroup.TP_GROUP)


def dp_barrier() -> None:
    """Wait for every rank of this DP_GROUP."""
    barrier(CommGroup.DP_GROUP)


def rdp_barrier() -> None:
    """Wait for every rank of this RDP_GROUP."""
    barrier(CommGroup.RDP_GROUP)


def mp_barrier() -> None:
    """Wait for every rank of this MP_GROUP."""
    barrier(CommGroup.MP_GROUP)


@dataclass(frozen=True)
class Spec:
    """A receiver's plan for a tensor's memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # in the order of memory: the last is contiguous
    order: tuple[int, ...]  # the dimension at each place of that order
    requires_grad: bool
    is_parameter: bool
    on_accelerator: bool

    @staticmethod
    def of(tensor: Tensor) -> "Spec":
        order = memory_order(tensor)
        return Spec(
            tensor.dtype,
            tuple(tensor.shape[i] for i in order),
            order,
            tensor.requires_grad,
            isinstance(tensor, nn.Parameter),
            tensor.device.type != "cpu",
        )

    def rebuild(self, flat: Tensor) -> Tensor:
        tensor = flat.permute(inverse(self.order))
        if self.on_accelerator and torch.accelerator.is_available():
            tensor = tensor.to(torch.accelerator.current_accelerator())
        if self.is_parameter:
            return nn.Parameter(tensor, self.requires_grad)
        return tensor.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Parcel:
    """One message: the pickles, and the tensors' values in the order of their memory."""

    specs: list[Spec]
    pickled: bytes
    values: list[Tensor]  # contiguous, on the CPU
    call: Call | None = None  # of a collective
    lost: int | None = None  # the rank without which no answer will come

    @staticmethod
    def of(obj: Any) -> "Parcel":
        """Take the tensors out of an object; a repeated tensor travels once."""
        tensors: list[Tensor] = []
        numbers: dict[int, int] = {}

        class Pickler(pickle.Pickler):
            def persistent_id(self, value: Any) -> int | None:
                if not travels_apart(value):
                    return None
                if id(value) not in numbers:
                    numbers[id(value)] = len(tensors)
                    tensors.append(value)
                return numbers[id(value)]

        buffer = io.BytesIO()
        Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
        specs = [Spec.of(tensor) for tensor in tensors]
        values = [
            tensor.detach().permute(spec.order).cpu().contiguous()
            for tensor, spec in zip(tensors, specs, strict=True)
        ]
        return Parcel(specs, buffer.getvalue(), values)

    def open(self) -> Any:
        tensors = [
            spec.rebuild(value) for spec, value in zip(self.specs, self.values, strict=True)
        ]

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, number: int) -> Tensor:
                return tensors[number]

        return Unpickler(io.BytesIO(self.pickled)).load()

    def copy(self) -> "Parcel":
        """The same, with memory of its own."""
        return replace(self, values=[value.clone() for value in self.values])

    def parts(self) -> list[Tensor]:
        """The parts of the message, as bytes; only the pickles are copied."""
        specs = pickle.dumps((self.call, self.lost, self.specs))
        lengths = torch.tensor([len(specs), len(self.pickled)], device="cpu")
        head = torch.frombuffer(bytearray(specs + self.pickled), dtype=torch.uint8)
        return [as_bytes(lengths), head, *(as_bytes(v) for v in self.values if v.numel())]


NOTHING = Parcel([], pickle.dumps(None), [])


def travels_apart(value: Any) -> bool:
    """A plain tensor with memory of its own; anything else is the pickle's affair."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_meta
        and not value.is_conj()
        and not value.is_neg()
        and not value.__dict__
    )


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions from the largest stride to the smallest, if they fill memory densely.

    So a transposed tensor arrives transposed; others (expanded, strided) arrive contiguous.
    """
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda i: (-strides[i], i)))
    is_dense = tensor.permute(order).is_contiguous()
    return order if is_dense else tuple(range(tensor.dim()))


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as bytes."""
    # A single element is contiguous with any strides, but a view of bytes needs these.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


# The parts of one message follow each other: a thread posts or takes all of them.
_posting: defaultdict[tuple[int, int], threading.Lock] = defaultdict(threading.Lock)
_taking: defaultdict[tuple[int, int], threading.Lock] = defaultdict(threading.Lock)


def _post(job: Job, parcel: Parcel, dest: int, tag: int, doing: str) -> list[dist.Work]:
    """Start sending; the works hold the memory until they are done."""
    group = job.torch_groups.objects
    with _posting[dest, tag], naming(f"{doing}: sending to rank {dest}", dest):
        return [dist.isend(part, dest, group, tag) for part in parcel.parts()]  # type: ignore[misc]


def _on_host(shape: int | torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory to receive into, whatever the script's default device is."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def _take(job: Job, src: int, tag: int, doing: str) -> Parcel:
    group = job.torch_groups.objects

    doing = f"{doing}: receiving from rank {src}"

    def fill(tensor: Tensor) -> Tensor:
        if tensor.numel():
            with naming(doing, src):
                dist.recv(as_bytes(tensor), src, group, tag)
        return tensor

    with _taking[src, tag]:
        in_specs, in_pickle = fill(_on_host(2, torch.int64)).tolist()
        head = fill(_on_host(in_specs + in_pickle, torch.uint8)).numpy().tobytes()
        call, lost, specs = pickle.loads(head[:in_specs])
        values = [fill(_on_host(spec.shape, spec.dtype)) for spec in specs]
    return Parcel(specs, head[in_specs:], values, call, lost)


def _wait(works: list[dist.Work], dest: int, doing: str) -> None:
    with naming(f"{doing}: sending to rank {dest}", dest):
        for work in works:
            work.wait()


def _members(caller: str, group: CommGroup) -> tuple[Job, list[int]]:
    job = state.job(caller)
    if not isinstance(group, CommGroup):
        raise TypeError(f"{caller} takes a group such as smp.PP_GROUP, got {group!r}")
    members = job.groups[group.value]
    if len(members) > 1:
        refuse_if_forked(caller, job.boot.rank, job.pid)
    return job, members


def _peer(caller: str, rank: int, rank_type: RankType) -> tuple[Job, int]:
    """The global rank behind a rank of a type."""
    job = state.job(caller)
    if not isinstance(rank_type, RankType):
        raise TypeError(
            f"{caller} takes a type such as smp.RankType.PP_RANK, got {rank_type!r}"
        )
    members = job.groups[rank_type.value]
    if type(rank) is not int or not 0 <= rank < len(members):
        raise ValueError(
            f"{caller}: there is no {rank_type.name} {rank!r}; "
            f"the group has {len(members)} ranks, from 0"
        )
    if members[rank] == job.boot.rank:
        raise ValueError(
            f"{caller}: {rank_type.name} {rank} is this rank itself, which would wait for ever"
        )
    refuse_if_forked(caller, job.boot.rank, job.pid)
    return job, members[rank]


def refuse_if_forked(caller: str, rank: int, pid: int) -> None:
    """Refuse a call in a process forked from a rank: no rank answers there.

    Args:
        pid: the rank's process.

    Raises:
        RuntimeError: this process is another one.
    """
    if os.getpid() != pid:
        raise RuntimeError(
            f"{caller}: this process was forked from rank {rank} and is no rank: only "
            "the process that called smp.init takes part in calls between ranks"
        )
