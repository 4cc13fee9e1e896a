"""Classes with a distributed form for their place.

``smp.tp_register`` and ``smp.tp_register_with_module`` are for users' own classes.  An
instance's arguments are recorded from then on, for its distributed form to be made alike.
"""

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from smp.marks import MADE_WITH, OWN_HOOKS, RECORDS, REPLACES, set_class
from smp.modules import delayed_init
from smp.modules.conversion import give_data
from smp.modules.pins import hand_on_pin
from smp.modules.stand_ins import users_class
from smp.slicing.slices import slices_of, whole_shape
from smp.state_mod import state
from smp.tensor_parallel import group
from smp.tensor_parallel.splits import marking, replaced_parameters

Hook = Callable[..., Any]
Translate = Callable[..., dict[str, Any]]  # from one state dict to another
TranslateFunctions = tuple[Translate, Translate]  # from ours to the plain module's, and back


class BothWays(NamedTuple):
    """Between the state dicts of a module and of its replacement.

    Both functions take dicts with some of the names; of tensors that belong together they take
    all or none.
    """

    to_ours: Translate
    to_plain: Translate


class Registration(NamedTuple):
    """The replacement of a class."""

    dist_module: type[nn.Module]
    init_hook: Hook | None
    forward_hook: Hook | None
    return_hook: Hook | None
    translation: BothWays | None


class Known(NamedTuple):
    """A class registered by scripts, with more known of it than in their call.

    Attributes:
        dist_module: the scripts' choice for it.
        made_with: from an instance to the arguments of its ``__init__``, or None.
        translation: between its state dicts and those of ``dist_module``.
    """

    dist_module: type[nn.Module]
    made_with: Callable[[Any], tuple[tuple, dict[str, Any]] | None]
    translation: BothWays


_registered: dict[type[nn.Module], Registration] = {}


