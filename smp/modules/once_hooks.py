"""Hooks of a whole model, each called once: after its partition, or after its next step."""

from collections import OrderedDict
from collections.abc import Callable

from torch import nn
from torch.utils.hooks import RemovableHandle

from smp.state_mod import state


class OnceHooks:
    """Functions ``hook(model, optimizer)``, in order of their registration."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, Callable] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def register(self, hook: Callable) -> RemovableHandle:
        """Have it called at the next `run`; its handle takes it back before."""
        handle = RemovableHandle(self._waiting)
        self._waiting[handle.id] = hook
        return handle

    def run(self, model: nn.Module) -> None:
        """Call and forget the hooks; those registered meanwhile wait for the next time."""
        hooks, self._waiting = self._waiting, OrderedDict()
        for hook in list(hooks.values()):
            hook(model, state.optimizer)
