"""Forward hooks registered by a script after the partition, unseen in the traced run.

One may keep tensors where microbatches share them, for the forward or the step function to
read.  In one process a microbatch is over before the next one's hook runs, so the hook waits
for that.  A hook that has kept a value in its first step waits for good, with a warning.  A
hook registered by a microbatch does not run in earlier ones, and in later ones only if not
removed.

The hooks of transformers keep their values in a context variable, each microbatch's own.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from torch import nn

from smp import _core
from smp.modules import hook_containers, live_models
from smp.modules.inner_module import wrapped_of
from smp.modules.remote_modules import is_remote
from smp.pytorch import patches
from smp.pytorch.contents import content_of, is_the_same

_OF_TORCH = frozenset(vars(nn.Module()))  # its dicts of parameters, hooks, ...
_KNOWN = ("torch.", "smp.", "transformers.")


class _Place(NamedTuple):
    """A module of a partitioned model.

    Attributes:
        path: its.
        order: the gate passed by a microbatch at the end of its forward.
        is_called_here: the module around it runs on this rank, and calls it: so do hooks after
            its forward.  Hooks before it run with the forward.
    """

    path: str
    order: int
    is_called_here: bool


# The modules of partitioned models, by id: a class of a user's may not be hashable.
_modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_places: dict[int, "_Place"] = {}  # of these
_called: list["_Late"] = []  # hooks not known yet, called in this step


def notice_from_now(root: nn.Module, order: int, is_first: bool) -> None:
    """Hooks registered on the model's modules from now on are late ones.

    Args:
        order: the gate passed by a microbatch at the end of its forward.
        is_first: the step function runs on this rank.
    """
    named = dict(root.named_modules())
    for path, module in named.items():
        above = path.rpartition(".")[0]
        while above and isinstance(named[above], nn.ModuleList | nn.ModuleDict):
            above = above.rpartition(".")[0]
        is_called_here = is_first if not path else not is_remote(named[above])
        _modules[id(module)] = module
        _places[id(module)] = _Place(path, order, is_called_here)
    live_models.change_while_any_lives(patches.late_hooks, _noticing, _noticing)


def forget() -> None:
    """Notice nothing any more."""
    _modules.clear()
    _places.clear()
    _called.clear()
    patches.late_hooks.end()


def _noticing(original: Callable) -> Callable:
    def register(self: nn.Module, hook: Callable, *args: Any, **kwargs: Any) -> Any:
        module = wrapped_of(self)
        is_known = str(getattr(hook, "__module__", "")).startswith(_KNOWN)
        if not is_known and _modules.get(id(module)) is module:
            place = _places[id(module)]
            if "pre_hook" in original.__name__:
                place = place._replace(is_called_here=not is_remote(module))
            hook = _Late(hook, module, place)
        return original(self, hook, *args, **kwargs)

    register.__doc__ = original.__doc__
    register.__name__, register.__qualname__ = original.__name__, original.__qualname__
    return register


class _Late:
    """A hook registered after the partition."""

    def __init__(self, hook: Callable, module: nn.Module, place: _Place):
        """
        Raises:
            RuntimeError: in a step, where this rank does not call the module.
        """
        self._hook = hook
        self.__module__ = getattr(hook, "__module__", "")  # whose it is
        self._where = f"module '{place.path}' ({type(module).__name__})"
        self._order = place.order
        self._microbatch = _core.current()  # the one that registered it in this step
        self._waits = True
        self._keeps = False
        if self._microbatch is not None:
            if not place.is_called_here:
                raise RuntimeError(
                    f"smp: a hook of {self._where} is registered in a step, on a rank that "
                    "does not call the module, or with a hook before its forward does not have "
                    "it, and would not run: register it between steps, on all ranks, or place "
                    "the module with its caller by smp.set_partition"
                )
            _called.append(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        microbatch = _core.current()
        if microbatch is None or not self._waits:
            return self._hook(*args, **kwargs)
        if self._microbatch is not None and microbatch < self._microbatch:
            return None
        if not _core.in_backward():
            _core.await_turn(self._order)
        if self._microbatch not in (None, microbatch) and not self._is_there(args[0]):
            return None
        if self._keeps:
            return self._hook(*args, **kwargs)
        boxes: list[Callable[[], Any]] = [
            partial(_attributes_of, args[0]),
            *hook_containers.of_hook(self._hook),
        ]
        before = [content_of(value()) for value in boxes]
        try:
            return self._hook(*args, **kwargs)
        finally:
            for value, earlier in zip(boxes, before, strict=True):
                if not is_the_same(earlier, content_of(value())):
                    self._keeps |= hook_containers.holds_tensors(value())
            _called.append(self)

    def _is_there(self, module: nn.Module) -> bool:
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        return any(hook is self for hook in hooks)

    def __reduce__(self) -> tuple:
        """Copies and pickles have the script's."""
        return _itself, (self._hook,)

    def finish(self) -> None:
        """A step with a call or the registration of the hook is over."""
        if self._keeps and self._microbatch is None:
            warnings.warn(
                f"smp: a hook of {self._where}, registered after the first step, keeps tensors "
                "where microbatches share them: it waits in each until the forward of the one "
                "before it is over, and the pipeline with it; return the tensors from the "
                "forward instead",
                stacklevel=2,
            )
        self._waits = self._keeps
        self._microbatch = None


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


def _itself(hook: Callable) -> Callable:
    return hook


def finish() -> None:
    """The step is over."""
    for hook in {id(hook): hook for hook in _called}.values():
        hook.finish()
    _called.clear()
