"""Marks of a split model's tensors, kept through ``model.to(...)`` and the like.

torch may put a new tensor into a module, or exchange the tensor behind a parameter (with
``torch.__future__.set_swap_module_params_on_conversion``, or for some devices): its attributes
and hooks are gone then.  Its cut and its gradients' factor must stay.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from smp.marks import SCALES, set_class
from smp.pytorch import patches
from smp.slicing.slices import MARKS
from smp.slicing.split_parameters import SplitParameter


def is_scaled(parameter: Tensor) -> bool:
    """Whether its gradients have their factor."""
    return hasattr(parameter, SCALES)


def note_factor_of_module(parameter: Tensor) -> None:
    """Its module multiplies its gradients."""
    setattr(parameter, SCALES, None)


def multiply_gradients(parameter: Tensor, factor: float) -> None:
    """Multiply its gradients, from the next backward on, also if it is converted before."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)  # a hook is for a parameter in training, now or later
    parameter.register_hook(lambda gradient: gradient * factor)
    parameter.requires_grad_(not frozen)
    setattr(parameter, SCALES, factor)


@contextlib.contextmanager
def kept(module: nn.Module) -> Iterator[None]:
    """A block around a conversion of the module's own parameters and buffers."""
    registers: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    before = [
        (register, name, tensor, type(tensor), ours)
        for register in registers
        for name, tensor in register.items()
        if tensor is not None and (ours := _ours(tensor))
    ]
    for _, _, tensor, kind, _ in before:
        if kind is SplitParameter:
            set_class(tensor, nn.Parameter)  # torch makes another like it, perhaps
    yield
    for register, name, old, kind, ours in before:
        tensor = register[name]
        if kind is SplitParameter and type(tensor) is nn.Parameter:
            set_class(tensor, kind)
        if _ours(tensor).keys() >= ours.keys():
            continue  # the same, with other data
        for mark, value in ours.items():
            setattr(tensor, mark, value)
        if tensor is old:
            attach_hooks(tensor)
        elif ours.get(SCALES) is not None:
            multiply_gradients(tensor, ours[SCALES])


def attach_hooks(parameter: Tensor) -> None:
    """Have a parameter's listed hooks be called again.

    After an exchange of the tensor behind it, torch still lists them, and later ones, but calls
    none.
    """
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(parameter, kind, None)
        if hooks is not None:
            setattr(parameter, kind, hooks)


def _ours(tensor: Tensor) -> dict[str, Any]:
    attributes = tensor.__dict__
    return {name: attributes[name] for name in (*MARKS, SCALES) if name in attributes}


def keep_from_now(root: nn.Module) -> None:
    """Have all conversions keep the marks: a script converts the wrapped module, too.

    Args:
        root: of a split model.
    """
    for module in root.modules():
        patches.conversions_of_split_modules.while_alive(module, _keeping)


def _keeping(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``nn.Module._apply`` with the marks kept."""

    @functools.wraps(plain)
    def _apply(
        self: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        with kept(self):
            return plain(self, fn, *args, **kwargs)

    return _apply
