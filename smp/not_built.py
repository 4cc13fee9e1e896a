"""Names of the interface whose feature is not built.

Scripts import them whether they use them or not; so they exist, and say so when used.
"""

from collections.abc import Callable
from typing import Any, NoReturn


def function(name: str, feature: str = "tensor parallelism") -> Callable[..., NoReturn]:
    """A function that raises NotImplementedError when it is called."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: {feature} is not built yet")

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__doc__ = f"Not built yet ({feature}): raises NotImplementedError."
    return refuse


def class_of(base: type, name: str, feature: str = "tensor parallelism") -> type:
    """A class that nothing is an instance of: making one raises NotImplementedError."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: {feature} is not built yet")

    doc = f"Not built yet ({feature}): raises NotImplementedError."
    return type(name.rpartition(".")[2], (base,), {"__init__": refuse, "__doc__": doc})
