"""Values with tensors, between the ranks of one replica of the model.

Parts of a model and of an optimizer's state are gathered over the MP_GROUP.  Or they are sent
where needed over the PP_GROUP: its ranks hold the same slices.  So one replica can save while
another does not.  The shape of a value travels packed (``csrc/python/values/pack.h``, no pickle
of tensors), its tensors as bytes, one after the other: no rank holds a second copy of
everything.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from smp import _core
from smp.collectives import objects
from smp.pytorch.restore import parts_of
from smp.ranks import CommGroup
from smp.state_mod import state

Key = str | int


class TensorSlot(NamedTuple):
    """The place of a tensor in a sent value."""

    number: int
    dtype: torch.dtype
    shape: torch.Size


class SparseSlot(NamedTuple):
    """The same for a tensor of a sparse layout: its parts are sent."""

    layout: str
    shape: torch.Size
    coalesced: bool
    parts: tuple[TensorSlot, ...]


class Replica:
    """The ranks of this rank's MP_GROUP, or PP_GROUP.  All methods are collective over them."""

    def __init__(self, caller: str, kind: CommGroup = CommGroup.MP_GROUP) -> None:
        job = state.job(caller)
        self.caller = caller
        self.kind = kind
        self.ranks = job.groups[kind.value]
        self.group = job.torch_groups.by_kind[kind.value]
        self.rank = self.ranks.index(job.boot.rank)

    def tp_ranks(self) -> list[int]:
        """The tp_rank of each rank."""
        place = state.job(self.caller).placement
        return [place.coordinates(rank).tp for rank in self.ranks]

    def gather(self, mine: Any, only_to: int | None = None) -> list[Any] | None:
        """Every rank's value, by mp_rank; a repeated tensor stays one.

        Args:
            mine: containers and tensors; tensors from others are in host memory.
            only_to: the mp_rank to get the values; the others get None.
        """
        objects.gather_bytes(self.caller, self.kind)
        out: list[Any] = []
        for source in range(len(self.ranks)):
            if source == self.rank:
                out.append(mine)
                receivers = range(len(self.ranks)) if only_to is None else [only_to]
                for receiver in receivers:
                    if receiver != self.rank:
                        self._send(mine, receiver)
            elif only_to is None or only_to == self.rank:
                out.append(self._receive(source))
        return out if only_to is None or only_to == self.rank else None

    def route(self, held: dict[Key, Any], wanted: Iterable[Key]) -> dict[Key, Any]:
        """The values of the keys wanted by this rank, from their holders.

        Returns:
            the values found; a rank's own value comes before those of lower ranks.
        """
        wanted = list(wanted)
        found = {key: held[key] for key in wanted if key in held}
        missing = [key for key in wanted if key not in held]
        holders: dict[Key, int] = {}
        asked: list[list[Key]] = []
        for rank, (keys, needs) in enumerate(self._share((list(held), missing))):
            asked.append(needs)
            for key in keys:
                holders.setdefault(key, rank)
        for source in range(len(self.ranks)):
            for receiver, needs in enumerate(asked):
                keys = [key for key in needs if holders.get(key) == source]
                if not keys or source == receiver:
                    continue
                if source == self.rank:
                    self._send({key: held[key] for key in keys}, receiver)
                elif receiver == self.rank:
                    found.update(self._receive(source))
        return found

    def _share(self, mine: Any) -> list[Any]:
        """Every rank's value without tensors, by mp_rank."""
        packed = objects.gather_bytes(self.caller, self.kind, _core.pack(mine))
        return [_core.unpack(each) for each in packed]

    def _send(self, value: Any, receiver: int) -> None:
        tensors: list[Tensor] = []
        packed = _bytes_tensor(_core.pack(take_out(value, tensors)))
        to = self.ranks[receiver]

        def send(data: Tensor) -> None:
            with objects.naming(f"{self.caller}: sending to rank {to}", to):
                dist.send(data, to, group=self.group)

        send(_size_of(packed))
        send(packed)
        for tensor in tensors:
            if tensor.numel():
                dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
                send(objects.as_bytes(dense))

    def _receive(self, source: int) -> Any:
        origin = self.ranks[source]

        def receive(into: Tensor) -> None:
            with objects.naming(f"{self.caller}: receiving from rank {origin}", origin):
                dist.recv(into, origin, group=self.group)

        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        receive(size)
        packed = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        receive(packed)
        arrived: list[Tensor] = []
        sparse: dict[int, Tensor] = {}

        def put_in(slot: TensorSlot | SparseSlot) -> Tensor:
            if isinstance(slot, SparseSlot):
                first, *_ = parts = [put_in(part) for part in slot.parts]
                if id(first) not in sparse:
                    sparse[id(first)] = _sparse_of(slot, parts)
                return sparse[id(first)]
            if slot.number == len(arrived):
                tensor = torch.empty(slot.shape, dtype=slot.dtype, device="cpu")
                if tensor.numel():
                    receive(objects.as_bytes(tensor))
                arrived.append(tensor)
            return arrived[slot.number]

        value = _core.unpack(packed.numpy().tobytes())
        return _rebuild(value, (TensorSlot, SparseSlot), put_in)


def take_out(value: Any, tensors: list[Tensor]) -> Any:
    """The value with slots for its tensors; these are appended in order, each once."""
    numbers: dict[int, int] = {}
    sparse: dict[int, SparseSlot] = {}

    def slot(tensor: Tensor) -> TensorSlot | SparseSlot:
        if tensor.layout is not torch.strided:
            if id(tensor) not in sparse:
                sparse[id(tensor)] = sparse_slot(tensor)
            return sparse[id(tensor)]
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(tensors)
            tensors.append(tensor)
        return TensorSlot(numbers[id(tensor)], tensor.dtype, tensor.shape)

    def sparse_slot(tensor: Tensor) -> SparseSlot:
        layout = str(tensor.layout).removeprefix("torch.")
        coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
        # New ones: two tensors with a common index would come back as one.
        parts = tuple(slot(part.clone()) for part in parts_of(tensor.detach()))
        return SparseSlot(layout, tensor.shape, coalesced, parts)  # type: ignore[arg-type]

    return _rebuild(value, Tensor, slot)


def _sparse_of(slot: SparseSlot, parts: list[Tensor]) -> Tensor:
    if slot.layout == "sparse_coo":
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices, values, slot.shape, is_coalesced=slot.coalesced or None
        )
    compressed, plain, values = parts
    layout = getattr(torch, slot.layout)
    return torch.sparse_compressed_tensor(compressed, plain, values, slot.shape, layout=layout)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The value with ``function`` of each tensor; a repeated tensor stays one."""
    done: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in done:
            done[id(tensor)] = function(tensor)
        return done[id(tensor)]

    return _rebuild(value, Tensor, once)


def _rebuild(value: Any, kind: type | tuple[type, ...], function: Callable) -> Any:
    """New containers, with ``function`` of each item of a kind, in order."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        items = [(key, _rebuild(one, kind, function)) for key, one in value.items()]
        return type(value)(items) if type(value) is not dict else dict(items)
    if type(value) in (list, tuple):
        return type(value)(_rebuild(one, kind, function) for one in value)
    return value


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _size_of(packed: Tensor) -> Tensor:
    return torch.tensor([packed.numel()], device="cpu")
