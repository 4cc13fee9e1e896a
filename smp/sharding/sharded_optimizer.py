"""A wrapped optimizer that updates this rank's share of the parameters alone.

The others' gradients are hidden from it, so it keeps no state for them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from smp.sharding import values
from smp.sharding.owners import Owners, Parts, part_here
from smp.slicing.split_parameters import among_slices


class ShardedOptimizer:
    """The share of this rank in an optimizer's updates.

    Args:
        optimizer: the wrapped one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.owners = Owners(self._members, lambda parameter: False)

    def _members(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def by_number(self) -> dict[int, Parts]:
        """The parts of parameters with owners, by number in the optimizer's state dict."""
        found = ((n, self.owners.parts_of(p)) for n, p in enumerate(self._members()))
        return {number: parts for number, parts in found if parts is not None}

    def drop_others(self) -> None:
        """Forget state of parameters of other owners: from a load, or from before."""
        for member in self._members():
            parts = self.owners.parts_of(member)
            if parts is not None and part_here(parts) is None:
                self._optimizer.state.pop(member, None)

    @contextmanager
    def others_hidden(self) -> Iterator[None]:
        """In the block, parameters of other owners have no gradient."""
        hidden = []
        for member in self._members():
            parts = self.owners.parts_of(member)
            if parts is None or part_here(parts) is not None or member.grad is None:
                continue
            hidden.append((member, member.grad))
            member.grad = None
        try:
            yield
        finally:
            for member, gradient in hidden:
                member.grad = gradient

    @among_slices
    def give_values(self) -> None:
        """Give all replicas the updated values.  Collective over the RDP_GROUP."""
        values.give(self.owners.every())

    def own(self, by_number: Mapping[Any, Any]) -> dict[Any, Any]:
        """The entries of a state that this rank keeps."""
        parts = self.by_number()
        return {
            number: one
            for number, one in by_number.items()
            if number not in parts or part_here(parts[number]) is not None
        }
