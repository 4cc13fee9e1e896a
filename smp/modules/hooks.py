"""Module hooks around a remote call.

Pre-hooks run where the module runs (weight norm changes parameters there); forward and
full backward hooks run where it is called (they write into the caller's objects).
"""

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import BackwardHook

from smp import _core
from smp.marks import GATE
from smp.modules import live_models
from smp.modules.gates import through_gate


def serve(function: Callable, args: tuple, kwargs: dict | None) -> Any:
    """Call a module without hooks on its owner, from a frame of Python."""
    return function(*args, **(kwargs or {}))


def serve_hooked(
    module: nn.Module, args: tuple, kwargs: dict | None, bare: bool, inputs: bool
) -> Any:
    """Run the pre-hooks (unless ``bare``) and the forward of a module, on its owner.

    ``bare`` and ``inputs``: the pre-hooks alone, for a later ``bare`` call.

    Returns:
        the output; with ``inputs`` the pair of it and of ``(args, kwargs)`` as pre-hooks
        replaced them, or None where they did not.  The pre-hooks alone return
        ``(args, kwargs)``, or None where they cannot run alone: microbatches pass the module in
        order, in one call of it.
    """
    if bare and inputs:
        if GATE in module.__dict__:
            return None
        before = dict(module.__dict__)
        args, kwargs = _run_pre_hooks(module, args, kwargs or {})
        _left[id(module), _core.current()] = {
            name: value
            for name, value in module.__dict__.items()
            if isinstance(value, Tensor)
            and value.requires_grad
            and before.get(name) is not value
        }
        return args, kwargs
    return through_gate(module, _run_hooked, module, args, kwargs or {}, bare, inputs)


# By id of the module and microbatch: weights made by its pre-hooks for its forward (weight
# norm).  Other microbatches come in between.
_left: dict[tuple[int, int | None], dict[str, Tensor]] = {}


def finish() -> None:
    """The step is over."""
    _left.clear()


def _run_hooked(module: nn.Module, args: tuple, kwargs: dict, bare: bool, inputs: bool) -> Any:
    given = args, kwargs
    if bare:
        module.__dict__.update(_left.pop((id(module), _core.current()), {}))
    else:
        args, kwargs = _run_pre_hooks(module, args, kwargs)
    output = module.forward(*args, **kwargs)
    if not inputs:
        return output
    replaced = args is not given[0] or kwargs is not given[1]
    return output, (args, kwargs) if replaced else None


def _run_pre_hooks(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments as left by them."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if key in module._forward_pre_hooks_with_kwargs:
            changed = hook(module, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        else:
            changed = hook(module, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    return args, kwargs


def call_hooked(module: nn.Module, args: tuple, kwargs: dict | None) -> Any:
    """Call a module of another rank with its forward and backward hooks, on the caller.

    Raises:
        NotImplementedError: hooks beyond this function's means.
    """
    backward_hooks, non_full = module._get_backward_hooks()
    pre_hooks = module._get_backward_pre_hooks()
    if non_full:
        raise NotImplementedError(
            f"smp: register_backward_hook on a {type(module).__name__} of another rank; "
            "use register_full_backward_hook"
        )
    full = (
        BackwardHook(module, backward_hooks, pre_hooks) if backward_hooks or pre_hooks else None
    )
    output = None
    ran: set[int] = set()
    try:
        bare = False
        if backward_hooks and module._forward_pre_hooks:
            alone = _core.call_remote(module, args, kwargs, True, True)
            if alone is not None:
                bare = True
                args, kwargs = alone
        if full is not None:
            args = full.setup_input_hook(args)
        if bare:
            output = _core.call_remote(module, args, kwargs, True, False)
        elif not (module._forward_hooks or backward_hooks):
            output = _core.call_remote(module, args, kwargs, False, False)
        else:
            output, replaced = _core.call_remote(module, args, kwargs, False, True)
            if replaced is not None:
                if backward_hooks:
                    _refuse_replaced(module)
                args, kwargs = replaced
        for key, hook in list(module._forward_hooks.items()):
            ran.add(key)
            changed = _run_forward_hook(module, key, hook, args, kwargs, output)
            if changed is not None:
                output = changed
        if full is not None:
            output = full.setup_output_hook(output)
        return output
    except Exception:  # as in nn.Module: none for Ctrl-C, nor where the step has ended
        _run_always_called(module, ran, args, kwargs, output)
        raise


def _run_always_called(
    module: nn.Module, ran: set[int], args: tuple, kwargs: dict | None, output: Any
) -> None:
    """The forward hooks with ``always_call=True`` not yet run, when a call fails.

    An exception of theirs is a warning: the call raises its own.
    """
    for key, hook in list(module._forward_hooks.items()):
        if key not in module._forward_hooks_always_called or key in ran:
            continue
        try:
            changed = _run_forward_hook(module, key, hook, args, kwargs, output)
        except Exception as error:
            warnings.warn(
                "smp: a forward hook with always_call=True raised an exception, beside "
                f"that of the forward: {error}",
                stacklevel=3,
            )
        else:
            output = output if changed is None else changed


def _run_forward_hook(
    module: nn.Module, key: int, hook: Any, args: tuple, kwargs: dict | None, output: Any
) -> Any:
    if key in module._forward_hooks_with_kwargs:
        return hook(module, args, kwargs or {}, output)
    return hook(module, args, output)


def _refuse_replaced(module: nn.Module) -> None:
    """Refuse a pre-hook's new arguments there: their gradients are not to be had here."""
    home = live_models.home_of(module)
    path, owner = home or (type(module).__name__, "another rank")
    raise NotImplementedError(
        f"smp: module '{path}', on pp_rank {owner}, has a full backward hook, and a forward "
        "pre-hook that replaces its arguments, whose gradients stay there, as its buffers "
        "change or the pre-hook is not on all ranks: replace them in the forward, or place the "
        "module and its caller together with smp.set_partition"
    )
