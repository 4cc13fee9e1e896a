"""Sharded parameters: each rank of the RDP_GROUP has its own elements, and all of them in use.

A parameter is *gathered* or *released*, on all ranks of the group alike.  A gathered one is as
any other.  A released one has no memory but for this rank's elements; it stays the same object,
and refuses operators by name, or is gathered for them (`serve`).

The elements of a rank are those that it updates (`smp.sharding.owners`).  They are in one
place: in the parameter's memory while it is gathered, else in `Shard.own`.
"""

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp import ranks, torch_versions
from smp.collectives.process_group import ProcessGroup
from smp.marks import SHARD, set_class
from smp.sharding.owners import Part, Parts, part_here
from smp.slicing.split_parameters import among_slices
from smp.state_mod import state

# Reads of a released parameter that need no values.
_HARMLESS = frozenset({
    "__hash__", "__set__", "dim", "element_size", "empty_like", "full_like", "is_complex",
    "is_contiguous", "is_floating_point", "ndimension", "nelement", "new_empty", "new_full",
    "new_ones", "new_zeros", "numel", "ones_like", "rand_like", "randn_like", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "size", "stride", "zeros_like",
})  # fmt: skip

# Attributes that show the values.
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})


class Shard:
    """One parameter's elements on this rank.

    Args:
        parameter: of the model; gathered.
        name: in the model.
        parts: its elements by owner.
        live: the model's `smp.sharding.live_parameters.LiveParameters`.
        key: of the gathering's collective.

    Attributes:
        part: this rank's; None: it has none.
        own: this rank's elements while the parameter is released; None: it keeps all of them,
            or has none.
        kind: the parameter's class while it is gathered.
        uses: modules with a call under way that have the parameter.
        last_use: a number that grows from use to use.
    """

    def __init__(
        self, parameter: nn.Parameter, name: str, parts: Parts, live: Any, key: int
    ) -> None:
        self.live = live
        self._parameter = weakref.ref(parameter)
        self.name = name
        self.key = key
        self.parts = parts
        self.part: Part | None = part_here(parts)
        self.own: Tensor | None = None
        self.kind = type(parameter)
        self.is_released = False
        self.uses = 0
        self.last_use = 0

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter; it lives for as long as its shard is asked for."""
        parameter = self._parameter()
        assert parameter is not None
        return parameter

    @property
    def keeps_all(self) -> bool:
        """Whether this rank has all elements, and so keeps the parameter's memory."""
        return self.part is not None and len(self.parts) == 1

    def _show(self, elements: Tensor) -> None:
        """This rank's elements are there now."""
        made = _slices.get(id(self.parameter))
        if made is not None:
            made.data = elements


# The slices of parameters in optimizers, by id of the parameter, which they keep alive.
_slices: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def note_slice(parameter: Tensor, made: Tensor) -> None:
    """An optimizer has this rank's elements of a parameter as a tensor of their own."""
    _slices[id(parameter)] = made


def elements_here(parameter: Tensor, part: Part) -> Tensor:
    """Elements of this rank, in their place of now."""
    shard = shard_of(parameter)
    if shard is not None and shard.own is not None:
        return shard.own
    return parameter.detach().as_subclass(Tensor).view(-1)[part.start : part.end]


def shard_of(parameter: Tensor) -> Shard | None:
    """The shard of a model's parameter; None: it is not sharded."""
    return getattr(parameter, SHARD, None)


def is_released(parameter: Tensor) -> bool:
    """Whether the values of a model's parameter are with their owners alone."""
    shard = shard_of(parameter)
    return shard is not None and shard.is_released


# Gathers shards for an operator of the script's, or refuses to.
_Service = Callable[[list[Shard]], bool]
_service: list[_Service] = []


def serve(service: _Service) -> None:
    """Have operators on released parameters served so, from now on."""
    _service[:] = [service]


