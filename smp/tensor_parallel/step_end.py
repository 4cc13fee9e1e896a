"""The end of a step without a pipeline, on all ranks of a TP_GROUP together.

A rank whose step failed makes no more of its modules' collectives, for which the others wait.
So it calls another operation in place of the next one: that one fails on every rank, with as
many operations called on each, and the step fails with it.  Ranks whose steps went well meet
in a last operation, so that a failure after the last collective of a module is heard, too.

In a pipeline the servers tell each other (``smp.tensor_parallel.order``).
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from smp import ranks

_MISMATCH = "[SMP_ERR_MISMATCH]"

_is_over = False  # whether this step has met the other ranks' failure


class PeerFailed(RuntimeError):
    """Another rank of the TP_GROUP failed, or ran other modules than this one."""


def device_of_numbers() -> str:
    """Where tensors are that the TP_GROUP's collectives take, wherever the model is."""
    kinds = {device.type for device in ranks.get_tp_process_group()._device_types}
    return "cpu" if "cpu" in kinds else "cuda"


@contextmanager
def together() -> Iterator[None]:
    """A step of this rank; its TP_GROUP's ranks have one at the same time.

    Raises:
        PeerFailed: another rank's step failed, or had other collectives.
    """
    global _is_over
    if ranks.tp_size() == 1:
        yield
        return
    _is_over = False
    tp_group = ranks.get_tp_process_group()
    try:
        yield
    except BaseException:
        if not _is_over:
            with suppress(Exception):  # it fails where the others' steps go on
                dist.barrier(tp_group)
        raise
    try:
        dist.all_reduce(torch.zeros(1, device=device_of_numbers()), group=tp_group)
    except Exception as error:
        hear("the end of the step", error)
        raise


def hear(path: str, error: Exception) -> None:
    """A collective of the module at ``path`` has failed: what it means if the ranks' differ.

    Raises:
        PeerFailed: they do.
    """
    global _is_over
    if _MISMATCH in str(error):
        _is_over = True
        raise PeerFailed(
            f"smp: {path}: this rank met another rank of its TP_GROUP that had failed, or that "
            f"ran other modules: {error}"
        ) from error
