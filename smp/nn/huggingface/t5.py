"""T5: attention and its relative positions by heads, the feed-forward part by its channels."""

from typing import Any

from smp.compat.translation import as_it_is
from smp.slicing.slices import Slices
from smp.tensor_parallel import group
from smp.tensor_parallel.rows.linears import cut_inputs, cut_outputs, keep_slice
from smp.tensor_parallel.rows.regions import Region, make_region


def split_attention(attention: Any, path: str) -> None:
    """A ``T5Attention``.

    The ``position_bias`` from the first layer to the others is that of this tp_rank's heads,
    for the gathered positions: it stays as it is.
    """
    head = attention.key_value_proj_dim
    for linear in (attention.q, attention.k, attention.v):
        cut_outputs(linear, unit=head)
    cut_inputs(attention.o, f"{path}.o", unit=head)
    slices = Slices.even(1, attention.n_heads, group.size())
    attention.n_heads = slices.local_size(group.rank())
    attention.inner_dim = attention.n_heads * head
    if attention.has_relative_attention_bias:
        keep_slice(attention.relative_attention_bias, "weight", slices)
        attention.relative_attention_bias.embedding_dim = attention.n_heads
    of_encoder = path.endswith("EncDecAttention")
    masked = "key_value_states" if of_encoder else "hidden_states"
    region = Region(
        samples=("hidden_states", "key_value_states"),
        masks=(("mask", masked),),
    )
    make_region(attention, region, path)


def split_feed_forward(layer: Any, path: str) -> None:
    """A ``T5DenseActDense`` or ``T5DenseGatedActDense``."""
    for name, linear in layer.named_children():
        if name.startswith("wi"):
            cut_outputs(linear)
    cut_inputs(layer.wo, f"{path}.wo")
    make_region(layer, Region(samples=("hidden_states",)), path)


IN_PLACE = {
    "T5Attention": split_attention,
    "T5DenseActDense": split_feed_forward,
    "T5DenseGatedActDense": split_feed_forward,
}

# Split where they stand, and without another form.
translate_hf_state_dict_to_smdistributed_t5 = as_it_is
translate_state_dict_to_hf_t5 = as_it_is
