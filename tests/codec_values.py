"""Classes and values for the codec's tests and fuzzer, importable on the other side."""

import collections
import dataclasses
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A registered dataclass that no attribute may be set on."""

    left: object
    right: object


class Cache:
    """An object that keeps all in its __dict__, as transformers' caches do."""

    def __init__(self, layers):
        self.layers = layers


class Boxed(Generic[T]):
    """Its base's slots are none."""

    def __init__(self, held: T):
        self.held = held


class Output(collections.OrderedDict):
    """A dict whose items are attributes too, as transformers' ModelOutput."""

    def __init__(self, loss=None, logits=None):
        super().__init__(loss=loss, logits=logits)
        self.loss = loss
        self.logits = logits


class Counts(collections.defaultdict):
    """A dict that makes what is missing."""


class Stack(list):
    """A list with attributes."""

    def __init__(self, items=()):
        super().__init__(items)
        self.depth = len(self)


def sample() -> list:
    """One value of every kind that the wire knows."""
    loop: list = [1]
    loop.append(loop)
    shared = torch.arange(6.0).reshape(2, 3)
    return [
        [None, True, False, 7, -(2**70), 1.5, 2j, "text\ud800", b"bytes", ...],
        [slice(1, None, 2), (1, (2,)), torch.Size([2, 3]), frozenset({1, "a"})],
        [Pair(1, shared), torch.bfloat16, torch.device("cpu"), Cache],
        {"a": [1], "b": {2, 3}, 4: shared, "again": shared.t()},
        Output(torch.ones(()), shared[:, ::2]),
        Stack([Cache({"x": torch.zeros(0, 2)}), Frozen(1, "r")]),
        loop,
        Counts(int, a=1),
        [torch.ones(1, dtype=torch.bool).expand(4), torch.ones(2, dtype=torch.complex64)],
    ]
