"""Master weights: float32 twins of half parameters, updated by the wrapped optimizer.

They take the place of the half parameters in the optimizer's groups.  Their gradient is the
half parameter's own, which adds up in float32.  After the update the half parameter gets its
master's value, rounded.
"""

import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from smp.marks import HAS_MASTER
from smp.pytorch import patches
from smp.sharding.owners import keeps_state, model_parameter
from smp.slicing.slices import MARKS
from smp.slicing.split_parameters import among_slices

# Attributes of optimizers with master weights of their own: apex's, and those of existing
# scripts (FP16_Optimizer).
_OWN_MASTERS = ("_amp_stash", "fp16_groups", "fp32_from_fp16_groups", "fp32_groups_flat")

_MASTER = "master_weight"  # a key beside those of an optimizer's state


class MasterWeight(nn.Parameter):
    """A float32 parameter of an optimizer, in the place of a half one of the model.

    Attributes:
        stands_for: the half one.
    """

    stands_for: nn.Parameter | None = None
    seen = -1  # the half parameter's version at the last comparison

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The half parameter's gradient."""
        return None if self.stands_for is None else self.stands_for.grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if self.stands_for is not None:
            self.stands_for.grad = gradient


def keeps_its_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has master weights of its own: it gets no second ones."""
    if getattr(optimizer, "master_weights", False):  # apex's FusedAdam
        return True
    return any(hasattr(optimizer, name) for name in _OWN_MASTERS)


class Masters:
    """The master weights of one optimizer.

    Args:
        optimizer: the wrapped one.

    Attributes:
        optimizer: the same.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._made: dict[int, MasterWeight] = {}  # by id of the model's parameter, kept alive
        _every.add(self)

    def every(self) -> list[MasterWeight]:
        """Those made so far, in the order of the groups."""
        return [m for m in self._parameters() if isinstance(m, MasterWeight)]

    def by_number(self) -> dict[int, MasterWeight]:
        """Those made so far, by their number in the optimizer's state dict."""
        numbered = enumerate(self._parameters())
        return {n: m for n, m in numbered if isinstance(m, MasterWeight)}

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @among_slices
    def make(self, saved: Container[int] = ()) -> None:
        """Make masters of half parameters without one: of this rank, once partitioned.

        A half parameter that the script has put back into a group gets its master again.  A
        frozen one gets its first when it is in training.

        Args:
            saved: numbers, in the optimizer's state dict, of parameters with a saved master;
                they were in training before.
        """
        if keeps_its_own(self.optimizer):
            return
        numbers = count()
        for group in self.optimizer.param_groups:
            members = group["params"]
            for place, parameter in enumerate(members):
                number = next(numbers)
                if type(parameter) is MasterWeight or not hasattr(parameter, HAS_MASTER):
                    continue
                if not keeps_state(parameter):
                    continue
                if (former := self._made.get(id(model_parameter(parameter)))) is not None:
                    members[place] = former
                    if former.stands_for is not parameter:
                        former.stands_for, former.seen = parameter, -1
                    continue
                in_training = parameter.requires_grad or parameter.grad is not None
                if not in_training and number not in saved:
                    continue
                patches.foreach_masters.while_alive(self.optimizer, MasterWeight)
                members[place] = master = _master_of(parameter)
                self._made[id(model_parameter(parameter))] = master
                if parameter in self.optimizer.state:
                    state = self.optimizer.state
                    state[master] = state.pop(parameter)

    def refuse_second(self, parameters: Iterable[Tensor]) -> None:
        """Refuse parameters with a master, or a slice, as torch refuses any second time.

        Raises:
            ValueError: there is one.
        """
        own = {id(model_parameter(one)) for one in self._parameters()}
        if any(id(model_parameter(parameter)) in own for parameter in parameters):
            raise ValueError("some parameters appear in more than one parameter group")

    @among_slices
    @torch.no_grad()
    def follow(self) -> None:
        """Take over changes of half parameters by others: a load, the script's own.

        An element's master stays where it rounds to the half parameter's value.
        """
        for master in self.every():
            half = master.stands_for
            assert half is not None
            if half._version == master.seen and half.device == master.device:
                continue
            wide, own = half.float(), master.to(half.device)
            master.data = torch.where(own.to(half.dtype) == half, own, wide)
            master.seen = half._version

    @among_slices
    @torch.no_grad()
    def give(self) -> None:
        """Give all half parameters their masters' values."""
        every = self.every()
        if not every:
            return
        halves: list[Any] = [master.stands_for for master in every]
        torch._foreach_copy_(halves, [master.data for master in every])
        for master, half in zip(every, halves, strict=True):
            master.seen = half._version

    @among_slices
    @torch.no_grad()
    def load(self, by_number: dict[int, Tensor]) -> None:
        """Take over saved masters; the model's values decide where the two differ."""
        mine = self.by_number()
        for number, value in by_number.items():
            if number in mine:
                mine[number].copy_(value)
                mine[number].seen = -1

    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that sees the newest values."""

        def evaluated() -> Any:
            self.give()
            return closure()

        return evaluated


def put_into(states: Mapping[Any, Any], by_number: Mapping[int, Tensor]) -> dict[Any, Any]:
    """States by parameter's number, each with the parameter's master as one more entry."""
    out = dict(states)
    for number, master in by_number.items():
        out[number] = {**out.get(number, {}), _MASTER: master}
    return out


def take_out(states: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[int, Tensor]]:
    """The reverse of `put_into`."""
    out, found = dict(states), {}
    for number, state in states.items():
        if isinstance(state, dict) and _MASTER in state:
            found[number] = state[_MASTER]
            out[number] = {key: value for key, value in state.items() if key != _MASTER}
            if not out[number]:
                del out[number]  # of a parameter that was never updated
    return out, found


_every: weakref.WeakSet[Masters] = weakref.WeakSet()


def every() -> list[Masters]:
    """Those of all wrapped optimizers."""
    return list(_every)


def forget() -> None:
    """Forget all: the job has ended, and its optimizers with it."""
    _every.clear()


@among_slices
@torch.no_grad()
def take_values_of(parameters: Iterable[Tensor]) -> None:
    """Make masters equal to half parameters in every bit, as after an exchange of these."""
    wanted = set(map(id, parameters))
    for masters in every():
        for master in masters.every():
            if id(model_parameter(master)) in wanted and master.stands_for is not None:
                master.copy_(master.stands_for)


def _master_of(half: Any) -> MasterWeight:
    master = MasterWeight(half.detach().as_subclass(Tensor).float(), half.requires_grad)
    master.stands_for, master.seen = half, half._version
    for mark in MARKS:
        if mark in half.__dict__:
            setattr(master, mark, half.__dict__[mark])
    return master
