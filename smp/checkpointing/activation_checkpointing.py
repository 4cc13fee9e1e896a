"""``smp.set_activation_checkpointing``: forward again in backward instead of keeping.

A checkpointed module gets a class of its own, like its own but for ``forward``.  The new one
runs under ``torch.utils.checkpoint`` on the module's rank.  Its calls to modules of other ranks
are checkpointed with it.  Children of an ``nn.Sequential`` are checkpointed by their owners.
"""

import functools
import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from smp import _core
from smp.checkpointing import offloading
from smp.marks import CHECKPOINTED, CHECKPOINTING, RUNS, set_class
from smp.modules import inner_module, live_models, remote_modules, stand_ins
from smp.pytorch import accelerator
from smp.state_mod import state
from smp.tensor_parallel.rows import regions
from smp.tensor_parallel.splits import in_place


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """Have a module of the model checkpointed.  To be called before the first step.

    Args:
        module: any module; of an ``nn.Sequential`` or ``nn.ModuleList`` the children, by
            ``strategy``.
        preserve_rng_state: draw the same random numbers again.
        pack_args_as_tuple: a Sequential called with several arguments passes them to its first
            child as one tuple.
        strategy: ``"each"`` child by itself, ``"contiguous"``: consecutive ones of one rank
            together, ``"group_N"``: N consecutive ones together; the latter two for a
            Sequential, whose groups begin anew where the children's rank changes.

    Raises:
        TypeError, ValueError: not a module, or another strategy.

    Source: SageMaker Python SDK documentation, ``smp.set_activation_checkpointing``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            "smp.set_activation_checkpointing takes a torch.nn.Module, got a "
            f"{type(module).__name__}"
        )
    module = inner_module.wrapped_of(module)
    group_size(strategy)
    if isinstance(module, nn.ModuleList):
        if strategy != "each":
            raise ValueError(
                f"smp: strategy {strategy!r} needs an nn.Sequential, which calls its children "
                "itself; an nn.ModuleList takes 'each'"
            )
        for child in module:
            set_activation_checkpointing(child, preserve_rng_state, pack_args_as_tuple)
        return
    module.__dict__[CHECKPOINTING] = (preserve_rng_state, pack_args_as_tuple, strategy)
    if not hasattr(type(module), CHECKPOINTED):
        set_class(module, stand_ins.stand_in(type(module), checkpointed))


def lift(root: nn.Module) -> dict[nn.Module, tuple]:
    """Have a model's modules not be checkpointed for now.

    Returns:
        the checkpointed ones, with the arguments of `set_activation_checkpointing`.
    """
    out = {}
    for module in root.modules():
        plain = vars(type(module)).get(CHECKPOINTED)
        if plain is not None:
            set_class(module, plain)
            out[module] = module.__dict__.pop(CHECKPOINTING)
    return out


def group_size(strategy: str) -> int | None:
    """The number of a Sequential's children that go together; None: those of one rank.

    Raises:
        ValueError: no such strategy.
    """
    if strategy == "contiguous":
        return None
    found = re.fullmatch(r"group_([1-9]\d*)", strategy)
    if found is None and strategy != "each":
        raise ValueError(
            f"smp: strategy {strategy!r}: it is 'each', 'contiguous' or 'group_N', as 'group_2'"
        )
    return int(found[1]) if found else 1


def checkpointed(cls: type[nn.Module]) -> dict[str, Any]:
    """The methods of a class like ``cls`` with a checkpointed forward.

    Copies are checkpointed, too; a pickle holds a module as it was before.
    """

    @functools.wraps(cls.forward)
    def forward(self, *args, **kwargs):
        preserve, pack, strategy = self.__dict__[CHECKPOINTING]
        if isinstance(self, nn.Sequential) and cls.forward is nn.Sequential.forward:
            if pack and len(args) > 1:
                args = (args,)
            return run_sequential(self, *args, preserve=preserve, strategy=strategy)
        return run(functools.partial(cls.forward, self), preserve, args, kwargs)

    def again(module: nn.Module, copied: nn.Module) -> nn.Module:
        if type(copied) is not stand_ins.users_class(cls):  # the class's own idea of a copy
            return copied
        copied.__dict__[CHECKPOINTING] = module.__dict__[CHECKPOINTING]
        set_class(copied, stand_ins.stand_in(cls, checkpointed))
        return copied

    def __copy__(self):
        return again(self, stand_ins.shallow_copy(self))

    def __deepcopy__(self, memo):
        return again(self, stand_ins.deep_copy(self, memo))

    return {
        "forward": forward,
        "__copy__": __copy__,
        "__deepcopy__": __deepcopy__,
        CHECKPOINTED: cls,
    }


def run(function: Callable, preserve: bool, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call the function, keeping only its inputs for backward."""
    if state.is_tracing or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    function = regions.found_again(function)
    checkpoint = functools.partial(
        torch_checkpoint, use_reentrant=False, preserve_rng_state=preserve
    )
    offloads = offloading.of_this_job()
    if offloads is None:
        return checkpoint(*_with_device(function, args), **kwargs)
    function, tensors = offloading.with_tensors_apart(function, args, kwargs)
    with saved_tensors_hooks(offloads.pack, offloads.unpack):
        return checkpoint(*_with_device(function, tensors))


