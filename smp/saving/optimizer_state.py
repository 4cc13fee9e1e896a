"""State of an optimizer whose parameters live on several ranks.

Parameters are numbered as in the wrapped optimizer's own state dict, in the order of its
groups; the numbers are alike on all ranks, so a full dict loads into the plain optimizer
of the plain model.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from smp.execution import runtime
from smp.saving.replica import Replica
from smp.saving.state_dicts import IS_PARTIAL

if TYPE_CHECKING:
    from smp.optimizer import DistributedOptimizer


def _owners(optimizer: "DistributedOptimizer") -> list[int | None]:
    """The pp_rank of each parameter, by its number; None: no model has it.

    Raises:
        RuntimeError: before ``smp.init``.
    """
    owner_of: dict[int, int] = {}
    for model in runtime.get("DistributedOptimizer").live_models():
        if model.partitioned:
            for name, parameter in model._smp_module.named_parameters():
                owner_of[id(parameter)] = model._smp_owners[name]
    return [owner_of.get(id(p)) for group in optimizer.param_groups for p in group["params"]]


def _waits(optimizer: "DistributedOptimizer") -> bool:
    """Whether a model that it trains has not been partitioned yet, but will be."""
    rt = runtime.get("DistributedOptimizer")
    if rt.pp_size == 1:
        return False
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return any(
        id(p) in mine
        for model in rt.live_models()
        if not model.partitioned
        for p in model._smp_module.parameters()
    )


def _is_torchs(state_dict: Mapping[str, Any]) -> bool:
    """Whether it has the form of torch's optimizers; a wrapped one may have its own."""
    return isinstance(state_dict.get("state"), dict) and "param_groups" in state_dict


def local_state_dict(optimizer: "DistributedOptimizer") -> dict[str, Any]:
    """The state of the parameters that this rank owns, all groups, ``_smp_is_partial``."""
    out = dict(optimizer.optimizer.state_dict())
    if _is_torchs(out):
        out["state"] = _of_rank(optimizer, out["state"])
    out[IS_PARTIAL] = True
    return out


def _of_rank(optimizer: "DistributedOptimizer", by_number: Mapping) -> dict:
    """What of a state is about parameters of this rank, or not about parameters."""
    rank = runtime.get("DistributedOptimizer").pp_rank
    owners = _owners(optimizer)
    return {
        number: one
        for number, one in by_number.items()
        if not isinstance(number, int)
        or number >= len(owners)
        or owners[number] in (None, rank)
    }


def full_state_dict(optimizer: "DistributedOptimizer") -> dict[str, Any]:
    """The state of all parameters, in host memory where it comes from other ranks.

    Collective over the MP_GROUP after the partition.
    """
    out = dict(optimizer.optimizer.state_dict())
    if not _is_torchs(out) or all(owner is None for owner in _owners(optimizer)):
        return out
    merged: dict[Any, Any] = {}
    for part in Replica("optimizer.state_dict").gather(_of_rank(optimizer, out["state"])) or []:
        merged.update(part)
    numbers = sorted(key for key in merged if isinstance(key, int))
    others = [key for key in merged if not isinstance(key, int)]
    out["state"] = {key: merged[key] for key in numbers + others}
    return out


def load(optimizer: "DistributedOptimizer", state_dict: Mapping[str, Any]) -> None:
    """Load a full dict, or a partial one on every rank of the MP_GROUP.

    Before the partition the groups (learning rates, ...) are loaded at once and the
    state waits.

    Raises:
        ValueError: groups of other sizes.
    """
    given = dict(state_dict)
    partial = bool(given.pop(IS_PARTIAL, False))
    wrapped = optimizer.optimizer
    if not _is_torchs(given):
        wrapped.load_state_dict(given)
        return
    if _waits(optimizer):
        wrapped.load_state_dict({**given, "state": {}})
        by_number = given["state"]

        def load_later() -> None:
            if _waits(optimizer):
                waiting.append(load_later)
            else:
                _load_by_number(optimizer, by_number, partial)

        waiting = runtime.get("load_state_dict").after_partition
        waiting.append(load_later)
        return
    wrapped.load_state_dict({**given, "state": {}})
    _load_by_number(optimizer, given["state"], partial)


def _load_by_number(
    optimizer: "DistributedOptimizer", by_number: dict[Any, Any], partial: bool
) -> None:
    """Give the wrapped optimizer the state of this rank's parameters; groups stay."""
    if partial:
        owners = _owners(optimizer)
        rank = runtime.get("load_state_dict").pp_rank
        mine = [n for n, owner in enumerate(owners) if owner in (None, rank)]
        mine += [key for key in by_number if not isinstance(key, int)]
        by_number = Replica("optimizer.load_state_dict").route(by_number, mine)
    wrapped = optimizer.optimizer
    wrapped.load_state_dict({**wrapped.state_dict(), "state": _of_rank(optimizer, by_number)})
