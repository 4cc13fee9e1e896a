"""The loss scale of ``fp16``: small gradients times it are numbers of float16, too.

``model.backward`` multiplies by it, the optimizer divides.  An overflow on any rank makes all
ranks skip the update, and a dynamic scale then falls.  The rule is that of Megatron-LM's
dynamic loss scaler.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smp.collectives.objects import refuse_if_forked
from smp.optimizers import accelerator_or_cpu
from smp.sharding.owners import model_parameter
from smp.sharding.shards import gradient_of
from smp.slicing.split_parameters import among_slices
from smp.state_mod import state

_DEFAULTS: dict[str, Any] = {
    "init_scale": 2.0**32,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 1,
    "consecutive_hysteresis": False,
}
_CALLER = "smp.DistributedOptimizer with fp16"


class LossScale:
    """A factor for the loss: static, or by the overflows so far.

    Args:
        static: the factor; None: 1.
        dynamic: begin with ``init_scale`` instead, and change it.
        args: of a dynamic one, by name.

    Attributes:
        value: the factor now.

    Raises:
        ValueError: a scale that is not above 0, or an unknown name; the text has both.
    """

    def __init__(self, static: float | None, dynamic: bool, args: dict | None) -> None:
        given = dict(args or {})
        if unknown := sorted(given.keys() - _DEFAULTS.keys()):
            raise ValueError(
                f"smp.DistributedOptimizer: dynamic_loss_args has {unknown}; the known ones "
                f"are {sorted(_DEFAULTS)}"
            )
        options = _DEFAULTS | given
        first = options["init_scale"] if dynamic else 1.0 if static is None else static
        positive = {"init_scale" if dynamic else "static_loss_scale": first}
        if dynamic:
            positive |= {n: options[n] for n in ("min_scale", "scale_window", "delayed_shift")}
            if not options["scale_factor"] > 1:
                positive["scale_factor - 1"] = options["scale_factor"] - 1
        for name, number in positive.items():
            if not 0 < number < float("inf"):
                raise ValueError(
                    f"smp.DistributedOptimizer: {name}={number!r}: it must be a number above 0"
                )
        self.value = float(first)
        self.dynamic = dynamic
        self._options = options
        self._steps, self._last_overflow = 0, -1
        self._hysteresis: int = options["delayed_shift"]

    def update(self, overflow: bool) -> None:
        """A step was taken, or skipped for an overflow."""
        if self.dynamic:
            self._follow(overflow)
        self._steps += 1

    def _follow(self, overflow: bool) -> None:
        options = self._options
        if overflow:
            if self._hysteresis == 1:
                self.value = max(self.value / options["scale_factor"], options["min_scale"])
            else:
                self._hysteresis -= 1
            self._last_overflow = self._steps
            return
        if options["consecutive_hysteresis"]:
            self._hysteresis = options["delayed_shift"]
        if (self._steps - self._last_overflow) % options["scale_window"] == 0:
            self._hysteresis = options["delayed_shift"]
            self.value *= options["scale_factor"]

    def state_dict(self) -> dict[str, Any]:
        """Its numbers, for a checkpoint."""
        return {
            "value": self.value,
            "steps": self._steps,
            "last_overflow": self._last_overflow,
            "hysteresis": self._hysteresis,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from saved numbers; a static scale stays the script's."""
        if self.dynamic:
            self.value, self._steps = saved["value"], saved["steps"]
            self._last_overflow, self._hysteresis = saved["last_overflow"], saved["hysteresis"]