def tp_register(
    dist_module: type[nn.Module],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
    translate_functions: TranslateFunctions | None = None,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Decorate a module class: ``dist_module`` takes its place under tensor parallelism.

    See `tp_register_with_module` for more.

    Args:
        dist_module: a subclass of ``smp.nn.DistributedModule``.
        init_hook: from the arguments of the class's ``__init__`` to ``(args, kwargs)`` of
            ``dist_module``'s; None: they are the same.
        forward_hook: likewise for ``forward``.
        return_hook: from the result of ``dist_module`` to the class's.
        translate_functions: from the (whole) state dict of a ``dist_module`` to that of an
            instance, and back.

    Returns:
        a decorator; it returns the class.

    Raises:
        TypeError: a hook's parameters (names, order, defaults) are not those of its method, or
            one of the classes is none of modules.
    """

    def decorate(module_cls: type[nn.Module]) -> type[nn.Module]:
        tp_register_with_module(
            module_cls, dist_module, init_hook, forward_hook, return_hook, translate_functions
        )
        return module_cls

    return decorate


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[nn.Module],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
    translate_functions: TranslateFunctions | None = None,
) -> None:
    """Have ``dist_module`` take the place of a class's marked instances.

    Its parameters and buffers have the instance's values, tp_rank 0's: those of the same names,
    or the results of ``translate_functions``.  Instances made before the registration stay as
    they are.

    Args:
        module_cls: the user's class.
        dist_module: a subclass of ``smp.nn.DistributedModule``.
        init_hook: from the arguments of the class's ``__init__`` to ``(args, kwargs)`` of
            ``dist_module``'s, or to None for an instance to leave whole; None: they are the
            same.
        forward_hook: likewise for ``forward``.
        return_hook: from the result of ``dist_module`` to the class's.
        translate_functions: from the (whole) state dict of a ``dist_module`` to that of an
            instance, and back.  Values left out by the second are dropped, and those of
            ``dist_module`` not made by it stay as constructed.  Both take dicts with some of
            the names, and raise ``KeyError`` for a name whose counterparts are missing.  Full
            checkpoints and states of optimizers are translated by them, too.

    Raises:
        TypeError: a hook's parameters (names, order, defaults) are not those of its method;
            ``return_hook`` does not take one argument; or one of the classes is none of
            modules.

    Source: the SageMaker paper, appendix I.4.
    """
    for name, cls in (("module_cls", module_cls), ("dist_module", dist_module)):
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"smp.tp_register: {name} is a class of modules, not {cls!r}")
    _check_hook("init_hook", init_hook, module_cls, "__init__")
    _check_hook("forward_hook", forward_hook, module_cls, "forward")
    _check_return_hook(return_hook, module_cls)
    translation = None
    if translate_functions is not None:
        to_plain, to_ours = translate_functions
        translation = BothWays(to_ours, to_plain)
    _registered[module_cls] = Registration(
        dist_module, init_hook, forward_hook, return_hook, translation
    )
    _record_arguments(module_cls)


def _check_hook(kind: str, hook: Hook | None, cls: type[nn.Module], method: str) -> None:
    if hook is None:
        return
    _check_callable(kind, hook, cls)
    wanted = list(inspect.signature(getattr(cls, method)).parameters.values())[1:]
    given = list(inspect.signature(hook).parameters.values())
    if _in_words(wanted) != _in_words(given):
        raise TypeError(
            f"smp.tp_register: {kind} of {cls.__name__} takes {_in_words(given)}; it gets the "
            f"arguments of {cls.__name__}.{method} and must take the same: {_in_words(wanted)}"
        )


def _check_return_hook(hook: Hook | None, cls: type[nn.Module]) -> None:
    if hook is None:
        return
    _check_callable("return_hook", hook, cls)
    try:
        signature = inspect.signature(hook)
    except ValueError:
        return  # built in, and does not say
    try:
        signature.bind(None)
    except TypeError:
        raise TypeError(
            f"smp.tp_register: return_hook of {cls.__name__} takes "
            f"{_in_words(signature.parameters.values())}; it gets one argument, what the "
            "distributed module returns"
        ) from None


def _check_callable(kind: str, hook: object, cls: type[nn.Module]) -> None:
    if not callable(hook):
        raise TypeError(
            f"smp.tp_register: {kind} of {cls.__name__} is a function or None, not {hook!r}"
        )


def _in_words(parameters: Iterable[inspect.Parameter]) -> str:
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return "(" + ", ".join(map(str, plain)) + ")"


def _record_arguments(cls: type[nn.Module]) -> None:
    init = cls.__init__
    if getattr(init, RECORDS, None) is cls:
        return

    @functools.wraps(init)
    def recording(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if type(self) is cls:
            object.__setattr__(self, MADE_WITH, (args, kwargs))
        init(self, *args, **kwargs)
        if type(self) is cls:
            object.__setattr__(self, MADE_WITH, (args, kwargs))
            object.__setattr__(self, OWN_HOOKS, set(_hooks_in(self)))

    setattr(recording, RECORDS, cls)
    cls.__init__ = recording  # type: ignore[method-assign]


def registration_of(module: nn.Module) -> Registration | None:
    """The registered replacement for a module of this very class."""
    return _registered.get(users_class(type(module)))


def replace(
    module: nn.Module,
    path: str,
    known: Known | None = None,
) -> nn.Module | str:
    """The distributed form of a registered module; or the reason for none.

    It has the module's weights with their dtype and device, its hooks and its pin.  Collective
    over the TP_GROUP.

    Args:
        module: of a registered class.
        path: of it.
        known: prior knowledge of its class.

    Raises:
        as `take_over`.
    """
    entry = _registered[users_class(type(module))]
    made_with = module.__dict__.get(MADE_WITH)
    if made_with is None and known is not None:
        made_with = known.made_with(module)
    if made_with is None:
        return f"it was made before {type(module).__name__} was registered"
    args, kwargs = made_with
    if entry.init_hook is not None:
        if (called := entry.init_hook(*args, **kwargs)) is None:
            return "init_hook returned None"
        args, kwargs = _checked(called, "init_hook", type(module))
    config = marking.configuration(module) or {}
    accepted = inspect.signature(entry.dist_module.__init__).parameters
    chosen = {key: value for key, value in config.items() if key in accepted}
    distributed = entry.dist_module(*args, **{**kwargs, **chosen})
    translation = entry.translation
    if translation is None and known is not None and isinstance(distributed, known.dist_module):
        translation = known.translation
    take_over(
        module,
        distributed,
        path,
        translation,
        "give it there the same name and shape, or give smp.tp_register translate_functions, "
        "which say what becomes of it",
        may_be_new=entry.translation is not None,
    )
    if entry.forward_hook is not None or entry.return_hook is not None:
        set_class(distributed, _adapted(type(distributed), type(module), entry))
    return distributed


def _checked(given: Any, kind: str, cls: type) -> tuple[tuple, dict[str, Any]]:
    """The result of a hook."""
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], dict)):
        raise TypeError(
            f"smp.tp_register: {kind} of {cls.__name__} returns (args, kwargs), a tuple and a "
            f"dict, not {given!r}"
        )
    return tuple(given[0]), given[1]


def _adapted(
    base: type[nn.Module], original: type[nn.Module], entry: Registration
) -> type[nn.Module]:
    """``base`` with the arguments and results of the replaced class."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if entry.forward_hook is not None:
            called = entry.forward_hook(*args, **kwargs)
            args, kwargs = _checked(called, "forward_hook", original)
        result = base.forward(self, *args, **kwargs)
        return result if entry.return_hook is None else entry.return_hook(result)

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


def take_over(
    original: nn.Module,
    distributed: nn.Module,
    path: str,
    translation: BothWays | None,
    instead: str,
    may_be_new: bool = False,
) -> None:
    """Have a distributed module stand where the original stood.

    Args:
        original: a part of the model, or all of it.
        distributed: just made.
        path: of the original.
        translation: between their state dicts; None: names and shapes are the same.
        instead: the user's way out where values would be lost.
        may_be_new: whether ``distributed`` may have values without a source in the original.

    Raises:
        NotImplementedError: the user's hooks on modules or parameters inside of it.
        PartitionError: a module inside of it is pinned elsewhere.
        ValueError: values would be lost, or left without a source; but a warning where the two
            have nothing in common.
    """
    to_ours, to_plain = translation or BothWays(dict, dict)
    saved = to_ours(_saved(original))
    wrong = _lost(saved, distributed) + ([] if may_be_new else _new(saved, distributed))
    if wrong:
        kind = type(original).__name__
        where = f"'{path}' of class {kind}" if path else kind
        said = f"smp: {where} is to be replaced by {type(distributed).__name__}: "
        names = {name for name, _ in distributed.named_parameters()}
        if translation is not None or saved.keys() & names:
            raise ValueError(f"{said}{'; '.join(wrong)}: {instead}")
        # A class of a structure of its own, in a script that loads its weights afterwards or
        # trains from the beginning.
        warnings.warn(
            f"{said}they have no parameter's name in common, so that it begins with new "
            f"values: {instead}",
            stacklevel=2,
        )
    _keep_weights(distributed, to_ours(dict(original.named_buffers())) | saved)
    if translation is not None:
        back = _with_buffers(to_plain, _dropped(original, translation))
        state.module_manager.translate_functions.append(
            (_inside(path, back), _inside(path, to_ours))
        )
    if not wrong:
        distributed.__dict__[REPLACES] = BothWays(to_ours, to_plain)
    _keep_hooks(original, distributed, path)
    hand_on_pin(original, distributed, path)
    distributed.train(original.training)
    replaced_parameters.note(original, distributed, path)


def _saved(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a state dict; tied ones once."""
    out: dict[str, Tensor] = dict(module.named_parameters())
    for path, inner in module.named_modules():
        for name, buffer in inner.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in inner._non_persistent_buffers_set:
                out[name] = buffer
    return out


def _kind_of(value: Tensor) -> str:
    return "parameter" if isinstance(value, nn.Parameter) else "buffer"


def _lost(saved: Mapping[str, Tensor], distributed: nn.Module) -> list[str]:
    """The original's values without a place, by our names, in words."""
    # A tied one has one name: it cannot have the values of two.
    ours: dict[str, Tensor] = dict(distributed.named_parameters())
    ours |= dict(distributed.named_buffers())
    out = []
    for name, value in saved.items():
        if name not in ours:
            out.append(f"parameter or buffer '{name}' would be lost")
        elif list(value.shape) != (there := whole_shape(ours[name])):
            out.append(f"'{name}' has shape {there} there, not {list(value.shape)}")
    return out


def _new(saved: Mapping[str, Tensor], distributed: nn.Module) -> list[str]:
    """The distributed module's values without one of the original's, in words."""
    return [
        f"its {_kind_of(value)} '{name}' would get no value"
        for name, value in _saved(distributed).items()
        if name not in saved
    ]


def _keep_weights(distributed: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Give the distributed form the original's values."""
    tensors = [*distributed.named_parameters(), *distributed.named_buffers()]
    floating = [tensor for tensor in given.values() if tensor.is_floating_point()]
    with torch.no_grad():
        for name, tensor in tensors:
            whole = given.get(name)
            like = next((t for t in (whole, *floating) if t is not None), tensor)
            dtype = like.dtype if tensor.is_floating_point() else tensor.dtype
            if whole is None or list(whole.shape) != whole_shape(tensor):
                give_data(tensor, _converted(tensor.data, like.device, dtype))
                continue
            own = functools.partial(group.own_slice, slices_of(tensor))
            data = delayed_init.applied(own, whole.detach())
            give_data(tensor, _converted(data, like.device, dtype))
            if isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(whole.requires_grad)


def _converted(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    # A step to another device would make delayed values now.
    converted = tensor.to(dtype)
    return converted if converted.device == device else converted.to(device)


def _inside(path: str, translate: Translate) -> Translate:
    """``translate`` for a state dict's entries of the module at a path."""
    before = f"{path}." if path else ""

    def translated(state_dict: Mapping[str, Any]) -> dict[str, Any]:
        inside = {
            name.removeprefix(before): value
            for name, value in state_dict.items()
            if name.startswith(before)
        }
        out = {name: v for name, v in state_dict.items() if not name.startswith(before)}
        return {**out, **{before + name: v for name, v in translate(inside).items()}}

    return translated


def _dropped(original: nn.Module, translation: BothWays) -> dict[str, Tensor]:
    """The original's buffers that the distributed module lacks; of equal ones one tensor."""
    whole = original.state_dict()
    without = {name: torch.empty_like(t, device="meta") for name, t in whole.items()}
    left = whole.keys() - translation.to_plain(translation.to_ours(without)).keys()
    left -= {name for name, t in whole.items() if t.is_meta}  # its value is not known yet
    different: list[Tensor] = []
    out = {}
    for name in sorted(left):
        value = next((t for t in different if _are_equal(t, whole[name])), None)
        if value is None:
            value = delayed_init.value_of(whole[name])
            different.append(value)
        out[name] = value
    return out


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _with_buffers(to_plain: Translate, buffers: Mapping[str, Tensor]) -> Translate:
    """Add the original's buffers to the translation."""

    def translated(state_dict: Mapping[str, Any]) -> dict[str, Any]:
        out = to_plain(state_dict)
        return {**buffers, **out} if out else out

    return translated


_TABLES = [name for name in vars(nn.Module()) if "_hooks" in name]  # and how each is called
_HOOKS = [name for name in _TABLES if name.endswith("_hooks")]
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")

HookOf = tuple[str, str, int]  # path in the module, kind, number


def _hooks_in(module: nn.Module) -> Iterator[HookOf]:
    for path, inner in module.named_modules():
        for kind in _HOOKS:
            yield from ((path, kind, number) for number in inner.__dict__[kind])
    for path, parameter in module.named_parameters():
        for kind in _OF_PARAMETERS:
            yield from ((path, kind, number) for number in getattr(parameter, kind) or ())


def _keep_hooks(original: nn.Module, distributed: nn.Module, path: str) -> None:
    """Give the distributed form the user's hooks on the original.

    Those of the class's own ``__init__`` are the original's, no longer called.
    """
    own = original.__dict__.get(OWN_HOOKS, ())
    for inside, kind, number in list(_hooks_in(original)):
        if (inside, kind, number) in own:
            if not inside:
                del original.__dict__[kind][number]
        elif inside:
            raise NotImplementedError(
                f"smp: '{path}.{inside}' has hooks ({kind.strip('_')}), but all of '{path}' is "
                f"replaced by one {type(distributed).__name__}: register them after "
                "smp.DistributedModel, on what is in that"
            )
    for name in _TABLES:
        # The same dicts: the user's handles find their hooks there.
        hooks = original.__dict__[name]
        for hook in hooks.values():
            if getattr(hook, "with_module", False):  # torch's wrapper holds the module
                hook.module = weakref.ref(distributed)
        hooks.update(distributed.__dict__[name])
        distributed.__dict__[name] = hooks
    if original._is_full_backward_hook is not None:
        distributed._is_full_backward_hook = original._is_full_backward_hook
