"""All changes of PyTorch for the whole process, each with its reason and its end.

A change is in force while an object or a block needs it.  Without models and blocks, PyTorch is
as it was.  A room with a need gives its functions to the change.  smp changes PyTorch nowhere
else: ``tests/test_source.py`` looks for that.  The backend ``smddp``, registered with
``torch.distributed``, stays.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.optim.optimizer import _foreach_supported_types

from smp.torch_versions import CHECKPOINT_GENERATOR

# From PyTorch's own, to the one in its place.
Wrapper = Callable[[Any], Any]
TakeOut = Callable[[], None]

_lock = threading.RLock()  # a finalizer may run at any point of its own thread


class Place(Protocol):
    """A place in PyTorch."""

    def put(self, given: Any) -> TakeOut:
        """Put something there, and return a function to take it out again."""


class _Method:
    """A method, perhaps with the wrappers of several changes."""

    def __init__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name
        self._wrappers: list[Wrapper] = []

    def put(self, wrapper: Wrapper) -> TakeOut:
        if not self._wrappers:
            self._begin()
        self._wrappers.append(wrapper)
        self._compose()

        def take_out() -> None:
            self._wrappers.remove(wrapper)
            self._compose()
            # A script that patched it since keeps its own; ours does nothing any more.
            if not self._wrappers and getattr(self._owner, self._name) is self._ours:
                setattr(self._owner, self._name, self._plain)

        return take_out

    def _begin(self) -> None:
        self._plain = plain = getattr(self._owner, self._name)
        self._target = target = SimpleNamespace(function=plain)

        @wraps(plain)
        def method(*args: Any, **kwargs: Any) -> Any:
            return target.function(*args, **kwargs)

        self._ours = method
        setattr(self._owner, self._name, method)

    def _compose(self) -> None:
        function = self._plain
        for wrapper in self._wrappers:
            function = wrapper(function)
        self._target.function = function


class _Attribute:
    """Any other attribute: a property, a class method, one of Python's own, a function."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name

    def put(self, wrapper: Wrapper) -> TakeOut:
        owner, name = self._owner, self._name
        inherited = name not in vars(owner)
        plain = getattr(owner, name) if inherited else vars(owner)[name]
        setattr(owner, name, wrapper(plain))
        return lambda: delattr(owner, name) if inherited else setattr(owner, name, plain)


class _Inside:
    """The function inside one of PyTorch's calls without grad.

    The outer function stays the same object: scripts may have imported it by name.
    """

    def __init__(self, outer: Any) -> None:
        self._outer = outer

    def put(self, wrapper: Wrapper) -> TakeOut:
        plain = self._outer.__wrapped__
        (inside,) = (cell for cell in self._outer.__closure__ if cell.cell_contents is plain)
        inside.cell_contents = wrapper(plain)

        def take_out() -> None:
            inside.cell_contents = plain

        return take_out


class _Hook:
    """A hook on all modules, by PyTorch's own way to register one."""

    def __init__(self, register: Callable[..., Any], **options: Any) -> None:
        self._register, self._options = register, options

    def put(self, hook: Callable[..., Any]) -> TakeOut:
        return self._register(hook, **self._options).remove


