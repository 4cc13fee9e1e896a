"""ViT: attention by heads, the MLP by its channels."""

from typing import Any

from smp.tensor_parallel import group
from smp.tensor_parallel.linears import cut_inputs, cut_outputs
from smp.tensor_parallel.regions import Region, make_region


def split_attention(attention: Any, path: str) -> None:
    """A ``ViTAttention``."""
    head = attention.head_dim
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
        cut_outputs(linear, unit=head)
    cut_inputs(attention.o_proj, f"{path}.o_proj", unit=head)
    attention.num_attention_heads = group.shares(attention.num_attention_heads)[group.rank()]
    region = Region(samples=("hidden_states",), masks=(("attention_mask", "hidden_states"),))
    make_region(attention, region, path)


def split_mlp(mlp: Any, path: str) -> None:
    """A ``ViTMLP``."""
    cut_outputs(mlp.fc1)
    cut_inputs(mlp.fc2, f"{path}.fc2")
    make_region(mlp, Region(samples=("hidden_states",)), path)


IN_PLACE = {"ViTAttention": split_attention, "ViTMLP": split_mlp}
