"""``torch.func``'s transforms, such as ``vmap``, that a script has under way."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def outside_of_transforms() -> AbstractContextManager[Any]:
    """A block that no transform sees."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    return temporarily_clear_interpreter_stack()
