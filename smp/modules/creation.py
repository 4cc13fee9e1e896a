"""Hearing of modules created while a context is open.

Copies and unpickled modules count as created.
"""

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from smp.pytorch import patches

_lock = threading.Lock()  # guards the next one
_listeners: Counter[Callable[[nn.Module], None]] = Counter()  # open contexts, in all threads


@contextlib.contextmanager
def noticed(listener: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call a listener with each module created meanwhile, in any thread.

    Args:
        listener: called once for a module, for any number of contexts.
    """
    with _lock:
        _listeners[listener] += 1
    try:
        # __init__ makes a module; copies and pickles go through __setstate__.
        with patches.creation.in_block(_noticing, _noticing):
            yield
    finally:
        with _lock:
            _listeners[listener] -= 1
            if not _listeners[listener]:
                del _listeners[listener]


def _noticing(method: Any) -> Any:
    """``method`` of nn.Module, telling the listeners."""

    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        for listener in list(_listeners):
            listener(self)
        return result

    return call
