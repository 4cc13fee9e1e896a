"""The accelerator of this rank, once in use: the state shared by its worker threads.

A thread does not inherit the script's choice of device, stream and random numbers.  The workers
take them over from the thread that calls the step, so all tasks of a rank run on one stream.
Tensors between ranks are in ``smp/pytorch/staging.py``.
"""

from typing import Any, NamedTuple

import torch


class Place(NamedTuple):
    """Device and stream of the calling thread."""

    device: int
    stream: Any

    def enter(self) -> None:
        """Make them the calling thread's."""
        torch.accelerator.set_device_index(self.device)
        torch.accelerator.set_stream(self.stream)


class ModuleGenerator:
    """The generator of a device without a generator object in PyTorch, by its module."""

    def __init__(self, module: Any, index: int):
        self._module, self._index = module, index

    def get_state(self) -> torch.Tensor:
        """The argument of :meth:`set_state`."""
        return self._module.get_rng_state(self._index)

    def set_state(self, state: torch.Tensor) -> None:
        """Go on from the state."""
        self._module.set_rng_state(state, self._index)

    def manual_seed(self, seed: int) -> None:
        """Begin a new sequence, on the current device."""
        self._module.manual_seed(seed)


def in_use() -> torch.device | None:
    """The kind of accelerator, once a tensor is on one; starts none."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    started = getattr(torch.get_device_module(device), "is_initialized", None)
    return device if started is None or started() else None


def place() -> Place | None:
    """The calling thread's place, if on an accelerator."""
    if in_use() is None:
        return None
    return Place(torch.accelerator.current_device_index(), torch.accelerator.current_stream())


def generator(index: int | None = None) -> Any:
    """The generator of a device's random numbers (the current one's), or None."""
    device = in_use()
    if device is None:
        return None
    module = torch.get_device_module(device)
    if index is None:
        index = torch.accelerator.current_device_index()
    made = getattr(module, "default_generators", None)
    return made[index] if made else ModuleGenerator(module, index)


def generators() -> list[Any]:
    """The generators of the host's random numbers, and of the current device's."""
    device = generator()
    return [torch.default_generator] if device is None else [torch.default_generator, device]


class RandomState:
    """The default generators' states: the host's, and the current device's.

    Args:
        every_device: not only the current one.
    """

    def __init__(self, every_device: bool = False):
        self._generators = [torch.default_generator]
        if in_use() is not None:
            count = torch.accelerator.device_count()
            indices = range(count) if every_device else [None]
            self._generators += [generator(index) for index in indices]
        self._states = [one.get_state() for one in self._generators]

    def restore(self) -> None:
        """Put them back."""
        for one, state in zip(self._generators, self._states, strict=True):
            one.set_state(state)
