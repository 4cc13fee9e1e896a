"""State of an optimizer with its parameters on several ranks.

Parameters are numbered as in the wrapped optimizer's own state dict, in the order of its
groups.  The numbers are alike on all ranks, so a full dict loads into the plain optimizer of
the plain model.  Where modules were replaced, a full one is translated to its numbers.
"""

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from smp import ranks
from smp.compat.plain_optimizer import plain_optimizer
from smp.data_parallel import data_parallel
from smp.marks import IS_PARTIAL, IS_SHARD
from smp.modules import live_models
from smp.precision.loss_scale import ScaledGradients
from smp.precision.masters import Masters, put_into, take_out
from smp.ranks import CommGroup
from smp.saving.replica import Replica
from smp.sharding.owners import model_parameter
from smp.sharding.sharded_optimizer import ShardedOptimizer
from smp.sharding.slices import joined, joined_shards
from smp.slicing.slices import Slices, slices_of
from smp.state_mod import state
from smp.tensor_parallel import group

HALF_STATES = "fp16_states"  # a key of state dicts: master weights and loss scale


class Waiting(NamedTuple):
    """A state that was loaded before the partition, and is the optimizer's until then."""

    by_number: dict[Any, Any]  # with masters
    partial: bool


class LiveOptimizer(Protocol):
    """A `smp.DistributedOptimizer`, as rooms below it know it."""

    waiting: Waiting | None

    @property
    def optimizer(self) -> Any: ...
    @property
    def masters(self) -> Masters: ...
    @property
    def scaled(self) -> ScaledGradients | None: ...
    @property
    def sharded(self) -> ShardedOptimizer | None: ...
    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]: ...
    def local_state_dict(self, *args: Any, **options: Any) -> dict[str, Any]: ...
    def load_state_dict(self, *args: Any, **options: Any) -> Any: ...


def _owners(optimizer: LiveOptimizer) -> list[int | None]:
    """The pp_rank of each parameter, by its number; None: no model has it.

    Raises:
        RuntimeError: before ``smp.init``.
    """
    owner_of: dict[int, int] = {}
    for model in live_models.of_job("DistributedOptimizer"):
        if model.partitioned:
            owners = live_models.parts_of(model).owners
            for name, parameter in model.module.named_parameters():
                owner_of[id(parameter)] = owners[name]
    members = [p for group in optimizer.param_groups for p in group["params"]]
    return [owner_of.get(id(model_parameter(p))) for p in members]


def _waits(optimizer: LiveOptimizer) -> bool:
    """Whether one of the optimizer's models awaits its partition."""
    if state.job("DistributedOptimizer").runtime.pp_size == 1:
        return False
    members = (p for group in optimizer.param_groups for p in group["params"])
    mine = {id(model_parameter(p)) for p in members}
    return any(
        id(p) in mine
        for model in live_models.living()
        if not model.partitioned
        for p in model.module.parameters()
    )


def _is_torchs(state_dict: Mapping[str, Any]) -> bool:
    """Whether the state has the form of torch's optimizers; a wrapped one may have its own."""
    return isinstance(state_dict.get("state"), dict) and "param_groups" in state_dict


def _settle(optimizer: LiveOptimizer) -> None:
    """Have the optimizer's parameters be those of its next update."""
    if optimizer.sharded is not None:
        data_parallel.assign_owners()
        optimizer.sharded.take_share()
    optimizer.masters.make()


def local_state_dict(optimizer: LiveOptimizer, gather_if_shard: bool = True) -> dict[str, Any]:
    """The state of this rank's parameters, all groups, ``_smp_is_partial``.

    Args:
        gather_if_shard: collective over the RDP_GROUP with sharded state; otherwise the shard
            of this rank has the key ``_smp_is_shard``, with the rdp_size and the places of
            slices.
    """
    waiting = optimizer.waiting
    if waiting is None:
        _settle(optimizer)
    out = dict(optimizer.optimizer.state_dict())
    if waiting is not None:
        given = waiting.by_number
        own = given if waiting.partial else _own_slices(optimizer, given)
        out["state"], masters = take_out(own)
        _add_half_states(optimizer, out, masters)
    elif _is_torchs(out):
        states = _of_rank(optimizer, out["state"])
        masters = _masters(optimizer)
        if optimizer.sharded is not None:
            if gather_if_shard:
                both = _of_all_owners(optimizer.sharded, put_into(states, masters))
                states, masters = take_out(both)
            else:
                places = optimizer.sharded.places()
                out[IS_SHARD] = {"rdp_size": ranks.rdp_size(), "places": places}
        out["state"] = states
        _add_half_states(optimizer, out, masters)
    out[IS_PARTIAL] = True
    return out


