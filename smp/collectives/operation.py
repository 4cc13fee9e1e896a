"""The frame of every method of a process group.  Tensors of devices go to each other, to NCCL
or through host memory, fake ones nowhere, and a profile hears of the call.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any

import torch.distributed as dist
from torch import Tensor

from smp import torch_versions
from smp.collectives import dense, profile
from smp.pytorch.compiled_code import not_traced

# Set where the driver of the tests' pretended accelerator stands in for a GPU's.
DRIVER = "SMP_CUDA_LIBRARY"


# Called with each operation's group before the operation, while a model is traced.
_watch: Callable[[dist.ProcessGroup], None] | None = None


@contextmanager
def watching(watch: Callable[[dist.ProcessGroup], None]) -> Iterator[None]:
    """Have a function hear of each operation's group before the operation; it may raise."""
    global _watch
    _watch = watch
    try:
        yield
    finally:
        _watch = None


def show(group: dist.ProcessGroup) -> None:
    """An operation of the group begins, for `watching`."""
    if _watch is not None:
        _watch(group)


def _first(value: Any) -> Any:
    """The first item of nested lists, or None."""
    while isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return value


def operation_of(
    title: str, gathers: bool = False, of_two: bool = False
) -> Callable[[Callable], Callable]:
    """An operation of tensors: these come first, results before inputs.

    Args:
        title: the name in a profile.
        gathers: an all-gather, possible among devices alone.  Other operations of devices are
            NCCL's, or go through host memory.
        of_two: of this rank and the rank of the second argument.
    """

    def decorated(method: Callable) -> Callable:
        @wraps(method)
        def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _watch is not None:
                _watch(self)
            if kwargs:
                args = _in_order(method, self, args, kwargs)
            tensor = _first(args[0])
            if tensor is None and len(args) > 1:
                tensor = _first(args[1])
                tensor = tensor if isinstance(tensor, Tensor) else None
            if type(tensor) is not Tensor and dense.is_fake(tensor):
                return self._over  # fake tensors go nowhere, on any backend
            if tensor is not None and not tensor.is_cpu:
                if tensor.is_meta:
                    return self._over
                if gathers and _is_driven(tensor) and self._devices_gather(tensor, *args):
                    return self._gather_on_device(tensor.device, *args)
                if not self._goes_through_host(tensor.device, args[1] if of_two else None):
                    return self._by_nccl(method.__name__, args)
            if not profile.is_on():
                return method(self, *args)
            has_inputs = len(args) > 1 and isinstance(_first(args[1]), Tensor)
            shown = args[1] if has_inputs else args[0]
            event = profile.Event(f"{self.name()}:{title}", dense.listed(shown))
            work = method(self, *args)
            if torch_versions.EVENTS_CROSS_THREADS:
                work.ends(event)
            else:  # a call's, not an operation's
                event.end()
            return work

        return not_traced("an operation of smddp")(operation)

    return decorated


def _in_order(method: Callable, group: dist.ProcessGroup, args: tuple, named: dict) -> tuple:
    """The arguments of a call, some of them by torch's names or ours, by their place."""
    ours = {_NAMES.get(name, name): value for name, value in named.items()}
    bound = signature(method).bind(group, *args, **ours)
    bound.apply_defaults()
    return bound.args[1:]


# Torch's names of its arguments, and ours.
_NAMES = {
    "tensor": "tensors",
    "op": "opts",
    "output_tensors": "outputs",
    "input_tensors": "inputs",
    "input": "own",
    "output_split_sizes": "output_splits",
    "input_split_sizes": "input_splits",
    "dstRank": "to",
    "srcRank": "source",
}


def _is_driven(tensor: Tensor) -> bool:
    """Whether a tensor outside host memory is a GPU's, or stands for one in tests."""
    return tensor.is_cuda or DRIVER in os.environ
