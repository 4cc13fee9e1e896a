"""``generate`` of a split model, on different samples: a rank goes on until all have finished.

A rank with all sequences ended takes part in the others' collectives until theirs have, too, as
transformers does for other kinds of sharding (``synced_gpus``).

A split attention's cache has the samples of all tp_ranks, but code to reorder or crop a cache
knows its own samples alone: such searches are refused.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smp.marks import set_class
from smp.modules.stand_ins import stand_in
from smp.tensor_parallel import group
from smp.tensor_parallel.rows.regions import takes_cache

# Methods that rearrange or crop caches; those without a first "_" are of transformers before
# 4.39.
_REARRANGE = {
    "beam search": ("_beam_search", "beam_search", "beam_sample"),
    "beam search in groups": ("_group_beam_search", "group_beam_search"),
    "beam search with constraints": ("_constrained_beam_search", "constrained_beam_search"),
    "contrastive search": ("_contrastive_search", "contrastive_search"),
    "assisted decoding": ("_assisted_decoding", "assisted_decoding"),
}


def wait_for_peers(model: nn.Module) -> None:
    """Have ``generate`` of the models of transformers in it end on all tp_ranks together."""
    if group.same_samples():
        return  # they end together
    for module in model.modules():
        if hasattr(type(module), "_has_unfinished_sequences"):
            set_class(module, stand_in(type(module), _together))


def _together(cls: Any) -> dict[str, Any]:
    @functools.wraps(cls.generate)
    def generate(self: Any, *args: Any, synced_gpus: bool | None = None, **kwargs: Any) -> Any:
        return cls.generate(self, *args, synced_gpus=True, **kwargs)

    def _has_unfinished_sequences(
        self: Any, this_peer_finished: bool, synced_gpus: bool, device: torch.device
    ) -> bool:
        before = group.call_of("generate")
        try:
            everyones = group.gather_numbers([this_peer_finished])
        finally:
            group.call_of(before)
        return not all(done for (done,) in everyones)

    members = {"generate": generate, "_has_unfinished_sequences": _has_unfinished_sequences}
    for search, names in _REARRANGE.items():
        for name in names:
            if hasattr(cls, name):
                members[name] = _without_cache(getattr(cls, name), search)
    return members


def _without_cache(method: Callable[..., Any], search: str) -> Callable[..., Any]:
    """A search of transformers, refused where it rearranges a split attention's cache."""

    @functools.wraps(method)
    def searched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with_cache = kwargs.get("use_cache") is not False  # None: as the model's forward likes
        if with_cache and any(map(takes_cache, self.modules())):
            raise NotImplementedError(
                f"smp: generate() of {type(self).__name__} by {search} rearranges caches, and "
                "those of its split attentions have the samples of all ranks of the TP_GROUP: "
                "pass use_cache=False (which assisted decoding does not have), or num_beams=1 "
                "and no assistant"
            )
        return method(self, *args, **kwargs)

    return searched
