"""Names of the interface whose feature is not built.

Scripts import them whether they use them or not; so they exist, and say so when used.
"""

from collections.abc import Callable
from typing import Any, NoReturn


def function(name: str) -> Callable[..., NoReturn]:
    """A function that raises NotImplementedError when it is called."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: it is not built yet")

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__doc__ = "Not built yet: raises NotImplementedError."
    return refuse
