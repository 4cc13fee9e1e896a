"""Activations by name."""

import functools
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

_gelu_by_tanh = functools.partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_by_tanh,
    "gelu_fast": _gelu_by_tanh,
    "gelu_pytorch_tanh": _gelu_by_tanh,
    "relu": F.relu,
}
