"""``model.module.module``: scripts of smdistributed.modelparallel find their module there.

``model.module`` is the wrapped module itself, and its class gets one more attribute:
``module``, a twin of it.  The twin has no ``module``: a loop that unwraps a model comes to its
end.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from smp import marks
from smp.modules import stand_ins

_twins: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # by id of the wrapped one


def give(module: nn.Module) -> None:
    """Give a wrapped module the attribute ``module``, if it has none of its own."""
    cls = type(module)
    # The classes of script modules are made by a metaclass, for a script.
    if hasattr(module, "module") or isinstance(module, torch.jit.ScriptModule):
        return
    marks.set_class_itself(module, stand_ins.stand_in(cls, wrapped))


class _Inner:
    """The attribute ``module``; a value of that name set later by the user goes before it."""

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
            object.__setattr__(twin, marks.WRAPPED, module)
        return twin


def wrapped(cls: type[nn.Module]) -> dict[str, Any]:
    """The additions to ``cls`` in the class of a wrapped module."""
    return {"module": _Inner()}


def inner(cls: type[nn.Module]) -> dict[str, Any]:
    """The methods of a class like ``cls`` for stand-ins of the wrapped module.

    They have its ``__dict__``, and leave the work of our classes to it.
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
        "__slots__": (marks.WRAPPED,),
        "__call__": __call__,
        "forward": forward,
        "__setattr__": __setattr__,
        "__delattr__": __delattr__,
    }


def wrapped_of(module: nn.Module) -> nn.Module:
    """The module behind ``model.module.module``; any other one itself.

    A user's ``__getattr__`` is never called: it may need attributes that the module does not
    have yet.
    """
    try:
        return object.__getattribute__(module, marks.WRAPPED)
    except AttributeError:
        return module


def users_module(module: nn.Module) -> nn.Module:
    """The same, and for a ``DistributedModel`` the wrapped module."""
    module = wrapped_of(module)
    return module.__dict__.get(marks.WRAPPED_MODULE, module)
