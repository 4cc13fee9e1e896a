"""The states of random number generators kept by the script: Python's, NumPy's, PyTorch's."""

import pickle
import random
import sys
from typing import Any

import torch


def is_generator(thing: Any) -> bool:
    """Whether the thing draws random numbers, and its state can be put back."""
    if isinstance(thing, torch.Generator):
        return True
    if isinstance(thing, random.Random):
        return not isinstance(thing, random.SystemRandom)
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(
        thing, (numpy.Generator, numpy.BitGenerator, numpy.RandomState)
    )


def state_of(generator: Any) -> Any:
    """The state now, for :func:`put_back`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "get_state"):
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state


def put_back(generator: Any, state: Any) -> None:
    """Have the generator go on from the state."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


def fingerprint_of(generator: Any) -> bytes:
    """The state now, for comparison."""
    state = state_of(generator)
    return bytes(state.tolist()) if isinstance(state, torch.Tensor) else pickle.dumps(state)
