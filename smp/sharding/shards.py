"""Sharded parameters: each rank of the RDP_GROUP has its own elements, and all of them in use.

A parameter is *gathered* or *released*, on all ranks of the group alike.  A gathered one is as
any other.  A released one has no memory but for this rank's elements.  It stays the same
object, and refuses operators by name, or is gathered for them (`serve`).

The elements of a rank are those that it updates (`smp.sharding.owners`).  They are in one
place: in the parameter's memory while it is gathered, else in `Shard.own`.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from smp import ranks, torch_versions
from smp.collectives.process_group import ProcessGroup
from smp.marks import SHARD, set_class
from smp.pytorch.transforms import outside_of_transforms
from smp.sharding.owners import Part, Parts, elements_by_rank, part_here
from smp.slicing.split_parameters import among_slices
from smp.state_mod import state

_GRAD: Any = Tensor.grad  # the attribute of torch's own

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
        live: the model's `smp.data_parallel.live_parameters.LiveParameters`; not kept alive.
        key: of its gathers, alike on all ranks; see `smp.tensor_parallel.backward.keys`.

    Attributes:
        part: this rank's; None: it has none.
        own: this rank's elements while the parameter is released; None: it keeps all of them,
            or has none.
        kind: the parameter's class while it is gathered, and has no averages of this rank's.
        gradient: the averages for this rank's elements, which it updates; None: there are none,
            or ``.grad`` has them.
        has_views: while the parameter is released, whether its memory stays for other tensors.
        uses: modules with a call under way that have the parameter.
        last_use: a number that grows from use to use.
        seen: the version at the last gather.
    """

    def __init__(
        self, parameter: nn.Parameter, name: str, parts: Parts, live: Any, key: int
    ) -> None:
        self._live = weakref.ref(live)
        self._parameter = weakref.ref(parameter)
        self.name = name
        self.parts = parts
        self.part: Part | None = part_here(parts)
        self.own: Tensor | None = None
        self.kind = type(parameter)
        self.is_released = False
        self.gradient: Tensor | None = None
        self.has_views = False
        self.uses = 0
        self.last_use = 0
        self.key = key
        self._own_changes = 0
        self.seen = self.version

    def __reduce__(self) -> Any:
        return type(None), ()  # a pickled parameter is not sharded

    @property
    def live(self) -> Any:
        """The model's `smp.data_parallel.live_parameters.LiveParameters`."""
        return self._live()

    def belong_to(self, live: Any) -> None:
        """Be another model's, as its module was wrapped again."""
        if self._live() is not live:
            self._live = weakref.ref(live)

    @property
    def version(self) -> int:
        """A number that grows with each change of values by the script or an optimizer."""
        return self.parameter._version - self._own_changes

    def has_changed(self, values: bool) -> None:
        """Have graphs that saved the parameter itself refuse their backward.

        Args:
            values: False: the parameter will have them again.
        """
        _count_change(self.parameter)
        self._own_changes += not values

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter; it lives for as long as its shard is asked for."""
        parameter = self._parameter()
        assert parameter is not None
        return parameter

    def is_of(self, parameter: Tensor) -> bool:
        """Whether the shard is the parameter's."""
        return self._parameter() is parameter

    @property
    def keeps_all(self) -> bool:
        """Whether this rank has all elements, and so keeps the parameter's memory."""
        return self.part is not None and len(self.parts) == 1

    def dress(self) -> None:
        """Give the parameter the class of its state."""
        kind = self.kind if self.gradient is None else AveragedParameter
        set_class(self.parameter, ReleasedParameter if self.is_released else kind)

    def end(self) -> None:
        """The gathered parameter is as any other from now on, with its gradient."""
        parameter = self.parameter
        if self.gradient is not None:
            parameter.grad = parameter.grad  # of its shape
        delattr(parameter, SHARD)

    def _show(self, elements: Tensor) -> None:
        """This rank's elements are there now."""
        made = _slices.get(id(self.parameter))
        if made is not None:
            made.data = elements


# The slices of parameters in optimizers, by id of the parameter, which they keep alive.
_slices: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def _count_change(tensor: Tensor) -> None:
    changed = tensor._version + 1
    torch._C._autograd._unsafe_set_version_counter((tensor,), (changed,))


