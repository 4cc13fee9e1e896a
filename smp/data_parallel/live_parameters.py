"""The sharded parameters of one model: which are gathered now, and when others are.

A model with at most ``sdp_max_live_parameters`` elements is gathered at the begin of a step, or
of a call outside.  The next update releases it.  A larger one is gathered *on demand*:

- a module's own parameters when it is called, others when an operator meets them;
- in backward when autograd unpacks them: what a graph would save of a parameter is a note;
- the parameters used least recently are released for others, but for those of modules with a
  call under way.  A view, such as an operator's under way, keeps the memory, for the parameter,
  too; an update is followed by a gather into it.

Parameters below ``sdp_param_persistence_threshold`` elements are never released.
"""

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from smp.collectives.torch_process_groups import device_of_numbers
from smp.marks import SHARD
from smp.modules import live_models
from smp.modules.live_models import LiveModel, record_of
from smp.pytorch import patches
from smp.pytorch.compiled_code import not_traced
from smp.sharding import owners, shards
from smp.sharding.shards import Shard, is_released, shard_of
from smp.slicing.slices import elements_alike
from smp.slicing.split_parameters import among_slices, is_plain
from smp.state_mod import state
from smp.tensor_parallel.backward import keys, step_end

_ON_THEIR_WAY = 4  # parameters


class _Other(NamedTuple):
    """A tensor of other memory: autograd compares no versions of tensors given to hooks."""

    tensor: Tensor
    version: int


