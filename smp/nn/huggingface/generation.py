"""``generate`` of a split model, on different samples: a rank goes on until all have finished.

Whose sequences have ended takes part in the others' collectives until theirs have, too, as
transformers does for other kinds of sharding (``synced_gpus``).
"""

import functools
from typing import Any

import torch
from torch import nn

from smp.modules.stand_ins import stand_in
from smp.tensor_parallel import group


def wait_for_peers(model: nn.Module) -> None:
    """Have ``generate`` of the models of transformers in it end on all tp_ranks together."""
    if group.same_samples():
        return  # they end together
    for module in model.modules():
        if hasattr(type(module), "_has_unfinished_sequences"):
            module.__class__ = stand_in(type(module), _together)


def _together(cls: Any) -> dict[str, Any]:
    @functools.wraps(cls.generate)
    def generate(self: Any, *args: Any, synced_gpus: bool | None = None, **kwargs: Any) -> Any:
        return cls.generate(self, *args, synced_gpus=True, **kwargs)

    def _has_unfinished_sequences(
        self: Any, this_peer_finished: bool, synced_gpus: bool, device: torch.device
    ) -> bool:
        before = group.call_of("generate")
        try:
            everyones = group.gather_numbers([this_peer_finished], device)
        finally:
            group.call_of(before)
        return not all(done for (done,) in everyones)

    return {"generate": generate, "_has_unfinished_sequences": _has_unfinished_sequences}