def _count_change_of_slice(parameter: Tensor) -> None:
    """A gathered parameter may be changed by the script.  A slice made of released elements has
    a count of its own.
    """
    made, before = _slices.get(id(parameter)), parameter._version
    if made is not None:
        _count_change(made)
        if parameter._version != before:
            torch._C._autograd._unsafe_set_version_counter((parameter,), (before,))


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
    shard = getattr(parameter, SHARD, None)
    if shard is None or shard.is_of(parameter):
        return shard
    return None  # the parameter is a shallow copy


def is_released(parameter: Tensor) -> bool:
    """Whether the values of a model's parameter are with their owners alone."""
    shard = shard_of(parameter)
    return shard is not None and shard.is_released


def has_views(parameter: Tensor) -> bool:
    """Whether other tensors keep a released parameter's memory on this rank."""
    shard = shard_of(parameter)
    return shard is not None and shard.is_released and shard.has_views


# Gathers shards for an operator of the script's, or refuses to.
_Service = Callable[[list[Shard]], bool]
_service: list[_Service] = []


def serve(service: _Service) -> None:
    """Have operators on released parameters served so, from now on."""
    _service[:] = [service]


def averages_of(parameter: Tensor) -> Tensor | None:
    """The averages for this rank's elements, apart from ``.grad``; None: there are none."""
    shard = shard_of(parameter)
    return None if shard is None else shard.gradient


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The averages for this rank's elements, or else ``.grad``."""
    averages = averages_of(parameter)
    return parameter.grad if averages is None else averages


def has_gradient(parameter: Tensor) -> bool:
    """Whether there is a gradient for this rank's elements."""
    return gradient_of(parameter) is not None


def may_keep_averages(parameter: Tensor) -> bool:
    """Whether this rank can keep averages for its own elements alone."""
    shard = shard_of(parameter)
    return shard is not None and len(shard.parts) > 1 and shard.kind is nn.Parameter


def keep_averages(parameter: nn.Parameter, averages: Tensor | None) -> None:
    """Have averages for this rank's elements alone, in the place of ``.grad``."""
    shard = shard_of(parameter)
    assert shard is not None
    _GRAD.__set__(parameter, None)
    shard.gradient = averages
    shard.dress()


class AveragedParameter(nn.Parameter):
    """A parameter with averages for this rank's elements alone.

    A script that asks for ``.grad`` gets these with zeros for the elements of others.
    """

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """As of any parameter."""
        shard = shard_of(self)
        if shard is not None and shard.gradient is not None and shard.part is not None:
            averages, part = shard.gradient, shard.part
            whole = averages.new_zeros(self.numel())
            whole[part.start : part.end] = averages
            added = _GRAD.__get__(self)  # by a backward that no hook of smp's saw
            whole = whole.view(self.shape)
            self.grad = whole if added is None else whole + added
        return _GRAD.__get__(self)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        shard = shard_of(self)
        if shard is not None and shard.gradient is not None:
            shard.gradient = None
            shard.dress()
        _GRAD.__set__(self, gradient)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        made = nn.Parameter(self.data.clone(), self.requires_grad)
        memo[id(self)] = made
        return made


class ReleasedParameter(AveragedParameter):
    """A parameter with its values at their owners."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            return _grad(*args, **kwargs)
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
        "model's calls each rank has its own elements; use the parameter in a @smp.step or in "
        "`with model.gathered_parameters():`, on all ranks, or take model.state_dict()"
    )


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Gradients with respect to parameters that need no values.

    The backward's own operators see released parameters as such.
    """
    whole = kwargs.pop("materialize_grads", False)
    if whole:
        kwargs["allow_unused"] = True
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    edges = tuple(_edge(one) if isinstance(one, ReleasedParameter) else one for one in given)
    found = torch.autograd.grad(outputs, edges, *args, **kwargs)
    if not whole:
        return found
    pairs = zip(found, given, strict=True)
    return tuple(torch.zeros_like(one) if got is None else got for got, one in pairs)


@among_slices
def _edge(parameter: Tensor) -> Any:
    if not parameter.requires_grad:
        raise RuntimeError("One of the differentiated Tensors does not require grad")
    return get_gradient_edge(parameter)


# ----------------------------------------------------------------------- both directions


@contextmanager
def _apart() -> Iterator[None]:
    """A block that is none of the script's computation."""
    with (
        torch._C.DisableTorchFunctionSubclass(),
        torch.inference_mode(False),
        torch.no_grad(),
        outside_of_transforms(),
    ):
        yield


