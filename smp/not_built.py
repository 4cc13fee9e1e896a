"""Names of the interface for features not built.

Scripts import them even without a use: so they exist, and raise when used.
"""

from collections.abc import Callable
from typing import Any, NoReturn


def function(name: str) -> Callable[..., NoReturn]:
    """A function that raises NotImplementedError when called."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: it is not built yet")

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__doc__ = "Not built yet: raises NotImplementedError."
    return refuse
