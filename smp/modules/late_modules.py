"""Modules that a script puts into a model after its partition, or after it was split.

Nobody has decided about them.  In a pipeline their parameters would be on every rank, trained
on the one that runs them, and saved from another; with tensor parallelism each rank draws its
own values.  A module with neither parameters nor buffers runs where it is called, and another
name for a module of the model is just that; both are let through.
"""

from collections.abc import Iterator
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from smp.modules.inner_module import wrapped_of

# The modules of partitioned models, by id: a class of a user's may not be hashable.
_modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_paths: dict[int, str] = {}  # of these
_since: dict[int, str] = {}  # when they are not to change any more
_hooks: list[RemovableHandle] = []


_PARTITION = (
    "the partition, which decided about the modules that the model had: change it before its "
    "first step"
)
_SPLIT = (
    "smp.DistributedModel has split the model over the TP_GROUP: change it before the model is "
    "wrapped"
)


def refuse_from_now(root: nn.Module, is_split: bool = False) -> None:
    """Refuse modules with parameters or buffers that are put into ``root``, or taken out.

    Args:
        is_split: over the TP_GROUP, and not partitioned yet.
    """
    for path, module in root.named_modules():
        _modules[id(module)], _paths[id(module)] = module, path
        _since[id(module)] = _SPLIT if is_split else _PARTITION
    if not _hooks:
        _hooks.append(register_module_module_registration_hook(_check))


def forget() -> None:
    """Refuse nothing any more."""
    _modules.clear()
    _paths.clear()
    _since.clear()
    while _hooks:
        _hooks.pop().remove()


def _path(module: nn.Module) -> str | None:
    """In the partitioned model that has it; None: none has."""
    return _paths[id(module)] if _modules.get(id(module)) is module else None


def _check(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Called by torch before ``parent`` gets the module by that name.

    Raises:
        RuntimeError: it has, or what it replaces, parameters or buffers.
    """
    above = _path(wrapped_of(parent))
    if above is None:
        return
    path = f"{above}.{name}".lstrip(".")
    before = wrapped_of(parent)._modules.get(name)
    if module is before:
        return
    if (
        _since[id(wrapped_of(parent))] == _SPLIT
        and module is not None
        and _wraps(module, before)
    ):
        return
    if before is not None and _path(before) == path and _has_values(before):
        by = "None" if module is None else f"a {type(module).__name__}"
        what = f"({type(before).__name__}) cannot be replaced by {by}"
    elif module is not None and _path(module) is None and _has_values(module):
        what = f"({type(module).__name__}) cannot be added"
    else:
        return
    raise RuntimeError(f"smp: module '{path}' {what} after {_since[id(wrapped_of(parent))]}")


def _wraps(module: nn.Module, before: nn.Module | None) -> bool:
    """Whether it has the module that it replaces, and no values besides, as a compiled one."""
    if before is None:
        return False
    theirs = {id(tensor) for tensor in _values(before)}
    return {id(tensor) for tensor in _values(module)} == theirs


def _has_values(module: nn.Module) -> bool:
    return any(True for _ in _values(module))


def _values(module: nn.Module) -> Iterator[Tensor]:
    for one in module.modules():
        for register in (one._parameters, one._buffers):
            yield from (tensor for tensor in register.values() if tensor is not None)
