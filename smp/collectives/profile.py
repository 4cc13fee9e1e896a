"""Operations in torch's profiles, under the names of its own backends."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import profiler

from smp import torch_versions


def is_on() -> bool:
    """Whether a profiler records."""
    return profiler._is_profiler_enabled


class Event:
    """An operation in a profile, from now until `end`.

    Args:
        title: as in ``smddp:all_reduce``.
        tensors: their shapes are recorded.
    """

    def __init__(self, title: str, tensors: Sequence[Tensor]):
        self._handle = torch.autograd._record_function_with_args_enter(title, *tensors)

    def end(self) -> None:
        """In another thread: so a profile knows of work beside the script's own."""
        if not torch_versions.EVENTS_CROSS_THREADS:
            torch.autograd._record_function_with_args_exit(self._handle)
            return
        thread = threading.Thread(
            target=torch.autograd._record_function_with_args_exit, args=(self._handle,)
        )
        thread.start()
        thread.join()
