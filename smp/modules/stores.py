"""Attributes for a model's code to set on its modules in the forward, by a reading of the code.
Branches not taken by a traced run count, too.
"""

import dis
import functools
import types
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

from smp.modules.stand_ins import users_class


class _Code(NamedTuple):
    """A function's names and stores, with those of functions made in it."""

    names: frozenset[str]  # names in use: it may call methods by them
    own: frozenset[str]  # attributes set on its first argument
    others: frozenset[str]  # ... on anything else


def stored(modules: Mapping[str, nn.Module]) -> dict[str, set[str]]:
    """Names of the attributes that the modules' code may set on each of them, by path.

    A module sets its own, and those known to a module in it.

    Args:
        modules: of one model, by path, those above first.
    """
    reached = _reached({users_class(type(module)) for module in modules.values()})
    found: dict[str, set[str]] = {}
    for path, module in modules.items():
        codes = reached[users_class(type(module))]
        own = {name for code in codes for name in code.own}
        found.setdefault(path, set()).update(own)
        names = {name for code in codes for name in code.others}
        if not names:
            continue
        for inner, one in module.named_modules(prefix=path):
            its = {n for n in names if n in one.__dict__ or hasattr(type(one), n)}
            found.setdefault(inner, set()).update(its)
    return found


def _reached(classes: set[type[nn.Module]]) -> dict[type[nn.Module], list[_Code]]:
    """By class, its forward and the methods that any of the classes' code may call."""
    methods = {cls: dict(_methods(cls)) for cls in classes}  # type: ignore[arg-type]
    found: dict[type[nn.Module], list[_Code]] = {cls: [] for cls in classes}
    names = {"forward", "__call__"}
    used: set[str] = set()
    while names - used:
        new, used = names - used, used | names
        for cls in classes:
            for code in (methods[cls][name] for name in new & methods[cls].keys()):
                found[cls].append(code)
                names |= code.names
    return found


@functools.cache
def _methods(cls: type[nn.Module]) -> tuple[tuple[str, _Code], ...]:
    """By name, the methods of a class other than torch's."""
    found: dict[str, _Code] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] not in ("torch", "builtins"):
            for name, member in vars(base).items():
                if name != "__init__" and (codes := list(_codes_of(member))):
                    found[name] = _read(codes)
    return tuple(found.items())


def _codes_of(member: object) -> Iterator[types.CodeType]:
    """The code of a method or a property, and of functions wrapped by a decorator."""
    if isinstance(member, property):
        member = member.fget
    while member is not None:
        function = getattr(member, "__func__", member)
        if isinstance(function, types.FunctionType):
            yield function.__code__
        member = getattr(function, "__wrapped__", None)


def _read(codes: list[types.CodeType]) -> _Code:
    names: set[str] = set()
    own: set[str] = set()
    others: set[str] = set()
    for code in codes:
        first = code.co_varnames[:1] if code.co_argcount else code.co_freevars
        names.update(code.co_names)
        before = None
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("STORE_ATTR", "DELETE_ATTR"):
                (own if _last(before) in first else others).add(instruction.argval)
            before = instruction
        inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
        if inner:
            its = _read(inner)
            names |= its.names
            own |= its.own
            others |= its.others
    return _Code(frozenset(names), frozenset(own), frozenset(others))


def _last(instruction: dis.Instruction | None) -> object:
    """The last variable loaded by an instruction."""
    argument = None if instruction is None else instruction.argval
    return argument[-1] if isinstance(argument, tuple) and argument else argument
