"""The content of a value that can change while it stays the same object.

Lists, dicts, sets and tuples, fields of plain objects, tensors, NumPy arrays and generators of
random numbers, however nested.  Two contents are compared without another copy of any data:
tensors by their version, arrays by a checksum.  A generator's content is its state.
"""

import zlib
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from smp.pytorch import generators, restore

_MOST = 4096  # elements of one value, looked into at most
_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)


class Content(tuple):
    """The elements of a changeable value."""


class _Looking:
    """One look at a value: the objects met so far."""

    __slots__ = ("left", "seen")

    def __init__(self) -> None:
        self.left = _MOST
        self.seen: set[int] = set()


def content_of(value: Any) -> Any:
    """The value's content now; the value itself where it cannot change or is opaque."""
    return _content(value, 0, _Looking())


def _content(value: Any, depth: int, looking: _Looking) -> Any:
    kind = restore.kind_of(value)
    if kind == restore.LEAF:
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            return Content((value, 0 if value.is_inference() else value._version))
        if isinstance(value, torch.Generator):
            return Content((value, generators.fingerprint_of(value)))
        return value
    if depth > restore.DEEPEST or looking.left <= 0 or id(value) in looking.seen:
        return value
    looking.seen.add(id(value))
    if kind == restore.DICT:
        keys = _all(dict.keys(value), depth, looking)
        return Content((keys, _all(dict.values(value), depth, looking)))
    if kind in (restore.LIST, restore.TUPLE):
        return _all(value, depth, looking)
    if restore.is_array(value):
        if value.dtype.hasobject:
            return Content((value, _all(value.ravel(), depth, looking)))
        return Content((value, _checksum(value)))
    if generators.is_generator(value):
        return Content((value, generators.fingerprint_of(value)))
    state = getattr(value, "__dict__", None)
    if isinstance(state, dict):
        return Content((value, _content(state, depth, looking)))
    return value


def _all(values: Collection[Any], depth: int, looking: _Looking) -> Content:
    """The number of the values, and the content of the first ones."""
    first = []
    for one in values:
        if looking.left <= 0:
            break
        looking.left -= 1
        first.append(_content(one, depth + 1, looking))
    return Content((len(values), *first))


def is_the_same(a: Any, b: Any) -> bool:
    """Whether two contents are equal, as far as they were looked into."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is Content:
        return len(a) == len(b) and all(map(is_the_same, a, b))
    return isinstance(a, _PLAIN) and a == b


def can_change(value: Any) -> bool:
    """Whether code may change the value's content without setting an attribute."""
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    if generators.is_generator(value):
        return True
    kind = restore.kind_of(value)
    if kind == restore.TUPLE:
        return any(map(can_change, value))
    if kind == restore.OBJECT:
        return restore.is_array(value) or isinstance(getattr(value, "__dict__", None), dict)
    return kind in (restore.DICT, restore.LIST)


def _checksum(array: Any) -> int:
    return zlib.crc32(array if array.flags.c_contiguous else array.tobytes())
