"""Small functions imported by existing scripts from ``utils`` of the original.

``smp.utils``, ``smdistributed.modelparallel.torch.utils`` and
``smdistributed.modelparallel.test.torch.utils`` are this module.
"""

from torch import Tensor

from smp import not_built
from smp.slicing.slices import slices_of
from smp.state_mod import state

dump_model = not_built.function("smdistributed.modelparallel.test.torch.utils.dump_model")
verify = not_built.function("smdistributed.modelparallel.test.torch.utils.verify")


def rmsg(message: str) -> str:
    """The message with this rank before it, for logs.

    Args:
        message: one line.
    """
    return f"[rank {state.job('utils.rmsg()').boot.rank}] {message}"


def get_distribution_axis(param: Tensor) -> int | None:
    """The axis of a parameter's split for tensor parallelism; None: it is not split.

    Args:
        param: a parameter, or a buffer.
    """
    slices = slices_of(param)
    return None if slices is None else slices.axis
