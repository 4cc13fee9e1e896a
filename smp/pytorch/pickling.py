"""Pickle for types unknown to the codec, with the tensors taken out.

Tensors travel beside the pickle, with their gradient and their memory; modules travel as their
path.
"""

import io
import pickle
from typing import Any

import torch
from torch import nn


def dumps(value: Any) -> tuple[bytes, list[torch.Tensor | nn.Module]]:
    """Pickle a value; tensors and modules inside it become numbers into the list."""
    outside: list[Any] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            if obj is not value and isinstance(obj, torch.Tensor | nn.Module):
                outside.append(obj)
                return len(outside) - 1
            return None

    buffer = io.BytesIO()
    try:
        Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"a {type(value).__module__}.{type(value).__qualname__} cannot be sent to another "
            f"rank: {error}"
        ) from error
    return buffer.getvalue(), outside


def loads(data: bytes, outside: list[Any]) -> Any:
    """The value pickled by :func:`dumps`."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: int) -> Any:
            return outside[number]

    return Unpickler(io.BytesIO(data)).load()