class ReleasedParameter(nn.Parameter):
    """A parameter with its values at their owners."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_harmless(func):
            shards = [s for s in map(shard_of, _parameters_in((args, kwargs))) if s is not None]
            if not (_service and _service[0](shards)):
                released = next(shard for shard in shards if shard.is_released)
                _refuse(released, getattr(func, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shard = shard_of(self)
        name = "" if shard is None else shard.name
        return f"{type(self).__name__}('{name}', shape={tuple(self.shape)})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._smp_refuse("pickling")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._smp_refuse("copying")

    def _smp_refuse(self, what: str) -> NoReturn:
        shard = shard_of(self)
        assert shard is not None
        _refuse(shard, what)


def _is_harmless(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "__get__":
        return attribute not in _VALUES
    return name in _HARMLESS and attribute != "data"


def _parameters_in(value: Any) -> list[Tensor]:
    if isinstance(value, nn.Parameter):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return [found for one in value for found in _parameters_in(one)]
    return []


def _refuse(shard: Shard, what: str) -> NoReturn:
    raise RuntimeError(
        f"smp: {what} needs the values of parameter '{shard.name}', of shape "
        f"{list(shard.parameter.shape)}, which is sharded over the RDP_GROUP: outside of the "
        "model's calls each rank has its own elements; use the parameter in `with "
        "model.gathered_parameters():`, on all ranks, or take model.state_dict()"
    )


# ----------------------------------------------------------------------- both directions


@among_slices
@torch.inference_mode(False)
@torch.no_grad()
def release(shard: Shard) -> None:
    """Keep this rank's elements alone.  No rank waits for another.

    Other tensors with the parameter's memory, such as views of the script's, keep that.  A
    graph that has saved the parameter itself, but for those of `smp.sharding.live_parameters`,
    refuses its backward: as after any other change of the parameter.
    """
    parameter = shard.parameter
    if not shard.keeps_all:
        if shard.part is not None:
            row = parameter.data.view(-1)[shard.part.start : shard.part.end]
            shard.own = row.clone()
            shard._show(shard.own)
            del row  # a view of the memory
        _drop_memory(parameter)
    made = _slices.get(id(parameter))
    for changed in (parameter,) if made is None else (parameter, made):
        version = changed._version + 1
        torch._C._autograd._unsafe_set_version_counter((changed,), (version,))
    shard.is_released = True
    set_class(parameter, ReleasedParameter)


def _drop_memory(parameter: nn.Parameter) -> None:
    storage = parameter.untyped_storage()
    # References of the parameter, and of `storage`; more are of views, which keep the memory.
    is_shared = torch._C._storage_Use_Count(storage._cdata) > 2
    if is_shared or not storage.resizable() or storage.nbytes() != parameter.nbytes:
        parameter.data = torch.empty_like(parameter.data)
    parameter.untyped_storage().resize_(0)


@among_slices
@torch.no_grad()
def gather(shards: list[Shard]) -> None:
    """Have the values of all owners.  Collective over the RDP_GROUP.

    Args:
        shards: released ones, in an order alike on all ranks.
    """
    with torch.inference_mode(False):
        works = [work for shard in shards for work in _begin_gather(shard)]
        for work in works:
            work.wait()
        for shard in shards:
            parameter, part = shard.parameter, shard.part
            if part is not None and len(shard.parts) > 1:
                shard._show(parameter.data.view(-1)[part.start : part.end])
            shard.own, shard.is_released = None, False
            set_class(parameter, shard.kind)


def group_of_gathers() -> dist.ProcessGroup:
    """This rank's RDP_GROUP: gathers come in the order of use, and gradients in another."""
    return state.job("a sharded parameter").torch_groups.by_kind["shards"]


def _begin_gather(shard: Shard) -> list[Any]:
    parameter, group = shard.parameter, group_of_gathers()
    row, members = parameter.data, ranks.get_rdp_group()
    if not shard.keeps_all:
        parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
    row = row.view(-1)
    counts = [0] * len(members)
    for owner, start, end in shard.parts:
        counts[owner] = end - start
    own = row[:0] if shard.own is None else shard.own
    if shard.keeps_all:
        own = row
    if isinstance(group, ProcessGroup) and row.is_cpu:
        alike = len(set(counts)) == 1
        group.key = shard.key
        return [group.gather_rows(row, own, None if alike else counts, True)]
    if len(shard.parts) == 1:
        source = members[shard.parts[0].owner]
        return [dist.broadcast(row, source, group=group, async_op=True)]
    if len(set(counts)) == 1:
        return [torch_versions.all_gather_single(row, own, group=group, async_op=True)]
    if shard.part is not None:
        row[shard.part.start : shard.part.end].copy_(own)
    return [
        dist.broadcast(row[start:end], members[owner], group=group, async_op=True)
        for owner, start, end in shard.parts
    ]
