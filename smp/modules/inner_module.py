"""``model.module.module``: scripts of smdistributed.modelparallel find their module there.

``model.module`` is the wrapped module itself, whose class gets one more attribute:
``module``, a twin of it.  The twin has no ``module``, so that what unwraps a model for as long
as there is one comes to an end.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from smp.modules import stand_ins

_twins: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # by id of the wrapped one


def give(module: nn.Module) -> None:
    """Give a module that is wrapped the attribute ``module``, if it has none of its own."""
    cls = type(module)
    # The classes of script modules are made by a metaclass, for a script.
    if hasattr(module, "module") or isinstance(module, torch.jit.ScriptModule):
        return
    # Past the __setattr__ of a class that forwards it, as torch.compile's.
    object.__setattr__(module, "__class__", stand_ins.stand_in(cls, wrapped))


class _Inner:
    """The attribute ``module``; whatever the user later gives that name goes before it."""

    def __get__(self, module: nn.Module | None, cls: type[nn.Module]) -> nn.Module:
        if module is None:
            raise AttributeError(f"type object '{cls.__name__}' has no attribute 'module'")
        registers = (module._modules, module._parameters, module._buffers)
        if any("module" in register for register in registers):
            raise AttributeError("module")  # Python goes on to nn.Module.__getattr__
        twin = _twins.get(id(module))
        if twin is None:
            made = stand_ins.stand_in(stand_ins.users_class(cls), inner)
            twin = _twins[id(module)] = object.__new__(made)
            object.__setattr__(twin, "__dict__", module.__dict__)
            object.__setattr__(twin, "_smp_wrapped", module)
        return twin


def wrapped(cls: type[nn.Module]) -> dict[str, Any]:
    """What the class of a wrapped module has beside ``cls``."""
    return {"module": _Inner()}


def inner(cls: type[nn.Module]) -> dict[str, Any]:
    """The methods of a class like ``cls`` whose instances stand for the wrapped module.

    They have its ``__dict__``, and what a class of ours does for it they have done there.
    """

    def __call__(self, *args, **kwargs):
        return self._smp_wrapped(*args, **kwargs)

    def forward(self, *args, **kwargs):
        return self._smp_wrapped.forward(*args, **kwargs)

    def __setattr__(self, name, value):
        setattr(self._smp_wrapped, name, value)

    def __delattr__(self, name):
        delattr(self._smp_wrapped, name)

    return {
        "__slots__": ("_smp_wrapped",),
        "__call__": __call__,
        "forward": forward,
        "__setattr__": __setattr__,
        "__delattr__": __delattr__,
    }


def wrapped_of(module: nn.Module) -> nn.Module:
    """The module that ``model.module.module`` stands for; any other one itself.

    Never calls a user's ``__getattr__``, which may need what the module does not have yet.
    """
    try:
        return object.__getattribute__(module, "_smp_wrapped")
    except AttributeError:
        return module


def users_module(module: nn.Module) -> nn.Module:
    """The same, and of a ``DistributedModel`` the one it wraps."""
    module = wrapped_of(module)
    return module.__dict__.get("_smp_module", module)