def _of_all_owners(sharded: ShardedOptimizer, own: Mapping[Any, Any]) -> dict[Any, Any]:
    """A state with the entries of the other owners.  Collective over the RDP_GROUP."""
    replica = Replica("optimizer.state_dict", CommGroup.RDP_GROUP)
    every, places = sharded.by_number(), sharded.places()
    held: dict[Any, Any] = dict(own)
    for number in places:
        if number in held:
            held[f"{number}/{ranks.rdp_rank()}"] = places[number], held.pop(number)
    whole = [number for number, parts in every.items() if len(parts) == 1]
    cut = {n: [f"{n}/{p.owner}" for p in parts] for n, parts in every.items() if len(parts) > 1}
    slices = [key for keys in cut.values() for key in keys]
    found = replica.route(
        held, dict.fromkeys([*(k for k in own if k not in cut), *whole, *slices])
    )
    for number, keys in cut.items():
        pieces = [found.pop(key) for key in keys if key in found]
        if len(pieces) == len(keys):
            found[number] = joined(pieces)
    numbers = sorted(key for key in found if isinstance(key, int))
    return {key: found[key] for key in (*numbers, *(k for k in found if k not in numbers))}


def _masters(optimizer: LiveOptimizer) -> dict[int, Tensor]:
    """The float32 weights of this rank's half parameters, by number."""
    optimizer.masters.follow()
    return {n: m.detach().as_subclass(Tensor) for n, m in optimizer.masters.by_number().items()}


def _add_half_states(
    optimizer: LiveOptimizer, out: dict[str, Any], masters: dict[int, Tensor]
) -> None:
    """Add the parts of a state that half precision alone has."""
    if state.cfg.fp16 or state.cfg.bf16:
        scaled = optimizer.scaled
        scale = None if scaled is None else scaled.scale.state_dict()
        out[HALF_STATES] = {"master_weights": masters, "loss_scale": scale}


def _of_rank(optimizer: LiveOptimizer, by_number: Mapping) -> dict:
    """A state's entries for parameters of this rank, or for none."""
    rank = state.job("DistributedOptimizer").runtime.pp_rank
    owners = _owners(optimizer)
    return {
        number: one
        for number, one in by_number.items()
        if not isinstance(number, int)
        or number >= len(owners)
        or owners[number] in (None, rank)
    }


def full_state_dict(optimizer: LiveOptimizer) -> dict[str, Any]:
    """The state of all parameters, in host memory where it comes from other ranks.

    Collective over the MP_GROUP after the partition, over all ranks with sharded state.  Before
    it a loaded partial state makes it collective, too.
    """
    waiting = optimizer.waiting
    if waiting is None:
        _settle(optimizer)
    out = dict(optimizer.optimizer.state_dict())
    if not _is_torchs(out):
        return out
    plain = plain_optimizer(optimizer.param_groups)
    if waiting is not None:
        given = waiting.by_number
        out["state"] = _gathered(optimizer, given) if waiting.partial else given
    else:
        own = put_into(out["state"], _masters(optimizer))
        if optimizer.sharded is not None:
            own = _of_all_owners(optimizer.sharded, own)
        spread = _slices(optimizer) or any(one is not None for one in _owners(optimizer))
        out["state"] = _gathered(optimizer, _of_rank(optimizer, own)) if spread else own
    if plain is not None:
        out = plain.to_plain(out)
    out["state"], masters = take_out(out["state"])
    _add_half_states(optimizer, out, masters)
    return out