class _Saved(NamedTuple):
    """A tensor of a parameter's memory, in the place of it in a graph."""

    live: "LiveParameters"
    shard: Shard
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class LiveParameters:
    """One model's.

    Args:
        model: its local parameters are sharded.

    Attributes:
        elements: those of all sharded parameters, alike on all tp_ranks.
    """

    def __init__(self, model: LiveModel) -> None:
        self._model: LiveModel = weakref.proxy(model)  # type: ignore[assignment]
        cfg = state.job("smp.DistributedModel").cfg
        self._limit = cfg.sdp_max_live_parameters
        self._shards: list[Shard] = []
        self._by_memory: dict[int, Shard] = {}  # by the number of the storage
        self._parameters: list[nn.Parameter] = []  # of the shards: they live until `prepare`
        self.elements = 0
        self._uses = itertools.count(1)
        self._heard = False  # of the failure of another rank's call
        self._has_warned = False
        self._number = live_models.number_of_newest()

    @property
    def is_tight(self) -> bool:
        """Whether the parameters are more than those to be gathered at once."""
        return self.elements > self._limit

    # ------------------------------------------------------------------ what is sharded

    def prepare(self) -> None:
        """Shard the parameters that have owners now; alike on all replicas."""
        found: list[Shard] = []
        named = list(self._model.local_named_parameters())
        shared = _in_shared_memory([p for _, p in named], self._model)
        for name, parameter in named:
            shard = shard_of(parameter)
            if shard is not None:
                _refuse_other_layout(shard)
            parts = self._parts_of(parameter, shared)
            if shard is not None and shard.parts != parts:
                self._unshard(shard)
                shard = None
            if shard is None and parts is not None:
                _have_own_memory(parameter)
                shard = Shard(parameter, name, parts, self, self._key_of(name))
                setattr(parameter, SHARD, shard)
            elif shard is not None and (shard.keeps_all or not shard.is_released):
                _have_own_memory(parameter)  # again, if the script has changed it
            if shard is not None:
                shard.belong_to(self)
                found.append(shard)
        self._warn_of_whole_ones(named)
        if found != self._shards:
            self._refuse_too_many()
            self._shards, self._parameters = found, [shard.parameter for shard in found]
            self.elements = sum(elements_alike(shard.parameter) for shard in found)
            self._by_memory.clear()  # those of before may have ended, and their memory
            self._note_memory(found)

    def _warn_of_whole_ones(self, named: list[tuple[str, nn.Parameter]]) -> None:
        """Say that a training shards nothing of parameters without an optimizer of smp's."""
        if self._has_warned or not (torch.is_grad_enabled() and self._model.training):
            return
        self._has_warned = True
        large = [(n, p) for n, p in named if p.numel() >= owners.least_sharded()]
        whole = [n for n, p in large if p.requires_grad and owners.parts_of(p) is None]
        if whole:
            warnings.warn(
                f"smp: sharded_data_parallel_degree: '{whole[0]}' and {len(whole) - 1} other "
                "parameters in training are whole on each rank, because no "
                "smp.DistributedOptimizer of this job has them: wrap their optimizer",
                stacklevel=7,
            )

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
        return owners.parts_of(parameter) or owners.even_parts(parameter.numel())

    def _key_of(self, name: str) -> int:
        of_model = f" of model {self._number}" if self._number else ""
        return keys.of_words(f"parameter '{name}'{of_model}")

    def _refuse_too_many(self) -> None:
        """Alike on all ranks.

        Raises:
            NotImplementedError: a rank of a pipeline, or of a TP_GROUP, has too many to gather.
        """
        rt, parts = record_of(self._model).rt, record_of(self._model).parts
        if rt.pp_size == 1 and rt.tp_size == 1:
            return
        elements = [0] * rt.pp_size
        for name, parameter in self._model.module.named_parameters():
            if parameter.numel() >= owners.least_sharded():
                elements[parts.owners[name] if parts else 0] += elements_alike(parameter)
        if (most := max(elements)) > self._limit:
            raise NotImplementedError(
                f"smp: sharded_data_parallel_degree: pp_rank {elements.index(most)} has {most} "
                f"elements, more than sdp_max_live_parameters={self._limit}: to gather fewer "
                "at a time is not built with pipeline or tensor parallelism; set "
                f"sdp_max_live_parameters to at least {most}"
            )

    def _unshard(self, shard: Shard) -> None:
        if shard.is_released:
            shards.gather([shard])
        shard.end()

    def dissolve(self) -> None:
        """Have all parameters whole, on all replicas, until the next step.  Collective."""
        self.gather_all()
        for shard in self._shards:
            self._unshard(shard)
        self._shards, self._parameters = [], []
        self._by_memory.clear()

    # --------------------------------------------------------------- gathered, released

    def gather_all(self) -> None:
        """Collective over the RDP_GROUP."""
        released = [shard for shard in self._shards if shard.is_released]
        while released:
            self._gather(released[:_ON_THEIR_WAY])
            del released[:_ON_THEIR_WAY]

    def release_for_update(self, is_updated: Callable[[Tensor], bool]) -> None:
        """Keep each rank's own elements alone of parameters that are about to change.

        Those that no optimizer updates go with them, unless others keep their values.

        Args:
            is_updated: whether the optimizer has the parameter.
        """
        trained = [s for s in self._shards if owners.parts_of(s.parameter) is not None]
        changing = {id(shard) for shard in trained if is_updated(shard.parameter)}
        if not changing:
            return
        frozen_go = len(changing) == len(trained)
        for shard in self._shards:
            if id(shard) in changing or (frozen_go and not shard.is_released):
                self._release(shard, id(shard) in changing)
        self._note_memory(self._shards)

    def _release(self, shard: Shard, is_updated: bool) -> None:
        if not shard.is_released:
            shards.release(shard, is_updated)
        elif is_updated:
            shard.has_changed(values=True)

    def release_all(self) -> None:
        """Keep each rank's own elements alone; the values stay."""
        for shard in self._shards:
            shard.last_use = 0  # after a failure each rank has used others
            self._release(shard, is_updated=False)
        self._note_memory(self._shards)

    def read(self, value: Any) -> Any:
        """A parameter's values, in host memory if the model is not whole at once.  Any other
        value is itself.  Collective over the RDP_GROUP for a sharded parameter.
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
        for shard in released:  # one by one: a failed rank's word is in the place of one
            self._gather([shard])

    def _gather(self, some: list[Shard]) -> None:
        try:
            shards.gather(some)
            self._heard = False
        except Exception as error:
            self._hear(f"the gathering of '{some[0].name}'", error)
            raise

    def _hear(self, what: str, error: Exception) -> None:
        self._heard = True
        makers = "all ranks of the RDP_GROUP, also in evaluation and in model.state_dict()"
        step_end.hear(f"{what} (of {makers})", error)

    def meet(self) -> None:
        """A backward outside of a step has ended on this rank: hear of one that has failed.

        Raises:
            PeerFailed: one has, or gathers other parameters.
        """
        if not self.is_tight:
            return
        group = shards.group_of_gathers()
        numbers = torch.zeros(1, device=device_of_numbers(group))
        try:
            dist.all_reduce(numbers, group=group)
        except Exception as error:
            self._hear("the end of the backward", error)
            raise

    def tell_of_failure(self) -> None:
        """A backward outside of a step has failed on this rank; others may wait in theirs."""
        if self.is_tight and not self._heard:
            with suppress(Exception):  # this call fails where the others gather
                dist.barrier(shards.group_of_gathers())
        self._heard = False

    @among_slices
    def _make_room(self, elements: int, wanted: set[int]) -> None:
        live = [shard for shard in self._shards if not shard.is_released]
        held = elements + sum(shard.parameter.numel() for shard in live)
        for shard in self._shards:
            if shard.has_views:
                shards.drop_memory(shard)
                self._note_memory([shard])
        for shard in sorted(live, key=lambda shard: shard.last_use):
            if held <= self._limit:
                break
            # Alike on all ranks, so whatever views of it a script has here.
            if shard.uses > 0 or id(shard) in wanted:
                continue
            shards.release(shard, is_updated=False)
            self._note_memory([shard])
            held -= shard.parameter.numel()

    # -------------------------------------------------------------------- on demand

    @among_slices
    def _note_memory(self, some: list[Shard]) -> None:
        for shard in some:
            self._by_memory[shard.parameter.untyped_storage()._cdata] = shard

    @among_slices
    def pack(self, tensor: Tensor) -> Any:
        """The note of a graph on a tensor; NotImplemented: it is none of these parameters'."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return NotImplemented
        memory = tensor.untyped_storage()._cdata
        shard = self._by_memory.get(memory)
        if shard is None or shard.parameter.untyped_storage()._cdata != memory:
            return NotImplemented
        if tensor.dtype is not shard.parameter.dtype:
            return NotImplemented  # a view that keeps the parameter from being released
        offset = int(tensor.storage_offset())
        return _Saved(self, shard, shard.version, tensor.size(), tensor.stride(), offset)

    @among_slices
    def unpack(self, saved: _Saved) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: the parameter has changed meanwhile.
        """
        if saved.version != saved.shard.version:
            raise RuntimeError(
                f"smp: parameter '{saved.shard.name}' was changed by optimizer.step(), or in "
                "place by the script, since the forward, and this backward needs its value "
                "from then: call backward before the change"
            )
        self.fetch([saved.shard])
        return saved.shard.parameter.data.as_strided(saved.size, saved.stride, saved.offset)

    def begin(self) -> None:
        """No module has a call under way."""
        for shard in self._shards:
            shard.uses = 0
        self._note_memory(self._shards)  # the script may have given a parameter other memory
        self._make_room(0, set())


def _refuse_other_layout(shard: Shard) -> None:
    parameter, wanted = shard.parameter, shard.parts[-1].end
    with torch._C.DisableTorchFunctionSubclass():
        if parameter.numel() == wanted and parameter.is_contiguous():
            return
        raise RuntimeError(
            f"smp: sharded parameter '{shard.name}' has shape {list(parameter.shape)} and "
            f"strides {list(parameter.stride())} now, and not {wanted} contiguous elements as "
            "before: put such a tensor there before smp.DistributedModel"
        )


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
    before, _on_demand[:] = list(_on_demand), tight
    shards.serve(_serve)
    try:
        calls = patches.gathered_calls.in_block(_will_call, _has_called)
        with calls, saved_tensors_hooks(_pack, _unpack):
            yield
    except BaseException as error:
        for live in tight:
            live.release_all()  # what was gathered differs from rank to rank
        _explain_transform(error, tight[0])
        raise
    finally:
        _on_demand[:] = before


def _explain_transform(error: BaseException, live: LiveParameters) -> None:
    """Name the cause of ``torch.func``'s refusal."""
    if isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error):
        raise NotImplementedError(
            "smp: torch.func.grad, vjp, jacrev and hessian in a call of a model with more than "
            f"sdp_max_live_parameters elements: {error}; set sdp_max_live_parameters to at "
            f"least {live.elements}"
        ) from error