class ScaledGradients:
    """The gradients of an optimizer, from a scaled backward to the update.

    Args:
        scale: of the loss.
        optimizer: the wrapped one.

    Attributes:
        scale: likewise.
    """

    def __init__(self, scale: LossScale, optimizer: torch.optim.Optimizer) -> None:
        self.scale = scale
        self.backwards = 0  # of model.backward, since the last update
        self._optimizer = optimizer
        self._is_unscaled = False
        self._overflow: bool | None = None  # of any rank; None: not agreed on yet
        self._found: Tensor | None = None  # of this rank
        _latest[:] = [weakref.ref(self)]

    def _members(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [gradient for p in self._members() if (gradient := p.grad) is not None]

    def has_one_of(self, tensors: Iterable[Tensor]) -> bool:
        """Whether a tensor is a parameter of the optimizer, or its gradient."""
        own = {id(model_parameter(p)) for p in self._members()}
        own |= {id(gradient_of(model_parameter(p))) for p in self._members()} - {id(None)}
        return any(id(model_parameter(tensor)) in own for tensor in tensors)

    @among_slices
    @torch.no_grad()
    def begin_backward(self) -> None:
        """A backward, or a step with one, is about to add to the gradients.

        Gradients left by an earlier backward, clipped or used, get the scale again.
        """
        if not self._is_unscaled:
            return
        for gradient in self._gradients():
            gradient.mul_(self.scale.value)
        self.forget()

    @among_slices
    @torch.no_grad()
    def unscale(self) -> None:
        """Divide this rank's gradients by the scale, once.

        Raises:
            RuntimeError: there are gradients, and none of ``model.backward``.
        """
        if self._is_unscaled:
            return
        gradients = self._gradients()
        if gradients and not self.backwards and self.scale.value != 1.0 and _runs_here():
            raise RuntimeError(
                "smp: the gradients do not have the loss scale of fp16: call "
                "model.backward(loss) in place of loss.backward()"
            )
        by_device: dict[torch.device, list[Tensor]] = {}
        for gradient in gradients:
            values = gradient._values() if gradient.is_sparse else gradient
            by_device.setdefault(values.device, []).append(values)
        self._found = torch.zeros((), device=accelerator_or_cpu())
        for device, some in by_device.items():
            found = torch.zeros((), device=device)
            factor = torch.full((), 1.0 / self.scale.value, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(some, found, factor)
            self._found = torch.maximum(self._found, found.to(self._found.device))
        self._is_unscaled = True

    def overflows(self) -> bool:
        """Whether a gradient of any rank is not finite; unscales.  Collective over the job.

        Raises:
            NotImplementedError: the gradients have the scale of another optimizer.
        """
        if latest() is not self:
            raise NotImplementedError(
                "smp: with fp16 the loss has the scale of the DistributedOptimizer made last, "
                "and another one is to update: give all parameters to one optimizer, in "
                "groups, or use bf16, which needs no scale"
            )
        self.unscale()
        if self._overflow is None:
            assert self._found is not None
            job = state.job(_CALLER)
            if job.boot.size > 1:
                refuse_if_forked(_CALLER, job.boot.rank, job.pid)
                group = job.torch_groups.by_kind["world"]
                dist.all_reduce(self._found, dist.ReduceOp.MAX, group=group)
            self._overflow = bool(self._found)
        return self._overflow

    def used(self) -> None:
        """The update was made, or skipped; the gradients remain, without the scale."""
        self._overflow, self.backwards = None, 0

    def forget(self) -> None:
        """The gradients are gone, or have the scale."""
        self._is_unscaled, self._overflow, self._found = False, None, None
        self.backwards = 0


_latest: list[weakref.ref[ScaledGradients]] = []


def latest() -> ScaledGradients | None:
    """The newest optimizer's, of this job."""
    return _latest[0]() if _latest else None


def forget() -> None:
    """The job has ended."""
    _latest.clear()


def of_backward() -> float:
    """The factor for the loss of a backward that begins now."""
    scaled = latest()
    if scaled is None:
        return 1.0
    scaled.backwards += 1
    return scaled.scale.value


def begin_backward() -> None:
    """See `ScaledGradients.begin_backward`."""
    if (scaled := latest()) is not None:
        scaled.begin_backward()


def unscale(tensors: Iterable[Tensor]) -> None:
    """Gradients are about to be read: divide them by the scale, where they have one.

    Args:
        tensors: some of these gradients, or their parameters.
    """
    scaled = latest()
    if scaled is not None and scaled.has_one_of(tensors):
        scaled.unscale()


def _runs_here() -> bool:
    """Whether this rank runs the step function itself, and knows of its backwards."""
    return len(state.job(_CALLER).groups["pp"]) == 1
