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

_lock = threading.Lock()  # guards the two below, and the two methods of nn.Module
_listeners: Counter[Callable[[nn.Module], None]] = Counter()  # open contexts, in all threads
_plain_methods: dict[str, Any] = {}
_noticing_methods: dict[str, Any] = {}


@contextlib.contextmanager
def noticed(listener: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call a listener with each module created meanwhile, in any thread.

    Args:
        listener: called once for a module, for any number of contexts.
    """
    with _lock:
        if not _listeners:
            _patch()
        _listeners[listener] += 1
    try:
        yield
    finally:
        with _lock:
            _listeners[listener] -= 1
            if not _listeners[listener]:
                del _listeners[listener]
            if not _listeners:
                _restore()


def _noticing(method: Any) -> Any:
    """``method`` of nn.Module, telling the listeners."""

    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        for listener in list(_listeners):
            listener(self)
        return result

    return call


def _patch() -> None:
    # __init__ makes a module; copies and pickles go through __setstate__.
    for name in ("__init__", "__setstate__"):
        _plain_methods[name] = getattr(nn.Module, name)
        _noticing_methods[name] = _noticing(_plain_methods[name])
        setattr(nn.Module, name, _noticing_methods[name])


def _restore() -> None:
    for name, noticing in _noticing_methods.items():
        # A script that patched it since keeps its own; ours does nothing any more.
        if getattr(nn.Module, name) is noticing:
            setattr(nn.Module, name, _plain_methods[name])
