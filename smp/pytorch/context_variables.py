"""Lists, dicts and sets in context variables: arguments of every remote call.

A library's hooks deep inside a model collect hidden states, attentions or router logits in a
container.  A context variable holds the container.  Where the module runs on another rank, the
container goes with the call and comes back with the additions.  Tensors of earlier collections
stay where they are: a ``Kept`` takes their place on the way.
"""

import importlib
import sys
import types
import warnings
from collections.abc import Callable, Iterable
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from smp.pytorch import call_warnings

if TYPE_CHECKING:
    from contextvars import Token

_CONTAINERS = (list, dict, set)
_COLLECTOR = "transformers.utils.output_capturing"

# The home of each variable: the module, and the names from there; None: none found.
_homes: dict[ContextVar, tuple[str, ...] | None] = {}
_found: dict[tuple[str, ...], ContextVar] = {}
_users: dict[ContextVar, bool] = {}
_outside = copy_context()


class Kept:
    """In place of a tensor collected on another rank, and still there."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"smp: {name} of a tensor that was collected in a context variable before a "
            "module of another rank was called; it stays on the rank that collected it"
        )


class Collected:
    """The containers as they travel with one call.

    Attributes:
        values: ``((home, container), ...)``, with a Kept for each tensor.
    """

    def __init__(self, containers: Iterable[tuple[tuple[str, ...], Any]]):
        self._made: dict[int, Any] = {}  # id of an original -> its copy for the way
        self._original: dict[int, Any] = {}  # id of a copy -> the original
        self._pairs: list[tuple[Any, Any, list]] = []
        self.values = tuple((home, self._travelling(value)) for home, value in containers)

    def settle(self) -> None:
        """After the call: bring the copies' changes to the originals."""
        for original, made, before in self._pairs:
            now = _items(made)
            if len(now) == len(before) and all(
                a is b for a, b in zip(now, before, strict=True)
            ):
                continue
            if isinstance(original, dict):
                content = {key: self._back(value) for key, value in made.items()}
                original.clear()
                original.update(content)
            elif isinstance(original, list):
                original[:] = map(self._back, made)
            else:
                members = set(map(self._back, made))
                original.clear()
                original |= members

    def _travelling(self, value: Any) -> Any:
        if id(value) in self._made:
            return self._made[id(value)]
        made: Any
        if isinstance(value, Tensor):
            return self._know(value, Kept())
        if type(value) is tuple:
            return self._know(value, tuple(map(self._travelling, value)))
        if type(value) not in _CONTAINERS:
            return value
        made = self._know(value, type(value)())
        if type(value) is dict:
            made.update((key, self._travelling(item)) for key, item in value.items())
        elif type(value) is list:
            made += map(self._travelling, value)
        else:
            made |= set(map(self._travelling, value))
        self._pairs.append((value, made, _items(made)))
        return made

    def _know(self, original: Any, made: Any) -> Any:
        self._made[id(original)] = made
        self._original[id(made)] = original
        return made

    def _back(self, value: Any) -> Any:
        if id(value) in self._original:
            return self._original[id(value)]
        if type(value) is tuple:
            return tuple(map(self._back, value))
        if type(value) in _CONTAINERS:  # made by the callee
            self._original[id(value)] = value
            if type(value) is dict:
                for key, item in value.items():
                    value[key] = self._back(item)
            elif type(value) is list:
                value[:] = map(self._back, value)
            else:
                items = set(map(self._back, value))
                value.clear()
                value |= items
        return value


def _items(container: Any) -> list:
    if isinstance(container, dict):
        return [part for pair in container.items() for part in pair]
    return list(container)


def begin_step() -> None:
    """Variables with a value from outside the step stay on their rank."""
    global _outside
    _outside = copy_context()


def collect(path: str) -> Collected | None:
    """The containers put into context variables by the step; None without any.

    Args:
        path: of the called module.
    """
    found = []
    for variable, value in copy_context().items():
        if _outside.get(variable) is value:
            continue
        if type(value) in _CONTAINERS:
            home = _home_of(variable)
            if home is not None and not _is_torchs(home):
                found.append((home, value))
        elif _is_users(variable):
            call_warnings.warn_of_variable(path, variable.name)
    return Collected(found) if found else None


def _is_users(variable: ContextVar) -> bool:
    """Whether its value is of interest.  Torch keeps its own configuration in variables, too,
    named after it or no globals.
    """
    if variable.name.startswith("torch."):
        return False
    if variable not in _users:
        home = _search(variable)
        _users[variable] = home is not None and not _is_torchs(home)
    return _users[variable]


def _is_torchs(home: tuple[str, ...]) -> bool:
    """Torch's own notes while it compiles are of no use elsewhere."""
    return home[0].partition(".")[0] == "torch"


def set_collected(
    values: Iterable[tuple[tuple[str, ...], Any]], models: Iterable[nn.Module]
) -> list[tuple[ContextVar, "Token"]]:
    """Give the variables the containers of a call.

    Args:
        models: of this rank; those of transformers get the collecting hooks.

    Returns:
        the argument of :func:`reset`.
    """
    tokens = []
    for home, value in values:
        if home[0] == _COLLECTOR:
            for model in models:
                _install_hooks_of_transformers(model)
        variable = _variable_at(home)
        tokens.append((variable, variable.set(value)))
    return tokens


def reset(tokens: list[tuple[ContextVar, "Token"]]) -> None:
    """Give the variables their former values back."""
    for variable, token in reversed(tokens):
        variable.reset(token)


def _home_of(variable: ContextVar) -> tuple[str, ...] | None:
    """The names by which every rank finds the variable.  They are those of a module's global,
    or of an attribute of one.
    """
    if variable not in _homes:
        _homes[variable] = home = _search(variable)
        if home is None:
            warnings.warn(
                f"smp: the context variable {variable.name!r} is no global of a module: what "
                "modules on other ranks add to its value is lost",
                stacklevel=2,
            )
    return _homes[variable]


def _search(variable: ContextVar) -> tuple[str, ...] | None:
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if value is variable:
                return module_name, name
            for attribute, item in _attributes(value).items():
                if item is variable:
                    return module_name, name, attribute
    return None


def _attributes(value: Any) -> dict[str, Any]:
    """An instance's own, without running any code of its class."""
    cls = type(value)  # isinstance would ask the value
    if issubclass(cls, type | types.ModuleType) or not cls.__dictoffset__:
        return {}
    try:
        return dict(object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError):
        return {}


def _variable_at(home: tuple[str, ...]) -> ContextVar:
    if home not in _found:
        found: Any = importlib.import_module(home[0])
        for name in home[1:]:
            found = getattr(found, name)
        _found[home] = found
    return _found[home]


def _install_hooks_of_transformers(root: nn.Module) -> None:
    """Install the hooks of a collecting model's forward, run by transformers on another rank.
    Each model's once: a second hook would collect again.
    """
    install: Callable = sys.modules[_COLLECTOR].maybe_install_capturing_hooks
    pretrained: type = importlib.import_module("transformers").PreTrainedModel
    for model in root.modules():
        if isinstance(model, pretrained) and not any(
            "_output_capturing_hooks_installed" in vars(inner) for inner in model.modules()
        ):
            install(model)
