"""Mixtral: attention as Llama's, each expert by its channels.

A token is routed on its own rank, so the router is like any whole module.  Every tp_rank has
a slice of every expert, and gets the tokens of all.
"""

import math
from typing import Any

from smp.nn.huggingface.llama import split_attention
from smp.slicing.slices import Slices
from smp.tensor_parallel import group
from smp.tensor_parallel.rows.linears import keep_slice
from smp.tensor_parallel.rows.regions import Region, make_region

# Channels of an expert kept together where there are enough: torch's grouped_mm wants rows of a
# multiple of 16 bytes.
_ALIGNED = 16


def split_experts(experts: Any, path: str) -> None:
    """A ``MixtralExperts``: gate|up by their outputs, down by its inputs."""
    channels, parts = experts.intermediate_dim, group.size()
    unit = math.gcd(channels, _ALIGNED)
    if channels // unit < parts:
        unit = 1
    keep_slice(experts, "gate_up_proj", Slices.even(1, 2 * channels, parts, unit, blocks=2))
    down = Slices.even(2, channels, parts, unit)
    keep_slice(experts, "down_proj", down)
    experts.intermediate_dim = down.local_size(group.rank())
    region = Region(samples=("hidden_states", "top_k_index", "top_k_weights"), sums=True)
    make_region(experts, region, path)


IN_PLACE = {"MixtralAttention": split_attention, "MixtralExperts": split_experts}
