"""Warnings, each once, of things that do not go along with a call to another rank.

A rank runs requests in threads of its own, and tensors cross as their values.  Modes of torch,
values of context variables and attributes of tensors stay behind.  No code can tell whether
this matters: hence a warning, not an error.
"""

import warnings

import torch
from torch import Tensor
from torch.utils import _device

_CHECKPOINT = "torch.utils.checkpoint"  # a remote call need not see its hooks
# Torch's own attributes of a tensor, as of nn.Buffer.
_OF_TORCH = ("persistent",)

_said: set[tuple[str, str]] = set()
_dtype = torch.get_default_dtype()  # at the step's begin

_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def forget() -> None:
    """A job begins."""
    _said.clear()


def begin_step() -> None:
    """Remember the state of the process that all ranks have."""
    global _dtype
    _dtype = torch.get_default_dtype()


def warn_of_modes(where: str, what: str = "module", cached: bool = False) -> None:
    """Modes of this thread are around a remote call, or a step.

    Args:
        where: the module's path, or the step function's name.
        what: "module" or "step function".
        cached: a block of ``parametrize.cached()`` is around it, too.
    """
    default = torch.get_default_dtype()
    if not (
        cached
        or default is not _dtype
        or _function_modes()
        or _dispatch_modes()
        or _saved_hooks(True)
    ):
        return
    modes = [torch._C._get_function_stack_at(i) for i in range(_function_modes())]
    modes += [torch._C._get_dispatch_stack_at(i) for i in range(_dispatch_modes())]
    names = {type(mode).__name__ for mode in modes if type(mode) is not _device.DeviceContext}
    hooks = _saved_hooks(True)
    if hooks is not None and getattr(hooks[0], "__module__", "") != _CHECKPOINT:
        names.add("saved_tensors_hooks")
    if cached:
        names.add("parametrize.cached()")
    if default is not _dtype:
        names.add(f"torch.set_default_dtype({default})")
    runs = "on another rank" if what == "module" else "in threads of its own, on all ranks,"
    for name in sorted(names):
        _say(
            name,
            where,
            f"{name} is active around {what} '{where}', which runs {runs} without it: enter it "
            "inside of the modules whose operators it is for",
        )


def warn_of_draws(modules: tuple[str, ...]) -> None:
    """The step draws random numbers from generators without a stream for each microbatch.

    Args:
        modules: the generators'.
    """
    for name in modules:
        _say(
            f"draws from {name}",
            "",
            f"the step draws random numbers from '{name}': each rank has its own, and several "
            "microbatches draw in the order in which they come by, so that results depend on "
            "timing; draw with torch, or with a generator that is an attribute of the drawing "
            "module",
        )


def warn_of_variable(path: str, name: str) -> None:
    """A context variable has a value from the step, without a way along."""
    _say(
        f"variable {name}",
        "",
        f"the context variable {name!r} was set in the step, and module '{path}', on another "
        "rank, does not see it (lists, dicts and sets go along): pass the value as an argument",
    )


def warn_of_tensor(path: str, tensor: Tensor) -> None:
    """A crossing tensor is of a subclass, or has attributes of its own."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        kind = type(tensor).__name__
        _say(
            kind,
            path,
            f"a {kind} crosses ranks with a call of module '{path}', and arrives as a "
            "torch.Tensor with its values: its class and attributes stay behind",
        )
        return
    names = [n for n in vars(tensor) if not n.startswith("_") and n not in _OF_TORCH]
    for name in names:
        _say(
            f"attribute {name}",
            path,
            f"a tensor crosses ranks with a call of module '{path}', and its attribute "
            f"{name!r} stays behind: pass it as an argument, or return it",
        )


def warn_of_change_in_backward(path: str, kind: str) -> None:
    """A module has changed its buffers in the second forward of a checkpoint."""
    _say(
        "change in a backward",
        path,
        f"module '{path}' ({kind}) changes its buffers once more in backward, as it is in an "
        "activation checkpoint: their values depend on the time of that, beside the forwards "
        "of later microbatches; leave the module out of the checkpoint",
    )


def warn_of_attribute(path: str, name: str, text: str) -> None:
    """Code reads an attribute set by the module on its own rank."""
    _say(f"attribute {name}", path, text)


def warn_of_hook(path: str, returned: bool) -> None:
    """A module has registered a hook on a tensor shared with its caller elsewhere.

    Args:
        returned: the tensor is its result; else an argument.
    """
    if returned:
        _say(
            "hook on a result",
            path,
            f"module '{path}' calls register_hook on a tensor that it returns to another rank: "
            "hooks that its caller registers there run before it; register all of them on one "
            "side",
        )
        return
    _say(
        "hook",
        path,
        f"module '{path}' calls register_hook on an argument that came from another rank: the "
        "hook sees the gradient of what this module did with it, not of what its caller does, "
        "too; register it where the tensor was made",
    )


def _say(what: str, where: str, text: str) -> None:
    if (what, where) not in _said:
        _said.add((what, where))
        warnings.warn(f"smp: {text}", stacklevel=3)