def release(shard: Shard, is_updated: bool) -> None:
    """Keep this rank's elements alone.  No rank waits for another.

    Other tensors with the parameter's memory, such as views of the script's, keep it, for the
    parameter, too.  A graph that has saved a parameter without memory refuses its backward, as
    after any other change.  Those of calls with gathers on demand have saved notes.

    Args:
        is_updated: the values are about to change.
    """
    with _apart():
        parameter = shard.parameter
        shard.has_views = False
        if not shard.keeps_all:
            if shard.part is not None:
                row = parameter.data.view(-1)[shard.part.start : shard.part.end]
                shard.own = row.clone()
                shard._show(shard.own)
                del row  # a view of the memory
            shard.has_views = not _drop_memory(parameter)
        if is_updated or not (shard.keeps_all or shard.has_views):
            shard.has_changed(is_updated)
        if shard.version != shard.seen:
            _count_change_of_slice(parameter)
        shard.is_released = True
        shard.dress()


def drop_memory(shard: Shard) -> None:
    """Give back a released parameter's memory, if other tensors had it and are gone."""
    if not shard.has_views:
        return
    with _apart():
        if _drop_memory(shard.parameter):
            shard.has_views = False
            shard.has_changed(values=False)


def _drop_memory(parameter: nn.Parameter) -> bool:
    """Give back the parameter's memory, unless other tensors have it, too."""
    storage = parameter.untyped_storage()
    # References of the parameter, and of `storage`; more are of views.
    if torch._C._storage_Use_Count(storage._cdata) > 2:
        return False
    if not storage.resizable() or storage.nbytes() != parameter.nbytes:
        parameter.data = torch.empty_like(parameter.data)
    parameter.untyped_storage().resize_(0)
    return True


def gather(shards: Sequence[Shard]) -> None:
    """Have the values of all owners.  Collective over the RDP_GROUP.

    Args:
        shards: released ones, in an order alike on all ranks.

    Raises:
        Exception: of a collective; the shards are released then.
    """
    with _apart():
        error: Exception | None = None
        works: list[Any] = []
        for shard in shards:
            try:
                works += _begin_gather(shard, len(shards) > 1)
            except Exception as failure:  # noqa: BLE001 - others are under way
                error = error or failure
        for work in works:
            try:
                work.wait()
            except Exception as failure:  # noqa: BLE001 - the others write to the memory yet
                error = error or failure
        if error is not None:
            for shard in shards:
                if not shard.keeps_all:
                    shard.has_views = not _drop_memory(shard.parameter)
            raise error
        for shard in shards:
            parameter, part = shard.parameter, shard.part
            if part is not None and len(shard.parts) > 1:
                shard._show(parameter.data.view(-1)[part.start : part.end])
            shard.own, shard.is_released, shard.has_views = None, False, False
            shard.seen = shard.version
            shard.dress()


def group_of_gathers() -> dist.ProcessGroup:
    """This rank's RDP_GROUP: gathers come in the order of use, and gradients in another."""
    return state.job("a sharded parameter").torch_groups.by_kind["shards"]


def _begin_gather(shard: Shard, is_async: bool) -> list[Any]:
    """One that is waited for keeps no view in another thread for a while."""
    parameter, group = shard.parameter, group_of_gathers()
    row, members = parameter.data, ranks.get_rdp_group()
    if parameter.untyped_storage().nbytes() < parameter.nbytes:
        parameter.untyped_storage().resize_(parameter.nbytes)
    row = row.view(-1)
    counts = elements_by_rank(shard.parts)
    own = row[:0] if shard.part is None else row[shard.part.start : shard.part.end]
    own = own if shard.own is None else shard.own
    alike = len(set(counts)) == 1
    if isinstance(group, ProcessGroup):
        group.key = shard.key
        try:
            if row.is_cpu:
                sizes = None if alike else counts
                return [group.gather_rows(row, own, sizes, is_async, 0, 0, ())]
            if alike:
                return [torch_versions.all_gather_single(row, own, group=group, async_op=True)]
        finally:
            group.key = 0
    if alike:
        return [torch_versions.all_gather_single(row, own, group=group, async_op=True)]
    if shard.own is not None and shard.part is not None:
        row[shard.part.start : shard.part.end].copy_(shard.own)
    return [
        dist.broadcast(row[start:end], members[owner], group=group, async_op=True)
        for owner, start, end in shard.parts
    ]