class _Member:
    """An item at the end of a list."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def put(self, item: Any) -> TakeOut:
        self._items.append(item)
        return lambda: self._items.remove(item)


class Change:
    """One change, in force while something needs it.

    Args:
        places: of PyTorch.  Each is given a `Wrapper`; or a hook, or an item of a list.
    """

    def __init__(self, *places: Place) -> None:
        self._places = places
        self._given: tuple[Any, ...] = ()
        self._needs: dict[Any, Any] = {}
        self._lasts: Callable[[], bool] | None = None
        self._in_force = ExitStack()
        self.is_in_force = False
        self._settles = False

    def while_alive(self, thing: object, *given: Any) -> None:
        """Be in force while an object lives.

        Args:
            given: for each place.
        """
        if id(thing) not in self._needs:
            end = weakref.finalize(thing, self._no_need, id(thing))
            end.atexit = False
            self._need(id(thing), end, given)

    def no_longer_for(self, thing: object) -> None:
        """The object does not need it any more."""
        if id(thing) in self._needs:
            self._needs[id(thing)].detach()
            self._no_need(id(thing))

    @contextmanager
    def in_block(self, *given: Any, lasts: Callable[[], bool] | None = None) -> Iterator[None]:
        """Be in force in a block.

        Args:
            given: for each place.
            lasts: asked when no object and no block is left: whether the change stays.
        """
        self._lasts = lasts
        key = object()
        self._need(key, None, given)
        try:
            yield
        finally:
            self._no_need(key)

    def end(self) -> None:
        """No object needs it any more."""
        for end in self._needs.values():
            if end is not None:
                end.detach()
        self._needs.clear()
        self._settle()

    def _need(self, key: Any, end: Any, given: tuple[Any, ...]) -> None:
        with _lock:
            self._given = given
            self._needs[key] = end
            self._settle()

    def _no_need(self, key: Any) -> None:
        self._needs.pop(key, None)
        self._settle()

    def _is_needed(self) -> bool:
        return bool(self._needs) or (self._lasts is not None and self._lasts())

    def _settle(self) -> None:
        """Put or take out.  A finalizer in the middle of this leaves its part to the loop."""
        with _lock:
            while not self._settles and self._is_needed() != self.is_in_force:
                self._settles = True
                try:
                    if self.is_in_force:
                        self._in_force.close()
                        self._given = ()
                    else:
                        for place, given in zip(self._places, self._given, strict=True):
                            self._in_force.callback(place.put(given))
                    self.is_in_force = not self.is_in_force
                finally:
                    self._settles = False


_APPLY = _Method(nn.Module, "_apply")

# Reason: `smp.delay_param_initialization` makes tensors whose conversions wait, too.
# End: all modules made in that block have their values or are gone, and so have its tensors.
delayed_conversions = Change(_APPLY)

# Reason: PyTorch puts new tensors into a converted module, without the marks of a split one.
# End: no module of a split model lives.  With a pipeline the core has those of dead models,
# too, until the next model's first step or `smp.shutdown`.
conversions_of_split_modules = Change(_APPLY)

# Reason: PyTorch's optimizers update tensors of listed classes together; split parameters, too.
# End: as of `conversions_of_split_modules`.
foreach_types = Change(_Member(_foreach_supported_types))

# Reason: likewise master weights, and slices of parameters.
# End: no optimizer with some lives.
foreach_masters = Change(_Member(_foreach_supported_types))
foreach_slices = Change(_Member(_foreach_supported_types))

# Reason: modules made in `smp.partition` or `smp.tensor_parallelism` are pinned, or marked;
# those made in `smp.delay_param_initialization` have tensors without values.
# End: of the block.
creation = Change(_Method(nn.Module, "__init__"), _Method(nn.Module, "__setstate__"))

# Reason: forward hooks registered after the partition keep microbatches apart.
# End: no `smp.DistributedModel` lives, or `smp.shutdown`.
late_hooks = Change(
    _Method(nn.Module, "register_forward_pre_hook"), _Method(nn.Module, "register_forward_hook")
)

# Reason: modules and parameters put into a partitioned or split model are refused.
# End: as of `late_hooks`.
late_modules = Change(
    _Hook(torch_module.register_module_module_registration_hook),
    _Hook(torch_module.register_module_parameter_registration_hook),
)

# Reason: a rank sees the gradients of its own part of a model alone.
# End: as of `late_hooks`.
norms = Change(_Inside(nn.utils.clip_grad_norm_), _Inside(nn.utils.get_total_norm))
scalers = Change(
    _Method(torch.amp.GradScaler, "_check_scale_growth_tracker"),
    _Method(torch.amp.GradScaler, "_unscale_grads_"),
)

# Reason: gradients of calls made again by a checkpoint are added up in the first calls' order.
# End: as of `late_hooks`.
checkpoints = Change(_Attribute(torch.utils.checkpoint, CHECKPOINT_GENERATOR))

# Reason: microbatches are in blocks with cached parametrizations at the same time.
# End: as of `late_hooks`.
cached_parametrizations = Change(_Inside(parametrize.cached))

# Reason: a module's sharded parameters are gathered for its call.
# End: of the step, or of the call of the model.
gathered_calls = Change(
    _Hook(torch_module.register_module_forward_pre_hook),
    _Hook(torch_module.register_module_forward_hook, always_call=True),
)

# Reason: the first step's run shows the uses of modules and parameters.
# End: of this run.
traced_calls = Change(
    _Hook(torch_module.register_module_forward_pre_hook),
    _Hook(torch_module.register_module_forward_hook, with_kwargs=True),
)
traced_registrations = Change(
    _Hook(torch_module.register_module_buffer_registration_hook),
    _Hook(torch_module.register_module_module_registration_hook),
)
traced_functions = Change(_Attribute(torch.autograd.Function, "apply"))
traced_attributes = Change(
    _Attribute(nn.Module, "__getattribute__"), _Attribute(nn.Module, "__setattr__")
)
traced_grad_flags = Change(
    _Attribute(torch.Tensor, "requires_grad"), _Attribute(torch.Tensor, "requires_grad_")
)
traced_data = Change(_Attribute(torch.Tensor, "data"))
traced_tensor_hooks = Change(_Attribute(torch.Tensor, "register_hook"))
