"""Classes in place of the user's own.

A module on another rank, checkpointed, or passed by microbatches in order gets a class like its
own but for a few methods.  For the user the class is still his own: a subclass of the same
name.  A copy or pickle is an instance of the class itself, made by its own ``__reduce_ex__``,
``__getstate__``, ``__copy__`` and ``__deepcopy__`` if it has them.
"""

import copy
import copyreg
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from smp import marks

Members = Callable[[type[nn.Module]], dict[str, Any]]

_made: dict[tuple[type, Members, tuple[type, ...]], type] = {}


def stand_in(
    cls: type[nn.Module], members: Members, *behind: type[nn.Module]
) -> type[nn.Module]:
    """The class in place of ``cls``; the same one each time.

    Args:
        cls: the user's class, or already one in its place.
        members: a top-level function from ``cls`` to the methods that differ.
        behind: classes found by ``super()`` in ``cls`` before the common base.
    """
    bases = (cls, *behind)
    made = _made.get((cls, members, behind))
    if made is None:
        names: dict[str, Any] = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "__reduce_ex__": _reduce_ex,
            marks.USERS_CLASS: users_class(cls),
        }
        if cls is users_class(cls):
            for name, method in (("__copy__", _copy), ("__deepcopy__", _deepcopy)):
                if hasattr(cls, name):
                    names[name] = method
        names |= members(cls)
        if hasattr(cls.__init_subclass__, "__func__"):
            # The user's class does not hear of it: it may keep a list of its subclasses, by
            # name.
            made = type(cls.__name__, (_Unheard, *bases), names)
            made.__bases__ = bases
        else:
            made = type(cls.__name__, bases, names)
        _made[cls, members, behind] = made
    return made


def users_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class written by the user."""
    return getattr(cls, marks.USERS_CLASS, cls)


def of_original(cls: type[nn.Module]) -> dict[str, Any]:
    """The member of a stand-in class with the class before the partition."""
    return {marks.ORIGINAL_CLASS: getattr(cls, marks.ORIGINAL_CLASS, cls)}


class WatchedAttribute:
    """A plain attribute of modules, in their stand-in class.

    Its value is in the module's ``__dict__``, as ever; `before_read` hears of each read.
    """

    def __set_name__(self, owner: type[nn.Module], name: str) -> None:
        self.owner, self.name = owner, name

    def __get__(self, module: nn.Module | None, cls: type[nn.Module]) -> Any:
        if module is None:
            return getattr(users_class(cls), self.name)
        self.before_read(module)
        if self.name in module.__dict__:
            return module.__dict__[self.name]
        return getattr(super(self.owner, module), self.name)

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__[self.name] = value

    def __delete__(self, module: nn.Module) -> None:
        if self.name not in module.__dict__:
            raise AttributeError(self.name)
        del module.__dict__[self.name]

    def before_read(self, module: nn.Module) -> None:
        """Does nothing here."""


class _Unheard(nn.Module):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def shallow_copy(module: nn.Module) -> nn.Module:
    """The result of ``copy.copy`` for an instance of the user's class."""
    if hasattr(users_class(type(module)), "__copy__"):
        return _copy(module)
    return _rebuilt(module, None)


def deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """The result of ``copy.deepcopy`` for an instance of the user's class."""
    if hasattr(users_class(type(module)), "__deepcopy__"):
        return _deepcopy(module, memo)
    return _rebuilt(module, memo)


def _rebuilt(module: nn.Module, memo: dict[int, Any] | None) -> nn.Module:
    """As in copy for a class without methods of its own for this."""
    reduced = module.__reduce_ex__(4)
    if isinstance(reduced, str):  # a global's name: one of its kind
        return module
    return copy._reconstruct(module, memo, *reduced)  # type: ignore


def _check_copies(module: nn.Module) -> None:
    refuse = getattr(type(module), marks.REFUSES_COPIES, None)
    if refuse is not None:
        refuse(module)


def _reduce_ex(self: nn.Module, protocol: int) -> Any:
    _check_copies(self)
    reduced = _Twin(self).call("__reduce_ex__", protocol)
    if not isinstance(reduced, tuple):
        return reduced
    make, args, *state = reduced
    # pickle takes these two only for an instance of the very class.
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]
        make = args[0].__new__
    elif make is copyreg.__newobj_ex__:  # type: ignore[attr-defined]
        cls, positional, named = args
        make, args = partial(cls.__new__, cls, *positional, **named), ()
    return make, args, *state


def _copy(self: nn.Module) -> Any:
    _check_copies(self)
    return _Twin(self).call("__copy__")


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> Any:
    _check_copies(self)
    twin = _Twin(self)
    return twin.call("__deepcopy__", _Memo(memo, twin.module, self))


class _Memo(dict[int, Any]):
    """A deep copy's memo with the module's entry for the twin's: cycles lead there."""

    def __init__(self, memo: dict[int, Any], twin: nn.Module, original: nn.Module) -> None:
        self._memo = memo
        self._twin, self._original = id(twin), id(original)
        memo.setdefault(id(memo), []).append(self)  # copy notes our own id in it, too

    def _key(self, key: int) -> int:
        return self._original if key == self._twin else key

    def __getitem__(self, key: int) -> Any:
        return self._memo[self._key(key)]

    def __setitem__(self, key: int, value: Any) -> None:
        self._memo[self._key(key)] = value

    def __contains__(self, key: object) -> bool:
        return self.get(key) is not None  # type: ignore[arg-type]

    def get(self, key: int, default: Any = None) -> Any:
        return self._memo.get(self._key(key), default)

    def setdefault(self, key: int, default: Any = None) -> Any:
        return self._memo.setdefault(self._key(key), default)


class _Twin:
    """An instance of the user's class with all of a module's attributes but ours.

    The module itself must keep its class meanwhile: another thread may call it.
    """

    def __init__(self, module: nn.Module) -> None:
        cls = users_class(type(module))
        self.original = module
        self.module = object.__new__(cls)
        self.module.__dict__.update(
            (name, value) for name, value in module.__dict__.items() if name not in marks.OF_JOB
        )
        for name in copyreg._slotnames(cls):  # type: ignore[attr-defined]
            if hasattr(module, name):
                object.__setattr__(self.module, name, getattr(module, name))

    def call(self, name: str, *args: Any) -> Any:
        """The result of the user's method; the module for the instance itself."""
        try:
            given = getattr(self.module, name)(*args)
            return self.original if given is self.module else given
        finally:
            if hasattr(self.module, "__del__"):  # the module lives on
                marks.set_class_itself(self.module, nn.Module)
