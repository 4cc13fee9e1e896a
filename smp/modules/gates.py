"""Modules called by microbatches in order, as found in ``smp/partitioning/turns.py``."""

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from smp import _core, marks
from smp.modules import live_models, stand_ins
from smp.pytorch import call_warnings


class Turns(NamedTuple):
    """The gates of a model.  Each is a number among them; by path of the module.

    Attributes:
        expected: by gate, the number of a microbatch's passes; 0: unknown, so a microbatch is
            past at the end of its forward.
        modules: the gate passed by each call of the module.
        reads: names of buffers and attributes changed by the module, and read by other code
            while it does not run.  The other code passes the module's gate, too.
        carried: by name of an attribute left by one microbatch to the next: its gate, and the
            number of reads and sets until a call of the module is past it; 0: at its end.
        own: names of attributes set anew by each microbatch.
        restored: names of those with their former value again at its end.
    """

    expected: list[int]
    modules: dict[str, int]
    reads: dict[str, tuple[str, ...]]
    carried: dict[str, dict[str, tuple[int, int]]]
    own: dict[str, tuple[str, ...]]
    restored: dict[str, tuple[str, ...]]


class _Passing(threading.local):
    """The gates around this thread."""

    def __init__(self) -> None:
        self.gates: set[int] = set()


_passing = _Passing()


def through_gate(module: nn.Module, call: Callable, *args: Any, **kwargs: Any) -> Any:
    """Make the call at the microbatch's turn at the module's gate, if the module has one.

    Running statistics change in training alone: an evaluation goes past the gate, unless the
    same step also trains the module.
    """
    gate = module.__dict__.get(marks.GATE)
    if gate is None or gate in _passing.gates:
        return call(*args, **kwargs)
    switches = marks.SWITCHES in module.__dict__
    if not switches and changes_nothing(module):
        return call(*args, **kwargs)
    modes = [(one, one.training) for one in module.modules()] if switches else []
    if not _core.await_turn(gate):
        return _again(module, call, args, kwargs)
    for one, training in modes:  # another microbatch may have switched them meanwhile
        one.training = training
    _passing.gates.add(gate)
    try:
        return call(*args, **kwargs)
    finally:
        _passing.gates.discard(gate)
        _core.left(gate)


def _again(module: nn.Module, call: Callable, args: tuple, kwargs: dict) -> Any:
    """Make the call outside of any order: in a backward, as a checkpoint does, or outside of a
    step.  Later microbatches' calls may be before it, so a change of buffers is said.
    """
    if not _core.current() or not _core.in_backward():
        return call(*args, **kwargs)
    before = _versions(module)
    try:
        return call(*args, **kwargs)
    finally:  # a checkpoint leaves by an exception
        if _versions(module) != before and (home := live_models.home_of(module)) is not None:
            call_warnings.warn_of_change_in_backward(home[0], type(module).__name__)


def _versions(module: nn.Module) -> list[tuple[int, int]]:
    """The identity of each of its buffers, and the buffer's count of changes."""
    return [(id(b), b._version) for b in module._buffers.values() if b is not None]


def changes_nothing(module: nn.Module) -> bool:
    """Whether the module is one of torch's norms, in evaluation."""
    return not module.training and hasattr(module, "track_running_stats")


def gated(cls: type[nn.Module]) -> dict[str, Any]:
    """The methods of a class like ``cls``, called by microbatches in order.  Each call changes
    values read by the next one's, or by other modules.

    Hooks before the forward change values, too (spectral norm), and the forward may be called
    alone.
    """

    def __call__(self, *args, **kwargs):
        return through_gate(self, cls.__call__, self, *args, **kwargs)

    @functools.wraps(cls.forward)
    def forward(self, *args, **kwargs):
        return through_gate(self, cls.forward, self, *args, **kwargs)

    def __setattr__(self, name, value):
        if name == "training" and _core.current() is not None and value != self.training:
            self.__dict__[marks.SWITCHES] = True  # for good
        cls.__setattr__(self, name, value)

    return {
        "__call__": __call__,
        "forward": forward,
        "__setattr__": __setattr__,
        **stand_ins.of_original(cls),
    }


class _ReadOutside(stand_ins.WatchedAttribute):
    """A buffer or an attribute changed by its module, and read by other code in a step."""

    def before_read(self, module: nn.Module) -> None:
        _await_turn_at(module)


def _await_turn_at(module: nn.Module) -> None:
    """Wait for the microbatch's turn there, unless this thread's task is in a call of it."""
    gate = module.__dict__.get(marks.GATE)
    if gate is not None and gate not in _passing.gates and not changes_nothing(module):
        _core.await_turn(gate)


@functools.cache
def read_outside(names: tuple[str, ...]) -> stand_ins.Members:
    """The methods of a class like that of a module with a gate, for reads by other code.  A
    microbatch that reads has its turn there, and is past at the end of its forward.
    """

    def members(cls: type[nn.Module]) -> dict[str, Any]:
        def __setattr__(self, name, value):
            if name in names and _core.current() is not None:
                _await_turn_at(self)
            cls.__setattr__(self, name, value)

        return {
            "__setattr__": __setattr__,
            **stand_ins.of_original(cls),
            **{name: _ReadOutside() for name in names},
        }

    return members
