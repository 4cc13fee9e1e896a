"""Containers of the script with tensors from hooks of modules, as in feature extraction.

One process runs a microbatch to its end before a hook fills the container again.
"""

import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp.pytorch.restore import OBJECT, kind_of


def of_module(module: nn.Module) -> Iterator[Callable[[], Any]]:
    """Changeable values within reach of the script's hooks of its forward, each by a call."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for hook in hooks.values():
            if not str(getattr(hook, "__module__", "")).startswith(("torch.", "smp.")):
                yield from of_hook(hook)


def of_hook(hook: Callable) -> Iterator[Callable[[], Any]]:
    """A function's arguments, closure and globals, its object, or the object called."""
    if isinstance(hook, partial):
        for held in (*hook.args, *hook.keywords.values()):
            yield partial(_itself, held)
        yield from of_hook(hook.func)
    elif isinstance(hook, types.MethodType):
        yield partial(_itself, hook.__self__)
        yield from of_hook(hook.__func__)
    elif isinstance(hook, types.FunctionType):
        for held in (*(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values()):
            yield partial(_itself, held)
        for cell in hook.__closure__ or ():
            yield partial(_content_of, cell)
        for name in hook.__code__.co_names:
            yield partial(hook.__globals__.get, name)
    else:
        yield partial(_itself, hook)


def _itself(value: Any) -> Any:
    return value


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty yet
        return None


def holds_tensors(value: Any) -> bool:
    """Whether the value is a tensor, or has some in it or in its fields."""
    if isinstance(value, nn.Module):
        return False  # its attributes are seen as such
    if kind_of(value) == OBJECT:
        value = getattr(value, "__dict__", None)
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
