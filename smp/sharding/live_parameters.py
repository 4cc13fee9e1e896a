"""The parameters of one model that are gathered now (``sharded_data_parallel_degree``).

A model with at most ``sdp_max_live_parameters`` elements is gathered at the begin of a step, or
of a call outside, and released by the next update.  A larger one is gathered *on demand*:

- a module's own parameters when it is called, others when an operator meets them;
- in backward when autograd unpacks them: what a graph would save of a parameter is a note;
- the parameters used least recently are released for others, but for those of modules with a
  call under way.  A view, such as an operator's under way, keeps the memory that it has.

Parameters below ``sdp_param_persistence_threshold`` elements are never released.
"""

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from smp.marks import SHARD
from smp.modules import live_models
from smp.modules.live_models import LiveModel, record_of
from smp.pytorch.compiled_code import not_traced
from smp.sharding import owners, shards
from smp.sharding.owners import even_parts
from smp.sharding.shards import Shard, is_released, shard_of
from smp.slicing.slices import elements_alike
from smp.slicing.split_parameters import among_slices, is_plain
from smp.state_mod import state
from smp.tensor_parallel.backward import keys, step_end

_ON_THEIR_WAY = 4  # parameters


class _Saved(NamedTuple):
    """A tensor of a parameter's memory, in the place of it in a graph."""

    live: "LiveParameters"
    shard: Shard
    updates: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class LiveParameters:
    """One model's.

    Args:
        model: its local parameters are sharded.
    """

    def __init__(self, model: LiveModel) -> None:
        self._model: LiveModel = weakref.proxy(model)  # type: ignore[assignment]
        cfg = state.job("smp.DistributedModel").cfg
        self._limit = cfg.sdp_max_live_parameters
        self._shards: list[Shard] = []
        self._by_memory: dict[int, Shard] = {}  # by the number of the storage
        self._uses = itertools.count(1)
        self.updates = 0

    def has(self, shard: Shard) -> bool:
        """Whether the shard is of this model."""
        return shard.live is self

    @property
    def is_tight(self) -> bool:
        """Whether the parameters are more than those to be gathered at once."""
        return sum(shard.parameter.numel() for shard in self._shards) > self._limit

    # ------------------------------------------------------------------ what is sharded

    def prepare(self) -> None:
        """Shard the parameters that have owners now; alike on all replicas."""
        found: list[Shard] = []
        named = list(self._model.local_named_parameters())
        shared = _in_shared_memory([p for _, p in named], self._model)
        for name, parameter in named:
            parts = self._parts_of(parameter, shared)
            shard = shard_of(parameter)
            if shard is not None and shard.parts != parts:
                self._unshard(shard)
                shard = None
            if shard is None and parts is not None:
                _have_own_memory(parameter)
                shard = Shard(parameter, name, parts, self, keys.of_parameter(name))
                setattr(parameter, SHARD, shard)
            elif shard is not None and (shard.keeps_all or not shard.is_released):
                _have_own_memory(parameter)  # again, if the script has changed it
            if shard is not None:
                found.append(shard)
        if found != self._shards:
            self._shards = found
            self._refuse_too_many()
            self._note_memory(found)

    def _parts_of(self, parameter: nn.Parameter, shared: set[int]) -> owners.Parts | None:
        """The parts of a parameter that can be sharded."""
        shard = shard_of(parameter)
        kind = type(parameter) if shard is None else shard.kind
        if parameter.numel() < owners.least_sharded() or id(parameter) in shared:
            return None
        if parameter.is_meta or not parameter.is_leaf or not parameter.is_contiguous():
            return None
        if not is_plain(parameter, kind):
            return None
        if parameter.requires_grad:
            return owners.parts_of(parameter)  # None: its optimizer is not smp's
        return owners.parts_of(parameter) or even_parts(parameter.numel())

    def _refuse_too_many(self) -> None:
        rt = record_of(self._model).rt
        if rt.pp_size == 1 and rt.tp_size == 1:
            return
        most = sum(elements_alike(shard.parameter) for shard in self._shards)
        if most > self._limit:
            raise NotImplementedError(
                f"smp: sharded_data_parallel_degree: this rank has {most} elements in sharded "
                f"parameters, more than sdp_max_live_parameters={self._limit}: to gather fewer "
                "at a time is not built with pipeline or tensor parallelism; set "
                f"sdp_max_live_parameters to at least {most}"
            )

    def _unshard(self, shard: Shard) -> None:
        if shard.is_released:
            shards.gather([shard])
        delattr(shard.parameter, SHARD)

    def dissolve(self) -> None:
        """Have all parameters whole, on all replicas, until the next step.  Collective."""
        self.gather_all()
        for shard in self._shards:
            self._unshard(shard)
        self._shards = []

    # --------------------------------------------------------------- gathered, released

    def gather_all(self) -> None:
        """Collective over the RDP_GROUP."""
        released = [shard for shard in self._shards if shard.is_released]
        while released:
            shards.gather(released[:_ON_THEIR_WAY])
            del released[:_ON_THEIR_WAY]

    def release_all(self) -> None:
        """Keep each rank's own elements alone: the parameters are about to change."""
        self.updates += 1
        for shard in self._shards:
            if not shard.is_released:
                shards.release(shard)
        self._note_memory(self._shards)

    def release_alike(self) -> None:
        """After a failure, before which each rank may have gathered others."""
        for shard in self._shards:
            shard.last_use = 0
            if not shard.is_released:
                shards.release(shard)
        self._note_memory(self._shards)

    def read(self, value: Any) -> Any:
        """A parameter's values, in host memory if they are many; another value is itself.
        Collective over the RDP_GROUP for a sharded parameter.
        """
        shard = shard_of(value) if isinstance(value, nn.Parameter) else None
        if shard is None:
            return value
        self.fetch([shard])
        values = value.detach()
        return values.cpu() if self.is_tight else values

    def keep_within_limit(self) -> None:
        """Release those beyond the limit."""
        if self._shards:
            self.prepare()  # the script may have made some share their memory
        self._make_room(0, set())

    @not_traced("the gathering of a sharded parameter")
    def fetch(self, wanted: list[Shard]) -> None:
        """Have these gathered, in the place of others.  Collective over the RDP_GROUP."""
        now = next(self._uses)
        for shard in wanted:
            shard.last_use = now
        released = [shard for shard in wanted if shard.is_released]
        if not released:
            return
        self._make_room(sum(s.parameter.numel() for s in released), set(map(id, wanted)))
        try:
            shards.gather(released[:1])  # meets the one operation of a rank that has failed
            if len(released) > 1:
                shards.gather(released[1:])
        except Exception as error:
            step_end.hear(f"the gathering of '{released[0].name}'", error, "RDP_GROUP")
            error.add_note(
                f"smp: the gathering of parameter '{released[0].name}' is a call of all ranks "
                "of the RDP_GROUP; so are model.state_dict() and calls of the model"
            )
            raise

    @among_slices
    def _make_room(self, elements: int, wanted: set[int]) -> None:
        live = [shard for shard in self._shards if not shard.is_released]
        held = elements + sum(shard.parameter.numel() for shard in live)
        for shard in sorted(live, key=lambda shard: shard.last_use):
            if held <= self._limit:
                break
            # Alike on all ranks, so whatever views of it a script has here.
            if shard.uses > 0 or id(shard) in wanted:
                continue
            shards.release(shard)
            self._note_memory([shard])
            held -= shard.parameter.numel()

    # -------------------------------------------------------------------- on demand

    @among_slices
    def _note_memory(self, some: list[Shard]) -> None:
        for shard in some:
            self._by_memory[shard.parameter.untyped_storage()._cdata] = shard

    @among_slices
    def pack(self, tensor: Tensor) -> Any:
        """What a graph saves of a tensor; NotImplemented: it is none of these parameters'."""
        memory = tensor.untyped_storage()._cdata
        shard = self._by_memory.get(memory)
        if shard is None or shard.parameter.untyped_storage()._cdata != memory:
            return NotImplemented
        if tensor.dtype is not shard.parameter.dtype:
            return NotImplemented  # a view that keeps the parameter from being released
        place = tensor.size(), tensor.stride(), tensor.storage_offset()
        return _Saved(self, shard, self.updates, *place)

    @among_slices
    def unpack(self, saved: _Saved) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: the parameter was updated meanwhile.
        """
        if saved.updates != self.updates:
            raise RuntimeError(
                f"smp: parameter '{saved.shard.name}' was changed by optimizer.step() since "
                "the forward, and this backward needs its value from then: call backward "
                "before optimizer.step()"
            )
        self.fetch([saved.shard])
        return saved.shard.parameter.data.as_strided(saved.size, saved.stride, saved.offset)

    def begin(self) -> None:
        """No module has a call under way."""
        for shard in self._shards:
            shard.uses = 0
        self._note_memory(self._shards)  # the script may have given a parameter other memory


@among_slices
def _in_shared_memory(parameters: list[nn.Parameter], model: LiveModel) -> set[int]:
    """The ids of parameters that share their memory with another parameter or buffer.

    Parameters that are sharded already are so by the script, if elements are those of another.
    """
    by_memory: dict[int, list[Tensor]] = {}
    for tensor in (*parameters, *model.local_buffers()):
        is_here = not tensor.is_meta and tensor.layout is torch.strided
        if is_here and not is_released(tensor):  # alike on all ranks
            by_memory.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    shared: set[int] = set()
    for some in by_memory.values():
        if len(some) > 1:
            shared.update(id(t) for t in some if shard_of(t) is None or _overlaps(t, some))
    return shared


def _overlaps(tensor: Tensor, others: list[Tensor]) -> bool:
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return any(
        start < other.data_ptr() + other.nbytes and other.data_ptr() < end
        for other in others
        if other is not tensor
    )


@among_slices
def _have_own_memory(parameter: nn.Parameter) -> None:
    """A released parameter gives back all of its memory."""
    if parameter.untyped_storage().nbytes() != parameter.nbytes:
        parameter.data = parameter.data.clone()


# ------------------------------------------------------------------------ calls of models

_on_demand: list[LiveParameters] = []  # of the call under way


def _live_of(model: LiveModel) -> LiveParameters | None:
    return record_of(model).live_parameters


@contextmanager
def in_use(models: list[LiveModel]) -> Iterator[None]:
    """A block with calls of models, on all ranks of the RDP_GROUP."""
    lives = [live for live in map(_live_of, models) if live is not None]
    for live in lives:
        live.prepare()
    tight = [live for live in lives if live.is_tight]
    for live in lives:
        if live not in tight:
            live.gather_all()
    with _gathering(tight) if tight else nullcontext():
        yield


@contextmanager
def _gathering(tight: list[LiveParameters]) -> Iterator[None]:
    for live in tight:
        live.begin()
        live.keep_within_limit()
    before, _on_demand[:] = list(_on_demand), tight
    shards.serve(_serve)
    handles = [
        nn.modules.module.register_module_forward_pre_hook(_will_call),
        nn.modules.module.register_module_forward_hook(_has_called, always_call=True),
    ]
    try:
        with saved_tensors_hooks(_pack, _unpack):
            yield
    except BaseException:
        for live in tight:
            live.release_alike()
        raise
    finally:
        _on_demand[:] = before
        for handle in handles:
            handle.remove()


def group_of_call(models: list[LiveModel]) -> Any:
    """The ranks that gather parameters while the models run; None: they do so before."""
    lives = (_live_of(model) for model in models)
    if any(live is not None and live.is_tight for live in lives):
        return shards.group_of_gathers()
    return None


def _own(module: nn.Module) -> list[Shard]:
    found = (p.__dict__.get(SHARD) for p in module._parameters.values() if p is not None)
    return [shard for shard in found if shard is not None]


@not_traced("the gathering of a sharded parameter")
def _will_call(module: nn.Module, args: Any) -> None:
    if own := _own(module):
        for shard in own:
            shard.uses += 1
        _fetch(own)


@not_traced("the gathering of a sharded parameter")
def _has_called(module: nn.Module, args: Any, output: Any) -> None:
    for shard in _own(module):
        shard.uses = max(0, shard.uses - 1)


def _fetch(wanted: list[Shard]) -> None:
    for live in _on_demand:
        if mine := [shard for shard in wanted if live.has(shard)]:
            live.fetch(mine)


def _serve(wanted: list[Shard]) -> bool:
    """Gather parameters for an operator, in a call of their model."""
    _fetch(wanted)
    return not any(shard.is_released for shard in wanted)


def _pack(tensor: Tensor) -> Any:
    if tensor.layout is torch.strided:
        for live in _on_demand:
            if (saved := live.pack(tensor)) is not NotImplemented:
                return saved
    return tensor


def _unpack(saved: Any) -> Any:
    return saved.live.unpack(saved) if isinstance(saved, _Saved) else saved


def release_all() -> None:
    """An update of parameters begins."""
    for live in map(_live_of, live_models.living()):
        if live is not None:
            live.release_all()