def _with_device(function: Callable, args: Sequence) -> tuple:
    """A call, with an empty tensor of the accelerator in front of its arguments.

    A checkpoint keeps random states and autocast of the devices of positional tensors alone.
    """
    device = accelerator.in_use()
    if device is None:
        return function, *args

    def call(_: Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call, torch.empty(0, device=device), *args


def run_sequential(
    sequential: nn.Sequential, value: Any, *, preserve: bool, strategy: str
) -> Any:
    """Run the children in groups, each checkpointed by itself on its owner's rank.

    Groups begin anew with each run of children of one rank.
    """
    groups = preserve, group_size(strategy)
    for number, children in _runs(sequential):
        if number is None or remote_modules.has_hooks_of_caller(children):
            value = run_groups(children, value, groups)
        else:
            value = _core.call_entry(number, (value, groups))
    return value


def run_groups(children: list[nn.Module], value: Any, groups: remote_modules.Groups) -> Any:
    """Run the children here, in groups, each checkpointed by itself."""
    preserve, size = groups
    size = size or len(children)
    for at in range(0, len(children), size):
        group = children[at : at + size]
        value = run(functools.partial(_run_all, group), preserve, (value,), {})
    return value


def _runs(sequential: nn.Sequential) -> list[tuple[int | None, list[nn.Module]]]:
    """Consecutive children of one rank, each with the number of its entry, if it has one."""
    runs = sequential.__dict__.get(RUNS)
    if runs is not None and not state.is_tracing:
        return runs
    children = list(sequential)
    if not any(map(remote_modules.is_remote, children)):
        return [(None, children)]
    return [(None, list(of_rank)) for _, of_rank in groupby(children, _owner)]


def _owner(module: nn.Module) -> int | None:
    """The pp_rank of a module; None where nothing is partitioned."""
    home = live_models.home_of(module)
    return None if home is None else home[1]


def _run_all(children: list[nn.Module], value: Any) -> Any:
    for child in children:
        value = child(value)
    return value


def split_in_place(model: nn.Module) -> tuple[nn.Module, list[in_place.Outcome]]:
    """`in_place.split`, with the checkpointed modules' settings on the modules in their places.

    Returns:
        the model, and the outcome for each marked module.
    """
    checkpointed = lift(model)
    done = in_place.split(model)
    for module, arguments in checkpointed.items():
        set_activation_checkpointing(done.replaced.get(module, module), *arguments)
    return done.model, done.outcomes
