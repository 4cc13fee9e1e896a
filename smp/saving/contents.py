"""Contents of a saved file beside tensors and plain values.

Files are read by torch's restricted unpickler, with trust in a few kinds: here NumPy's scalars
and arrays, and the configurations of transformers.
"""

import importlib
import pickle
import re
from contextlib import AbstractContextManager
from typing import Any

import numpy
import torch

_PLAIN = [bytes, frozenset]  # torch reads nonempty bytes, and sets
_CONFIGURATION = re.compile(r"(transformers(?:\.\w+)*\.configuration_\w+)\.(\w+)")


class Pickler(pickle.Pickler):
    """Writes NumPy's dtypes by name.

    NumPy's own way is a state set by the reader: a forged state has it take bytes for addresses
    of objects.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, numpy.dtype) and numpy.dtype(value.str) == value:
            return numpy.dtype, (value.str,)
        return NotImplemented


def trusted(path: str) -> AbstractContextManager:
    """Within it, a file of ``torch.save`` may hold these things."""
    known = torch.serialization.get_safe_globals()
    ours = [*_PLAIN, *_numpys(), *_configurations(path)]
    more = [one for one in ours if one not in known]
    return torch.serialization.safe_globals(more)


def _numpys() -> list[Any]:
    """The functions called by NumPy's pickles; ``numpy.core`` is its name before NumPy 2."""
    makers: list[Any] = [numpy.float64(0).__reduce__()[0], numpy.empty(0).__reduce__()[0]]
    named = [
        (maker, f"numpy.{core}.multiarray.{maker.__name__}")
        for maker in makers
        for core in ("core", "_core")
    ]
    return [numpy.dtype, numpy.ndarray, *named]


def _configurations(path: str) -> list[type]:
    """The classes of transformers' configurations in a file, where transformers is there."""
    found = []
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # reading the file tells any fault of it
        return []
    for name in names:
        if (match := _CONFIGURATION.fullmatch(name)) is None:
            continue
        try:
            base = importlib.import_module("transformers").PretrainedConfig
            kind = getattr(importlib.import_module(match[1]), match[2], None)
        except ImportError:
            continue
        if isinstance(kind, type) and issubclass(kind, base):
            found.append(kind)
    return found