def group_of_call(models: list[LiveModel]) -> Any:
    """The ranks that gather parameters while the models run; None: they do so before."""
    lives = (_live_of(model) for model in models)
    if any(live is not None and live.is_tight for live in lives):
        return shards.group_of_gathers()
    return None


# Modules that decide by, or compute with, parameters of modules inside.
_LOOK_BELOW = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


def _own(module: nn.Module) -> list[Shard]:
    """The parameters in use while the module has a call under way."""
    if isinstance(module, torch.jit.ScriptModule):  # its calls of others have no hooks
        return _sharded(module.parameters())
    return _sharded(p for p in module._parameters.values() if p is not None)


def _sharded(parameters: Iterable[nn.Parameter]) -> list[Shard]:
    return [shard for shard in map(shard_of, parameters) if shard is not None]


def _seen_below(module: nn.Module) -> list[Shard]:
    """Parameters in use at the begin of the call."""
    if isinstance(module, nn.TransformerEncoder):
        return _sharded(module.layers[0].parameters()) if len(module.layers) else []
    return _sharded(module.parameters())


@not_traced("the gathering of a sharded parameter")
def _will_call(module: nn.Module, args: Any) -> None:
    if own := _own(module):
        for shard in own:
            shard.uses += 1
        _fetch(own)
    if isinstance(module, _LOOK_BELOW) and not torch.is_grad_enabled():
        _fetch(_seen_below(module))


