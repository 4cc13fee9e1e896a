"""Optimizers whose state cannot be shared out: they look at several parameters at once."""

from typing import Any

import torch

from smp import optimizer_trial
from smp.sharding import owners

# By class name, in small letters: optimizers with a number from all parameters, or with changes
# of parameters beside step().
_OVER_ALL = {
    "adamwschedulefree", "asam", "dadaptadagrad", "dadaptadam", "dadaptadan", "dadaptlion",
    "dadaptsgd", "distributedfusedlamb", "fusedlamb", "fusedmixedprecisionlamb", "gsam",
    "lbfgs", "lookahead", "prodigy", "radamschedulefree", "sam", "sgdschedulefree", "swa",
}  # fmt: skip


def updates_by_element(optimizer: Any) -> bool:
    """Whether the optimizer, by its exact type, looks at each element by itself."""
    kind = type(optimizer)
    if kind is torch.optim.SparseAdam:
        return False  # of sparse gradients, which have no slices
    return optimizer_trial.is_by_element(optimizer) or "updates_by_element" in vars(kind)


def refuse(optimizer: Any) -> None:
    """Refuse an optimizer that would make other steps with a share of the parameters.

    Args:
        optimizer: a ``torch.optim.Optimizer``.

    Raises:
        NotImplementedError: it looks at several parameters at once; the text names it.
    """
    kind = type(optimizer)
    if "takes_the_models_norm" in vars(kind):  # not of a subclass
        return
    names = {cls.__name__.lower() for cls in kind.__mro__}
    if isinstance(optimizer, torch.optim.LBFGS) or names & _OVER_ALL:
        why = "looks at all parameters at once"
    elif optimizer_trial.differs_alone(optimizer):
        why = "has updated a small parameter otherwise beside another one than alone"
    else:
        return
    raise NotImplementedError(
        f"smp: {kind.__name__} {why}, and with {owners.setting()} a rank updates its "
        "share of them: use an optimizer that updates each parameter by itself, as "
        f"torch.optim.AdamW does, smp.optimizers.FusedLAMB, or leave out {owners.setting()}"
    )
