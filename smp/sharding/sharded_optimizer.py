"""A wrapped optimizer that updates this rank's share of the parameters alone.

The others' gradients are hidden from it, so it keeps no state for them.  Parts of a large
parameter are in it as slices.
"""

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from smp.marks import set_class
from smp.pytorch import patches
from smp.sharding import rules, values
from smp.sharding.owners import Owners, Part, Parts, asked_for, model_parameter, part_here
from smp.sharding.shards import (
    averages_of,
    gather,
    has_gradient,
    has_views,
    is_released,
    shard_of,
)
from smp.sharding.slices import SliceParameter, cut, slice_of
from smp.slicing.split_parameters import among_slices, is_plain

_MOST_UNEVEN = 1.1  # the largest load over the mean, without a warning


class ShardedOptimizer:
    """The share of this rank in an optimizer's updates.

    Args:
        optimizer: the wrapped one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._cuts = rules.updates_by_element(optimizer)
        self._has_warned = False
        self._updated: set[int] = set()  # ids of the model's parameters, in this step
        self._slices: dict[int, SliceParameter] = {}  # by id of the parameter, kept alive
        # No circle of references: a dropped optimizer ends at once, on all ranks alike.
        this = weakref.proxy(self)
        self.owners = Owners(lambda: this._members(), lambda one: this._may_cut(one))

    def _members(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def has(self, parameter: Tensor) -> bool:
        """Whether the optimizer updates the model's parameter, on some rank."""
        return self.owners.parts_of(parameter) is not None

    def _may_cut(self, parameter: Tensor) -> bool:
        shard = shard_of(parameter)
        kind = None if shard is None else shard.kind
        return self._cuts and is_plain(parameter, kind) and parameter.is_contiguous()

    def _with_parts(self) -> Iterator[tuple[list[Any], int, Parts, Part | None]]:
        """Members with owners: a list and a place in it; the parts, and this rank's."""
        for group in self._optimizer.param_groups:
            for place, member in enumerate(group["params"]):
                parts = self.owners.parts_of(member)
                if parts is not None:
                    yield group["params"], place, parts, part_here(parts)

    def by_number(self) -> dict[int, Parts]:
        """The parts of parameters with owners, by number in the optimizer's state dict."""
        found = ((n, self.owners.parts_of(p)) for n, p in enumerate(self._members()))
        return {number: parts for number, parts in found if parts is not None}

    def places(self) -> dict[int, list[int]]:
        """This rank's slices: first and last element but one, the parameter's shape."""
        members = self._members()
        out = {}
        for number, parts in self.by_number().items():
            part = part_here(parts)
            if part is not None and len(parts) > 1:
                shape = model_parameter(members[number]).shape
                out[number] = [part.start, part.end, *shape]
        return out

    @property
    def has_slices(self) -> bool:
        """Whether a parameter has several owners, on any rank."""
        return any(len(parts) > 1 for _, parts in self.owners.every())

    @among_slices
    def take_share(self) -> None:
        """Have slices in the place of parameters with several owners, and no others' state."""
        states = self._optimizer.state
        for members, place, parts, part in self._with_parts():
            member = members[place]
            if part is None:
                states.pop(member, None)
            elif len(parts) > 1:
                self._give_slice(members, place, part)
        self._warn_if_uneven()

    def _give_slice(self, members: list[Any], place: int, part: Part) -> None:
        states, member = self._optimizer.state, members[place]
        whole = model_parameter(member)
        present = (
            member
            if isinstance(member, SliceParameter)
            else getattr(member, "stands_for", None)
        )
        if isinstance(present, SliceParameter) and present.is_current():
            return
        if present is None and (former := self._slices.get(id(whole))) is not None:
            members[place] = former  # the script has put the parameter back
            self._give_slice(members, place, part)
            return
        patches.foreach_slices.while_alive(self._optimizer, SliceParameter)
        self._slices[id(whole)] = made = slice_of(whole, part)
        if present is not None and present is not member:  # of a master weight
            member.stands_for, member.seen = made, -1
            return
        members[place] = made
        if member in states:
            state = states.pop(member)
            states[made] = cut(state, whole.shape, part) if member is whole else state

    def _warn_if_uneven(self) -> None:
        if self._has_warned or self._cuts or self.owners.imbalance <= _MOST_UNEVEN:
            return
        self._has_warned, name = True, type(self._optimizer).__name__
        warnings.warn(
            f"smp: {asked_for()}: the largest share of {name} has "
            f"{self.owners.imbalance:.2f} times the mean of its elements: it is not known to "
            "update each element by itself, so each parameter has one owner; with an "
            "optimizer of torch.optim as AdamW the shares are even",
            stacklevel=7,
        )

    @contextmanager
    def others_hidden(self) -> Iterator[None]:
        """In the block, parameters of other owners have no gradient, and those without values
        here are no members.
        """
        hidden = []
        self._note_updated()
        for members, place, _, part in self._with_parts():
            member = members[place]
            if part is None and member.grad is not None:
                hidden.append((member, member.grad))
                member.grad = None
        try:
            with self._with_values_alone():
                yield
        finally:
            self._note_updated()  # also gradients made by a hook of the optimizer
            for member, gradient in hidden:
                member.grad = gradient

    @contextmanager
    def _with_values_alone(self) -> Iterator[None]:
        """In the block, a released parameter of this rank is of its own class.  Others are no
        members, because the optimizer may look at all of these.
        """
        every = [group["params"] for group in self._optimizer.param_groups]
        before = [list(members) for members in every]
        shards = [s for members in every for p in members if (s := shard_of(p)) is not None]
        here = [s for s in shards if s.is_released and s.keeps_all]
        gone = {id(s.parameter) for s in shards if s.is_released and not s.keeps_all}
        for members in every if gone else ():
            members[:] = [p for p in members if id(p) not in gone]
        for shard in here:
            set_class(shard.parameter, shard.kind)
        try:
            yield
        finally:
            for members, all_of_them in zip(every, before, strict=True) if gone else ():
                members[:] = all_of_them
            for shard in here:
                shard.dress()

    def _note_updated(self) -> None:
        """An optimizer leaves parameters without a gradient alone."""
        for members, place, _, part in self._with_parts():
            whole = model_parameter(members[place])
            if part is not None and has_gradient(whole):
                self._updated.add(id(whole))

    @among_slices
    @torch.no_grad()
    def zero_rest(self) -> None:
        """After zeros in slices of gradients: zeros in the rest."""
        for members, place, parts, _ in self._with_parts():
            whole = model_parameter(members[place])
            if len(parts) > 1 and averages_of(whole) is None and whole.grad is not None:
                whole.grad.zero_()

    @among_slices
    def end_step(self, error: Exception | None) -> None:
        """Give all replicas the updated values.  Collective over the RDP_GROUP.

        Args:
            error: of this rank's update; the others get its values as they are.

        Raises:
            Exception: ``error``.
            RuntimeError: of another rank's update; the text names the rank.
        """
        every, updated = self.owners.every(), self._updated
        self._updated = set()
        flags = [[id(p) in updated, has_views(p)] for p, _ in every]
        failed, found = values.agree(error is not None, [f for both in flags for f in both])
        given, viewed = found[::2], found[1::2]
        pairs = zip(every, given, strict=True)
        values.give(one for one, flag in pairs if flag and not is_released(one[0]))
        released = (one[0] for one, flag in zip(every, viewed, strict=True) if flag)
        for shard in map(shard_of, released):  # the views are to see the update
            if shard is not None and shard.is_released:
                gather([shard])
        if failed:
            values.raise_failure(error, failed)

    def adopt(self, numbers: Iterable[Any]) -> None:
        """Give owners to frozen parameters with a saved state: they were in training before.

        Args:
            numbers: of parameters, alike on all replicas for those without owners.
        """
        members = self._members()
        whole = [
            model_parameter(members[n])
            for n in sorted(n for n in numbers if n in range(len(members)))
        ]
        new = [p for p in whole if self.owners.parts_of(p) is None]
        self.owners.assign(new, set(map(id, new)))  # their gradients may be sparse
        self.take_share()

    def own(self, by_number: Mapping[Any, Any]) -> dict[Any, Any]:
        """The entries of a state of whole parameters that this rank keeps, as it keeps them."""
        every, members = self.by_number(), self._members()
        out = {}
        for number, one in by_number.items():
            parts = every.get(number)
            part = None if parts is None else part_here(parts)
            if parts is None or (part is not None and len(parts) == 1):
                out[number] = one
            elif part is not None:
                out[number] = cut(one, model_parameter(members[number]).shape, part)
        return out