def _gathered(optimizer: LiveOptimizer, mine: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state of all parameters, by their numbers here.  Collective over the MP_GROUP."""
    cut = _slices(optimizer)
    if group.rank() > 0:
        mine = {number: one for number, one in mine.items() if number in cut}
    replica = Replica("optimizer.state_dict")
    parts = replica.gather(mine) or []
    merged: dict[Any, Any] = {}
    for part in parts:
        merged.update(part)
    by_rank = sorted(zip(replica.tp_ranks(), parts, strict=True), key=itemgetter(0))
    single = _keys_of_single_numbers(optimizer, merged)
    for number, one in cut.items():
        if number in merged:
            # Before the partition several pp_ranks may have a tp_rank's slice.
            of_tp_ranks = {rank: p[number] for rank, p in by_rank if number in p}
            merged[number] = _joined(list(of_tp_ranks.values()), one, single)
    numbers = sorted(key for key in merged if isinstance(key, int))
    others = [key for key in merged if not isinstance(key, int)]
    return {key: merged[key] for key in numbers + others}


class _Cut(NamedTuple):
    """A parameter with a slice on this rank."""

    slices: Slices
    shape: list[int]  # of the whole

    def is_of_others(self, value: Any) -> bool:
        """Whether the tensor has the shape of a slice, but of another than this rank's."""
        if not isinstance(value, Tensor) or value.dim() != len(self.shape):
            return False
        own = list(self.shape)
        own[self.slices.axis] = self.slices.local_size(group.rank())
        alike = list(value.shape)
        alike[self.slices.axis] = own[self.slices.axis]
        # One number for all along the axis is no slice.
        return alike == own and value.size(self.slices.axis) not in (own[self.slices.axis], 1)

    def is_like(self, value: Any) -> bool:
        """Whether a tensor of tp_rank 0's state has the shape of its slice."""
        first = list(self.shape)
        first[self.slices.axis] = self.slices.local_size(0)
        return isinstance(value, Tensor) and list(value.shape) == first


def _slices(optimizer: LiveOptimizer) -> dict[int, _Cut]:
    """The parameters with a slice on this rank, by number."""
    parameters = [p for members in optimizer.param_groups for p in members["params"]]
    parameters = [model_parameter(p) for p in parameters]
    cut = ((n, slices_of(p), p) for n, p in enumerate(parameters))
    return {n: _Cut(s, s.full_shape(p.shape)) for n, s, p in cut if s is not None}


def _keys_of_single_numbers(optimizer: LiveOptimizer, by_number: Mapping[Any, Any]) -> set[str]:
    """The keys of tensors ``[1]`` for parameters of several elements: no slices of length 1."""
    parameters = [p for members in optimizer.param_groups for p in members["params"]]
    return {
        key
        for number, one in by_number.items()
        if isinstance(one, dict) and isinstance(number, int) and parameters[number].numel() > 1
        for key, value in one.items()
        if isinstance(value, Tensor) and list(value.shape) == [1]
    }


def _joined(parts: list[Any], cut: _Cut, single: set[str]) -> Any:
    """One parameter's state from every tp_rank's: tensors of its shape are cut alike.

    Args:
        single: keys of single numbers, for slices of the same shape.
    """
    if not isinstance(parts[0], dict):
        return parts[0]
    return {
        key: cut.slices.join([part[key].cpu() for part in parts])
        if cut.is_like(value) and not (key in single and list(value.shape) == [1])
        else value
        for key, value in parts[0].items()
    }


def _own_slices(optimizer: LiveOptimizer, by_number: Mapping[Any, Any]) -> dict:
    """A full state with this tp_rank's slices."""
    out = dict(by_number)
    for number, (slices, shape) in _slices(optimizer).items():
        if isinstance(out.get(number), dict):
            out[number] = {
                key: slices.take(value, group.rank())
                if isinstance(value, Tensor) and list(value.shape) == shape
                else value
                for key, value in out[number].items()
            }
    return out


def _refuse_other_slices(optimizer: LiveOptimizer, by_number: Mapping[Any, Any]) -> None:
    """Raises ValueError where a partial state has slices of another tp_rank or degree."""
    for number, cut in _slices(optimizer).items():
        own = cut.slices.local_size(group.rank())
        for key, value in (by_number.get(number) or {}).items():
            if cut.is_of_others(value):
                raise ValueError(
                    f"smp: optimizer.load_state_dict: '{key}' of parameter {number} has shape "
                    f"{list(value.shape)}, and this rank (tp_rank {group.rank()} of "
                    f"{group.size()}) has {own} of {cut.shape[cut.slices.axis]} along axis "
                    f"{cut.slices.axis}: a partial state loads under the degree, and on the "
                    "tp_rank, that saved it; state_dict() loads under any"
                )


def load(optimizer: LiveOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a full dict, or a partial one on every rank of the MP_GROUP.

    Before the partition the groups (learning rates, ...) are loaded at once and the
    state waits.

    Raises:
        ValueError: groups of other sizes; a partial dict of another tensor_parallel_degree.
    """
    given = dict(state_dict)
    partial = bool(given.pop(IS_PARTIAL, False))
    shard = given.pop(IS_SHARD, None)
    half_states = given.pop(HALF_STATES, {})
    wrapped = optimizer.optimizer
    if not _is_torchs(given):
        wrapped.load_state_dict(given)
        return
    if optimizer.scaled is not None and half_states.get("loss_scale"):
        optimizer.scaled.scale.load_state_dict(half_states["loss_scale"])
    given["state"] = put_into(given["state"], half_states.get("master_weights", {}))
    plain = None if partial else plain_optimizer(optimizer.param_groups)
    if plain is not None:
        given = plain.to_ours(given)
    if _waits(optimizer):
        wrapped.load_state_dict({**given, "state": {}})
        by_number = given["state"]
        if shard is not None:
            by_number = _of_all_replicas(by_number, shard)
        optimizer.waiting = Waiting(by_number, partial)
        # The first step partitions all live models.
        after_partition = state.job("load_state_dict").runtime.after_partition
        after_partition.append(lambda: _load_waiting(optimizer))
        return
    wrapped.load_state_dict({**given, "state": {}})
    _load_by_number(optimizer, given["state"], partial, shard)


def _load_waiting(optimizer: LiveOptimizer) -> None:
    """Load the latest of the states that waited for the partition."""
    waiting, optimizer.waiting = optimizer.waiting, None
    if waiting is not None:
        _load_by_number(optimizer, *waiting, None)


def _load_by_number(
    optimizer: LiveOptimizer,
    by_number: dict[Any, Any],
    partial: bool,
    shard: dict[str, Any] | None,
) -> None:
    """Give the wrapped optimizer the state of this rank's parameters; groups stay."""
    _settle(optimizer)
    if shard is not None:
        by_number = _of_all_shards(optimizer, by_number, shard)
    elif partial:
        owners = _owners(optimizer)
        rank = state.job("load_state_dict").runtime.pp_rank
        mine = [n for n, owner in enumerate(owners) if owner in (None, rank)]
        mine += [key for key in by_number if not isinstance(key, int)]
        replica = Replica("optimizer.load_state_dict", CommGroup.PP_GROUP)
        by_number = replica.route(by_number, mine)
        _refuse_other_slices(optimizer, by_number)
    else:
        by_number = _own_slices(optimizer, by_number)
    own = _of_rank(optimizer, by_number)
    if optimizer.sharded is not None:
        optimizer.sharded.adopt(own)
        own = optimizer.sharded.own(own)
    own_states, masters = take_out(own)
    optimizer.masters.make(masters)
    wrapped = optimizer.optimizer
    wrapped.load_state_dict({**wrapped.state_dict(), "state": own_states})
    optimizer.masters.load(masters)


def _of_all_replicas(by_number: dict[Any, Any], shard: dict[str, Any]) -> dict[Any, Any]:
    """The state of this pp_rank and tp_rank, from the shards of its replicas.

    Collective over the RDP_GROUP.

    Raises:
        ValueError: the shards are of another number of replicas.
    """
    _refuse_other_size(shard)
    replica = Replica("optimizer.load_state_dict", CommGroup.RDP_GROUP)
    parts = replica.gather((by_number, shard["places"])) or []
    states, places = zip(*parts, strict=True)
    return joined_shards(states, places)


def _refuse_other_size(shard: dict[str, Any]) -> None:
    """Raises ValueError where a shard is of another number of replicas."""
    size = shard["rdp_size"]
    if size != ranks.rdp_size():
        raise ValueError(
            f"smp: optimizer.load_state_dict: this is a shard of {size}, and rdp_size is "
            f"{ranks.rdp_size()} here: save with local_state_dict(gather_if_shard=True), or "
            "load under as many replicas"
        )


def _of_all_shards(
    optimizer: LiveOptimizer, by_number: dict[Any, Any], shard: dict[str, Any]
) -> dict[Any, Any]:
    """The entries for this rank of a state with a shard on each rank.

    Collective over all ranks.

    Raises:
        ValueError: the shards are of another number of replicas.
    """
    size, places = shard["rdp_size"], shard["places"]
    _refuse_other_size(shard)
    here = f"{ranks.tp_rank()}/"  # a number is a slice's of this tp_rank
    rank = ranks.pp_rank()
    wanted = {n for n, owner in enumerate(_owners(optimizer)) if owner in (None, rank)}
    if optimizer.sharded is not None:
        wanted = set(optimizer.sharded.own(dict.fromkeys(wanted)))
    others = [key for key in by_number if not isinstance(key, int)]
    held: dict[Any, Any] = {
        f"{here}{n}/{ranks.rdp_rank()}": (places.get(n), one)
        for n, one in by_number.items()
        if isinstance(n, int)
    }
    keys = {n: [f"{here}{n}/{rank}" for rank in range(size)] for n in sorted(wanted)}
    replica = Replica("optimizer.load_state_dict", CommGroup.WORLD)
    found = replica.route(held, [key for some in keys.values() for key in some])
    out = {}
    for number, some in keys.items():
        pieces = [found[key] for key in some if key in found]
        if pieces:
            out[number] = pieces[0][1] if pieces[0][0] is None else joined(pieces)
    return out | {key: by_number[key] for key in others}
