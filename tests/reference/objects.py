"""Objects that hold tensors: a copy with other tensors in the same places.

A container is a list, tuple, named tuple, dict, set, a subclass of one of these, or an
instance of a class that Python itself creates (dataclasses, a cache of keys and
values).  Everything else is passed as it is: modules, functions, numbers, strings.
"""

import copy
import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def has_state(obj: Any) -> bool:
    """Is ``obj`` an instance whose attributes may hold tensors?"""
    return (
        type(obj).__new__ is object.__new__
        and hasattr(obj, "__dict__")
        and not isinstance(obj, (type, nn.Module, enum.Enum))
    )


def is_container(obj: Any) -> bool:
    if isinstance(obj, torch.Size):
        return False
    return isinstance(obj, (list, tuple, dict, set, frozenset)) or has_state(obj)


class Copier:
    """Copies an object, container by container.

    A tensor or container that occurs twice is converted once, so that it occurs
    twice in the copy too; cycles are fine.

    Args:
        convert: gives the tensor that takes a tensor's place.
    """

    def __init__(self, convert: Callable[[Tensor], Any]) -> None:
        self._convert = convert
        self._done: dict[int, Any] = {}
        self.pairs: list[tuple[Any, Any]] = []  # (original, copy) of each container

    def know(self, original: Any, result: Any) -> None:
        """From now on ``original`` becomes ``result``."""
        self._done[id(original)] = result
        self.pairs.append((original, result))  # keeps original alive: its id is a key

    def copy(self, obj: Any) -> Any:
        if id(obj) in self._done:
            return self._done[id(obj)]
        if isinstance(obj, Tensor):
            result = self._convert(obj)
            self._done[id(obj)] = result
            return result
        if not is_container(obj):
            return obj
        if isinstance(obj, (tuple, set, frozenset)):
            items = [self.copy(item) for item in obj]
            result = obj._make(items) if hasattr(obj, "_make") else type(obj)(items)
            self.know(obj, result)
            return result
        result = self._shell(obj)
        self.know(obj, result)
        self.fill(result, obj)
        return result

    def fill(self, target: Any, source: Any) -> None:
        """Makes the contents of ``target``, a list, dict or instance, those of ``source``.

        What is the same already is left alone.
        """
        if isinstance(target, list):
            items = [self.copy(item) for item in source]
            if [id(item) for item in items] != [id(item) for item in target]:
                list.__setitem__(target, slice(None), items)
        if isinstance(target, dict):
            self._fill_mapping(target, dict(source.items()))
        if hasattr(target, "__dict__"):
            self._fill_mapping(vars(target), vars(source))

    def _fill_mapping(self, target: dict, source: dict) -> None:
        values = {key: self.copy(value) for key, value in source.items()}
        base = OrderedDict if isinstance(target, OrderedDict) else dict
        for key in [key for key in target if key not in values]:
            base.pop(target, key)
        for key, value in values.items():
            if key not in target:
                target[key] = value  # a subclass keeps its own books of keys
            elif dict.__getitem__(target, key) is not value:
                dict.__setitem__(target, key, value)
        if list(target) != list(values):  # in this order
            for key, value in values.items():
                base.pop(target, key)
                base.__setitem__(target, key, value)

    @staticmethod
    def _shell(obj: Any) -> Any:
        """A container of the same type; ``fill`` follows."""
        if type(obj) is list:
            return []
        if type(obj) is dict:
            return {}
        if isinstance(obj, (list, dict)):
            return copy.copy(obj)
        return object.__new__(type(obj))


def tensors_in(*objects: Any) -> Iterator[Tensor]:
    """Every tensor in ``objects``, each once, in order of occurrence."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    copier = Copier(note)
    for obj in objects:
        copier.copy(obj)
    yield from found


def map_tensors(convert: Callable[[Tensor], Any], obj: Any) -> Any:
    """A copy of ``obj`` with ``convert(tensor)`` in the place of each tensor."""
    return Copier(convert).copy(obj)