@not_traced("the gathering of a sharded parameter")
def _has_called(module: nn.Module, args: Any, output: Any) -> None:
    for shard in _own(module):
        shard.uses = max(0, shard.uses - 1)


def _fetch(wanted: list[Shard]) -> None:
    for live in _on_demand:
        if mine := [shard for shard in wanted if shard.live is live]:
            live.fetch(mine)


def _serve(wanted: list[Shard]) -> bool:
    """Gather parameters for an operator, in a call of their model or a backward of one."""
    _fetch(wanted)
    if torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled():
        for shard in wanted:  # of a call outside of steps, which is over
            if shard.live is not None:
                shard.live.fetch([shard])
    return not any(shard.is_released for shard in wanted)


def _pack(tensor: Tensor) -> Any:
    if tensor.layout is torch.strided:
        for live in _on_demand:
            if (saved := live.pack(tensor)) is not NotImplemented:
                return saved
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return tensor
    return _Other(tensor, tensor._version)


def _unpack(saved: Any) -> Any:
    if isinstance(saved, _Saved):
        return saved.live.unpack(saved)
    if isinstance(saved, _Other):
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                f"smp: a tensor of shape {list(saved.tensor.shape)} that this backward needs "
                "has been modified by an inplace operation since the forward: is at version "
                f"{saved.tensor._version}; expected version {saved.version} instead"
            )
        return saved.tensor
    return saved


def release_for_update(is_updated: Callable[[Tensor], bool]) -> None:
    """An update of parameters begins.

    Args:
        is_updated: whether the optimizer has the parameter.
    """
    for live in map(_live_of, live_models.living()):
        if live is not None:
            live.release_for_update(is_updated)
