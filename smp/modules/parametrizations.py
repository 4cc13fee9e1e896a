"""``torch.nn.utils.parametrize.cached()``: each microbatch has its own values.

PyTorch keeps the values of such a block in one table of the process, until no thread is in a
block.  While one microbatch waits in its block for another rank, another enters its own.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn.utils import parametrize

from smp.modules import live_models
from smp.pytorch import patches


class _Values(threading.local):
    """Those of this thread's blocks, in the place of PyTorch's table."""

    def __init__(self) -> None:
        self.blocks = 0
        self.by_tensor: dict[Any, Any] = {}

    def get(self, key: Any) -> Any:
        """The value, if this thread is in a block and has it."""
        return self.by_tensor.get(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.blocks:
            self.by_tensor[key] = value


_values = _Values()
_table: Any = _values


def keep_apart() -> None:
    """From now on a block's values are those of its thread, while a model of now lives."""
    live_models.change_while_any_lives(patches.cached_parametrizations, _keeping_apart)


def forget() -> None:
    """Keep nothing apart any more."""
    patches.cached_parametrizations.end()


def begin_step() -> bool:
    """The script's own block around a step has no values in there; whether there is one."""
    if not parametrize._cache_enabled:
        return False
    parametrize._cache = _table
    return True


def are_left_behind(path: str) -> bool:
    """Whether this thread is in such a block and calls a parametrized module elsewhere.

    Args:
        path: the module's, or "a.0 to 7" of several children of ``a``.
    """
    if not _values.blocks:
        return False
    first, _, last = path.partition(" to ")
    above = first.rpartition(".")[0] if last else first
    within = f"{above}." if above else ""
    return any(
        parametrize.is_parametrized(module)
        for model in live_models.living()
        for name, module in model.module.named_modules()
        if name == above or name.startswith(within)
    )


def _keeping_apart(plain: Callable) -> Callable:
    def cached() -> Iterator[None]:
        blocks = plain()
        next(blocks)
        parametrize._cache = _table
        _values.blocks += 1
        try:
            yield
        finally:
            _values.blocks -= 1
            if not _values.blocks:
                _values.by_tensor.clear()
            next(blocks, None)

    return cached
