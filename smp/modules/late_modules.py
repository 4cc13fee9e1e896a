"""Modules, and parameters, put into a model by a script after its partition or split.

No decision covers them.  In a pipeline their parameters would be on every rank, trained on one,
and saved from another.  With tensor parallelism each rank draws its own values.  A module with
neither parameters nor buffers runs where it is called, and another name for a known module is
harmless: both are let through.
"""

from collections.abc import Iterator
from typing import NoReturn
from weakref import WeakValueDictionary, finalize

from torch import Tensor, nn

from smp import _core
from smp.modules import live_models
from smp.modules.inner_module import wrapped_of
from smp.pytorch import patches

# The modules of partitioned models, by id: a class of a user's may not be hashable.
_modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_paths: dict[int, str] = {}  # of these
_since: dict[int, str] = {}  # when they are not to change any more
_held: dict[int, dict[str, nn.Parameter | None]] = {}  # their parameters then, by name

_PARTITION = (
    "the partition, which decided about the modules that the model had: change it before its "
    "first step"
)
_SPLIT = (
    "smp.DistributedModel has split the model over the TP_GROUP: change it before the model is "
    "wrapped"
)


def refuse_from_now(root: nn.Module, is_split: bool = False) -> None:
    """Refuse modules with parameters or buffers put into ``root``, or taken out.

    Args:
        is_split: over the TP_GROUP, and not partitioned yet.
    """
    for path, module in root.named_modules():
        _modules[id(module)], _paths[id(module)] = module, path
        _since[id(module)] = _SPLIT if is_split else _PARTITION
        if id(module) not in _held:
            finalize(module, _held.pop, id(module), None).atexit = False
        _held[id(module)] = dict(module._parameters)
    live_models.change_while_any_lives(patches.late_modules, _check, _check_parameter)


def forget() -> None:
    """Refuse nothing any more."""
    _modules.clear()
    _paths.clear()
    _since.clear()
    _held.clear()
    patches.late_modules.end()


def _path(module: nn.Module) -> str | None:
    """The module's path in its partitioned model; None: in no such model."""
    return _paths[id(module)] if _modules.get(id(module)) is module else None


def _check(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Called by torch before ``parent`` gets the module by that name.

    Raises:
        RuntimeError: the module, or the replaced one, has parameters or buffers.
    """
    above = _path(wrapped_of(parent))
    if above is None:
        return
    path = f"{above}.{name}".lstrip(".")
    before = wrapped_of(parent)._modules.get(name)
    if module is before:
        return
    if _since[id(wrapped_of(parent))] == _SPLIT and _is_known(module):
        return
    if before is not None and _path(before) == path and has_values(before):
        by = "None" if module is None else f"a {type(module).__name__}"
        what = f"({type(before).__name__}) cannot be replaced by {by}"
    elif module is not None and _path(module) is None and has_values(module):
        what = f"({type(module).__name__}) cannot be added"
    else:
        return
    raise RuntimeError(f"smp: module '{path}' {what} after {_since[id(wrapped_of(parent))]}")


def _is_known(module: nn.Module | None) -> bool:
    """Whether all its values are of modules known in the model, as those of a compiled one."""
    inside = () if module is None else module.modules()
    return all(_path(m) is not None or not any(True for _ in _own_values(m)) for m in inside)


def has_values(module: nn.Module) -> bool:
    """Whether there are parameters or buffers in it."""
    held = (register for m in module.modules() for register in (m._parameters, m._buffers))
    return any(tensor is not None for register in held for tensor in register.values())


def _own_values(module: nn.Module) -> Iterator[Tensor]:
    for register in (module._parameters, module._buffers):
        yield from (tensor for tensor in register.values() if tensor is not None)


def _check_parameter(parent: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Called by torch before ``parent`` gets the parameter by that name.

    Raises:
        RuntimeError: in a step, for a name without a parameter before.  One taken out may be
            put back.
    """
    above = _path(wrapped_of(parent))
    if parameter is None or above is None:
        return
    held = _held[id(wrapped_of(parent))]
    if _core.current() is None:
        held[name] = parameter
    elif parent._parameters.get(name) is not None or held.get(name) is parameter:
        return
    elif _since[id(wrapped_of(parent))] == _PARTITION:
        refuse_parameter(f"{above}.{name}".lstrip("."), parameter)


def refuse_parameter(path: str, parameter: nn.Parameter) -> NoReturn:
    """
    Raises:
        RuntimeError: the parameter has come after the partition.
    """
    raise RuntimeError(
        f"smp: parameter '{path}' {list(parameter.shape)} cannot be added after the "
        "partition, which decided about the parameters that the model had: add it before "
        "its first step"
    )
