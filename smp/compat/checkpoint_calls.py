"""Activation checkpointing by call, in place of ``torch.utils.checkpoint``.

``smdistributed.modelparallel.torch.patches.checkpoint`` is this module; the work is in
``smp.checkpointing.activation_checkpointing``.
"""

from typing import Any

from torch import nn

from smp.checkpointing import activation_checkpointing


def checkpoint(
    module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any
) -> Any:
    """Call a module, keeping only its inputs for backward.

    Source: SageMaker Python SDK documentation, ``patches.checkpoint.checkpoint``.
    """
    return activation_checkpointing.run(module, preserve_rng_state, args, kwargs)


def checkpoint_sequential(
    sequential_module: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Call an ``nn.Sequential``, its children checkpointed in groups.

    Args:
        input: its input; a tuple is passed as it is.
        strategy: as for ``smp.set_activation_checkpointing``.

    Raises:
        TypeError, ValueError: not a Sequential, or another strategy.

    Source: SageMaker Python SDK documentation, ``patches.checkpoint.checkpoint_sequential``.
    """
    if not isinstance(sequential_module, nn.Sequential):
        raise TypeError(
            "checkpoint_sequential takes an nn.Sequential, got a "
            f"{type(sequential_module).__name__}"
        )
    return activation_checkpointing.run_sequential(
        sequential_module, input, preserve=preserve_rng_state, strategy=strategy
    )
