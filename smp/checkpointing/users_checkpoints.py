"""The script's ``torch.utils.checkpoint``, without re-entrance, around calls of other ranks.

The owner forgets the graph of a call in the checkpoint's first forward.  Backward makes the
call again (``csrc/python/modules/nodes.h``).
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch.utils import checkpoint

from smp import _core
from smp.checkpointing import activation_checkpointing
from smp.modules import live_models
from smp.pytorch import patches
from smp.runtime import collective_chain

_HOOKS = {
    f"{checkpoint._checkpoint_hook.__qualname__}.__init__.<locals>.pack_hook": 1,
    f"{checkpoint._recomputation_hook.__qualname__}.__init__.<locals>.pack_hook": 2,
}


def checkpoint_of(hooks: tuple[Callable, Callable]) -> int:
    """Whose hooks of saved tensors these are.

    Returns:
        1: a checkpoint's first forward, 2: its second forward, 0: neither.
    """
    pack = hooks[0]
    if getattr(pack, "__module__", None) != checkpoint.__name__:
        return 0
    return _HOOKS.get(pack.__qualname__, 0)


def run_first(function: Callable, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """Call the function as in a checkpoint's first forward.

    The result has a graph without saved tensors; so have the calls made by the function.
    """
    called = functools.partial(function, *args, **(kwargs or {}))
    return activation_checkpointing.run(called, True, (), {})


def number_alike() -> None:
    """From now on the second forward's requests have the numbers of the first one's, so
    gradients are added up in the order of one process.
    """
    live_models.change_while_any_lives(patches.checkpoints, _numbering)


def forget() -> None:
    """Number nothing any more."""
    patches.checkpoints.end()


def _numbering(original: Callable) -> Callable:
    @functools.wraps(original)
    def begin(function: Callable, *args: Any, **kwargs: Any) -> Any:
        return original(_again(function), *args, **kwargs)

    return begin


def _again(function: Callable) -> Callable:
    """The function, called by the second forward alone."""
    before_first = _core.requests()
    if before_first is None:
        return function
    is_carried = collective_chain.is_carried()

    def again(*args: Any, **kwargs: Any) -> Any:
        before = _core.requests()
        if before is None:
            return function(*args, **kwargs)
        _core.set_requests(before_first)
        try:
            with collective_chain.opened(runs_again=True) if is_carried else nullcontext():
                return function(*args, **kwargs)
        finally:
            _core.set_requests(before)

    return again
