"""Trials of optimizers: whether they look at each element, or at each parameter, by itself.

Optimizers of PyTorch's known for this do.  Any other class is tried: an instance with the same
options makes a few steps with a small parameter, others with slices of it, or with another
parameter beside it.
"""

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, nn

_BY_ELEMENT = {
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
}  # fmt: skip
_SHAPE = (6, 4)
_STEPS = 3


def is_by_element(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is one of PyTorch's known for it; a subclass may do otherwise."""
    kind = type(optimizer)
    return kind.__name__ in _BY_ELEMENT and kind is getattr(torch.optim, kind.__name__, None)


def differs_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps with two parameters differ from those with one of them alone.

    Warns where the optimizer cannot be tried: nothing is known then.
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        return differs_alone(inner)
    if is_by_element(optimizer):
        return False
    kind = type(optimizer)
    for group in optimizer.param_groups:
        options, cuts = _options(optimizer, group), [slice(0, 2), slice(2, None)]
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                device = torch.device("cpu")
                together = _stepped_together(kind, options, device, cuts, 0)
                alone = _stepped(kind, options, device, cuts, 0)
        except Exception as error:  # noqa: BLE001 - an optimizer of any kind may raise anything
            warnings.warn(
                f"smp: {kind.__name__} could not be tried on parameters one by one "
                f"({type(error).__name__}: {error}): with sharded state it is "
                "right if it updates each parameter by itself",
                stacklevel=5,
            )
            return False
        pairs = zip(together, alone, strict=True)
        if not all(torch.allclose(a, b, 1e-6, 1e-9) for a, b in pairs):
            return True
    return False


def differs_on_slices(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether steps with slices of a parameter differ from those with the whole.

    Warns where the optimizer cannot be tried: nothing is known then.

    Args:
        group: the optimizer's options for cut parameters, and the parameters.
    """
    inner = getattr(optimizer, "optimizer", None)  # inside a wrapper, as for half precision
    if isinstance(inner, torch.optim.Optimizer):
        return differs_on_slices(inner, group)
    kind = type(optimizer)
    if is_by_element(optimizer):
        return False
    options = _options(optimizer, group)
    here = (p.device for p in group["params"] if not p.is_meta)
    device = next(here, torch.device("cpu"))
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (whole,) = _stepped(kind, options, device, [slice(None)], 0)
            for axis in (0, 1):
                cuts = [slice(0, 2), slice(2, None)]
                parts = _stepped(kind, options, device, cuts, axis)
                if not torch.allclose(torch.cat(parts, axis), whole, 1e-6, 1e-9):
                    return True
    except Exception as error:  # noqa: BLE001 - an optimizer of any kind may raise anything
        warnings.warn(
            f"smp: {kind.__name__} could not be tried on slices of a parameter "
            f"({type(error).__name__}: {error}): with tensor parallelism it is right if it "
            "updates each element by itself",
            stacklevel=4,
        )
    return False


def _options(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the class, beside parameters."""
    takes = inspect.signature(type(optimizer)).parameters
    known = {**optimizer.defaults, **group}
    return {name: known[name] for name in takes if name in known and name != "params"}


def _stepped(
    kind: Any, options: dict[str, Any], device: torch.device, cuts: list[slice], axis: int
) -> list[Tensor]:
    """Each part of a small parameter after steps in an optimizer of its own."""
    return [_stepped_together(kind, options, device, [cut], axis)[0] for cut in cuts]


def _stepped_together(
    kind: Any, options: dict[str, Any], device: torch.device, cuts: list[slice], axis: int
) -> list[Tensor]:
    """Parts of a small parameter, each one of its own, after steps in one optimizer."""
    source = torch.Generator().manual_seed(1)
    values = [torch.randn(_SHAPE, generator=source, dtype=torch.float64) for _ in range(7)]
    at = [(cut,) if axis == 0 else (slice(None), cut) for cut in cuts]
    parameters = [nn.Parameter(values[0][part].clone().to(device)) for part in at]
    trial = kind(parameters, **options)
    for gradient in values[1 : 1 + _STEPS]:
        for part, parameter in zip(at, parameters, strict=True):
            parameter.grad = gradient[part].clone().to(device)
        _step(trial)
    return [parameter.detach().cpu() for parameter in parameters]


def _step(trial: torch.optim.Optimizer) -> None:
    """One step; with a closure, where the optimizer wants one."""
    required = [
        parameter
        for parameter in inspect.signature(trial.step).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if required:
        trial.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]
    else:
        trial.step()
