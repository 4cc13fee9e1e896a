"""What ``model.module`` gives: the wrapped module, which has an attribute ``module``, too.

Scripts reach the wrapped module by ``model.module`` and by ``model.module.module``; others
take wrappers off, ``while hasattr(m, "module"): m = m.module``, which has to end, with it.
So the first ``module`` gives an object of its own: an instance of the wrapped module's class
with the very same attributes, equal to it, whose calls are the wrapped module's.
"""

import functools
from typing import Any

import torch
from torch import nn

from smp.modules import stand_ins


def inner(wrapped: nn.Module) -> nn.Module:
    """An object whose ``module`` is ``wrapped``; that itself where it has a ``module``."""
    if hasattr(wrapped, "module") or isinstance(wrapped, torch.jit.ScriptModule):
        return wrapped
    cls = stand_ins.stand_in(stand_ins.users_class(type(wrapped)), with_module)
    shown: Any = object.__new__(cls)
    object.__setattr__(shown, "__dict__", wrapped.__dict__)
    cls._smp_itself.__set__(shown, wrapped)  # type: ignore[attr-defined]
    return shown


def itself(module: nn.Module) -> nn.Module:
    """The wrapped module for what `inner` gave; any other module as it is."""
    return module._smp_itself if hasattr(type(module), "_smp_itself") else module  # type: ignore


def with_module(cls: type[nn.Module]) -> dict[str, Any]:
    """The methods of a class like ``cls`` whose instances show another one."""

    def __call__(self, *args, **kwargs):
        return self._smp_itself(*args, **kwargs)

    @functools.wraps(cls.forward)
    def forward(self, *args, **kwargs):
        return self._smp_itself.forward(*args, **kwargs)

    def __eq__(self, other):
        return self._smp_itself is itself(other)

    def __hash__(self):
        return hash(self._smp_itself)

    return {
        "__slots__": ("_smp_itself",),  # not in the __dict__, which is the wrapped module's
        "__call__": __call__,
        "forward": forward,
        "__eq__": __eq__,
        "__hash__": __hash__,
        "module": property(lambda self: self._smp_itself),
    }
