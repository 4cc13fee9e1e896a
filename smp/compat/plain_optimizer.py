"""State of the plain model's optimizer, for models with replaced modules.

Parameters are numbered as in the plain model's optimizer: its groups have the parameters of
this one's, in the plain model's order.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smp.compat.counterparts import Counterpart, Shapes
from smp.modules import live_models
from smp.sharding.owners import model_parameter
from smp.tensor_parallel.splits.replacement import Translate

State = dict[str, Any]  # of one parameter


class _Member(NamedTuple):
    """Parameters with their states translated together; their numbers by path."""

    counterpart: Counterpart | None  # None: the state is the same on both sides
    ours: dict[str, int]
    plain: dict[str, int]


class PlainOptimizer(NamedTuple):
    """The correspondence of an optimizer's state to that of the plain model's."""

    groups: list[list[str]]  # paths in the plain model, "" where it is none's
    sizes: list[int]  # of our groups
    members: list[_Member]

    def to_plain(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """From a full state dict of ours.

        Raises:
            ValueError: parts of one plain parameter have different states.
        """
        state = state_dict["state"]
        out: dict[Any, Any] = {}
        for one, ours, plain in self.members:
            if one is None:
                out.update((plain[name], state[n]) for name, n in ours.items() if n in state)
                continue
            states = {name: state.get(number) for name, number in ours.items()}
            translated = _translated(states, one.ours, one.plain, one.to_plain)
            out.update((plain[name], value) for name, value in translated.items())
        others = {key: value for key, value in state.items() if not isinstance(key, int)}
        groups = _renumbered(state_dict["param_groups"], [len(names) for names in self.groups])
        for group, names in zip(groups, self.groups, strict=True):
            if "param_names" in group:
                group["param_names"] = list(names)
        state = dict(sorted(out.items())) | others
        return {**state_dict, "state": state, "param_groups": groups}

    def to_ours(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """From a full state dict of the plain model's optimizer.

        Raises:
            ValueError: groups of other sizes, or a state of another shape.
        """
        given = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in given]
        wanted = [len(names) for names in self.groups]
        if sizes != wanted:
            raise ValueError(
                f"smp: optimizer.load_state_dict: groups of {sizes} parameters; the plain "
                f"model's optimizer, whose state is loaded and saved, has {wanted}"
            )
        by_number = [state_dict["state"].get(n) for group in given for n in group["params"]]
        out: dict[Any, Any] = {}
        for one, ours, plain in self.members:
            states = {name: by_number[number] for name, number in plain.items()}
            if one is None:
                out.update((ours[name], value) for name, value in states.items() if value)
                continue
            translated = _translated(states, one.plain, one.ours, one.to_ours)
            out.update((ours[name], value) for name, value in translated.items())
        others = {k: v for k, v in state_dict["state"].items() if not isinstance(k, int)}
        groups = _renumbered(given, self.sizes)
        for group in groups:
            group.pop("param_names", None)  # the optimizer keeps its own
        return {**state_dict, "state": out | others, "param_groups": groups}


def _renumbered(groups: list[dict[str, Any]], sizes: list[int]) -> list[dict[str, Any]]:
    ends = list(itertools.accumulate(sizes))
    return [
        {**group, "params": list(range(end - size, end))}
        for group, size, end in zip(groups, sizes, ends, strict=True)
    ]


def plain_optimizer(param_groups: Iterable[Mapping[str, Any]]) -> PlainOptimizer | None:
    """The plain model's, for an optimizer of a model with replaced modules; else None.

    Args:
        param_groups: of the optimizer.

    Raises:
        NotImplementedError: the plain model's optimizer cannot have the state.
    """
    groups = [[model_parameter(p) for p in group["params"]] for group in param_groups]
    numbers = itertools.count()
    at = {id(p): (g, next(numbers)) for g, some in enumerate(groups) for p in some}
    members: list[tuple[Counterpart | None, dict[str, int]]] = []
    # Group, the model's begin in it, the parameter's place in the model; its path.
    places: list[tuple[tuple[int, int, int], str, int]] = []
    left = dict(at)
    for model in live_models.of_job("DistributedOptimizer"):
        named = {name: id(p) for name, p in model.module.named_parameters()}
        corresponding = live_models.record_of(model).counterparts
        if corresponding is None or not left.keys() & named.values():
            continue
        begins: dict[int, int] = {}
        for parameter in named.values():
            if parameter in left:
                group, number = left.pop(parameter)
                begins[group] = min(number, begins.get(group, number))
        group = min(begins)
        for one in corresponding.every:
            ours = {name: at[named[name]] for name in one.ours if named[name] in at}
            if ours:
                group = _common_group(one, {name: group for name, (group, _) in ours.items()})
            elif one.ours:
                continue  # the optimizer does not have it
            for name in one.plain:  # without one of ours, in the last one's group
                place = group, begins[group], corresponding.order[name]
                places.append((place, name, len(members)))
            members.append((one, {name: number for name, (_, number) in ours.items()}))
    for group, number in left.values():
        places.append(((group, number, 0), "", len(members)))
        members.append((None, {"": number}))
    if len(left) == len(at):
        return None
    plain: list[dict[str, int]] = [{} for _ in members]
    paths: list[list[str]] = [[] for _ in groups]
    for number, ((group, _, _), path, member) in enumerate(sorted(places)):
        plain[member][path] = number
        paths[group].append(path)
    pairs = zip(members, plain, strict=True)
    return PlainOptimizer(
        groups=paths,
        sizes=[len(group) for group in groups],
        members=[_Member(one, ours, there) for (one, ours), there in pairs],
    )


def _common_group(one: Counterpart, group_of: dict[str, int]) -> int:
    """The group of all of our parts of a plain parameter.

    Raises:
        NotImplementedError: they are in different ones, or ours are new.
    """
    if not one.plain:
        raise NotImplementedError(
            f"smp: optimizer: {_in_words(one.ours)} is no parameter of the plain model, "
            "so that the whole state, which is that of its optimizer, cannot have it: save a "
            "partial one, optimizer.local_state_dict()"
        )
    if len(group_of) < len(one.ours) or len(set(group_of.values())) > 1:
        raise NotImplementedError(
            f"smp: optimizer: {_in_words(one.plain)} of the plain model is "
            f"{_in_words(one.ours)} here, which are not all in one of its groups; put them "
            "into the same, or save a partial state, optimizer.local_state_dict()"
        )
    return next(iter(group_of.values()))


def _translated(
    states: Mapping[str, State | None], shapes: Shapes, wanted: Shapes, translate: Translate
) -> dict[str, State]:
    """The states on the other side, of corresponding parameters; none if none has one.

    Args:
        states: by path.
        shapes: of these parameters.
        wanted: those of the other side.
    """
    first = next((state for state in states.values() if state), None)
    if first is None:
        return {}
    out: dict[str, State] = {name: {} for name in wanted}
    for key in first:
        values: dict[str, Any] = {n: (state or {}).get(key) for n, state in states.items()}
        value = first[key]
        if all(isinstance(v, Tensor) and list(v.shape) == shapes[n] for n, v in values.items()):
            translated = translate({name: v.to(value.device) for name, v in values.items()})
            for name in wanted:
                out[name][key] = translated[name]
        elif all(_are_same(value, one) for one in values.values()):
            for name in wanted:  # each its own: optimizers count up in place
                out[name][key] = value.clone() if isinstance(value, Tensor) else value
        else:
            raise ValueError(
                f"smp: optimizer: {key!r} of {_in_words(shapes)} is neither of their shapes "
                f"nor a number that is the same for all; {_in_words(wanted)}, which they are "
                "on the other side, cannot have it"
            )
    return out


def _are_same(one: Any, other: Any) -> bool:
    """Whether the values are the same, and no more than a number for each parameter."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dim() == 0 and torch.equal(one.cpu(), other.cpu())
    return type(one) is type(other) and one == other


def _in_words(names: Shapes) -> str:
    return ", ".join(f"'{name}'" for name in names)
