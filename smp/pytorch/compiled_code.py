"""``torch.compile`` and smp: functions called as they are, and wrappers of modules.

Compiled code breaks off before a function of ours with messages to other ranks, calls it, and
goes on behind it.  Without dynamo nothing is compiled; it is not loaded here.
"""

import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import nn

_WRAPPED = "_orig_mod"  # the name of the module inside one of torch.compile's

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_traced(reason: str, and_all_below: bool = True) -> Callable[[_Function], _Function]:
    """Decorate a function that compiled code calls, and does not look into.

    As ``torch.compiler.disable()``, but without its wrapper, slower than a small operation, and
    without the import of torch.compile's own modules.

    Args:
        reason: torch's answer to questions about the break.
        and_all_below: nor into the function's callees.
    """

    def decorated(given: Any) -> Any:
        function = getattr(given, "__func__", given)
        function._torchdynamo_disable = True
        function._torchdynamo_disable_msg = reason
        frames = torch._C._dynamo.eval_frame
        if hasattr(frames, "set_code_exec_strategy"):  # torch's own name, subject to change
            action = frames._FrameAction
            below = action.SKIP if and_all_below else action.DEFAULT
            strategy = frames._FrameExecStrategy(action.SKIP, below)
            frames.set_code_exec_strategy(function.__code__, strategy)
        return given

    return decorated


def run_as_written() -> ExitStack:
    """In the block hooks and operators of compiled modules are seen; nothing is compiled."""
    stack = ExitStack()
    if "torch._dynamo" in sys.modules:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global")
    return stack


class Lifted:
    """Wrappers of ``torch.compile(module)``, taken off their modules for now.

    Args:
        root: may be one.

    Attributes:
        root: of the same modules without them.
    """

    def __init__(self, root: nn.Module) -> None:
        self._outermost = root
        self._places: list[tuple[nn.Module, str, Any]] = []  # holder, name, former value
        self.root = _inside(root)
        for holder in list(self.root.modules()):
            for name, child in holder._modules.items():
                if child is not None and (inside := _inside(child)) is not child:
                    self._places.append((holder, name, child))
                    holder._modules[name] = inside

    def put_back(self, root: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> nn.Module:
        """Wrap the modules in their places now.

        Args:
            root: the root of now.
            replaced: by module, the one in its place.

        Returns:
            the root, in its wrapper if it had one.
        """
        for holder, name, wrapper in self._places:
            inside = _inside(wrapper)
            now = replaced.get(inside, inside)
            if holder._modules.get(name) is now:
                holder._modules[name] = _wrapped_around(now, wrapper)
        if self._outermost is self.root or self._outermost is root:
            return root
        return _wrapped_around(root, self._outermost)


def _inside(module: nn.Module) -> nn.Module:
    """The module inside one of ``torch.compile``; any other one itself."""
    compiler = sys.modules.get("torch._dynamo")
    while compiler is not None and isinstance(module, compiler.OptimizedModule):
        module = module._modules[_WRAPPED]
    return module


def _wrapped_around(module: nn.Module, wrapper: Any) -> nn.Module:
    setattr(wrapper, _WRAPPED, module)
    wrapper._initialize()  # it calls a method of the module's former class
    return wrapper
