"""GPT-2: attention by heads, the MLP by its channels."""

from typing import Any

from smp import not_built
from smp.tensor_parallel import group
from smp.tensor_parallel.linears import cut_inputs, cut_outputs
from smp.tensor_parallel.regions import Region, make_region


def split_attention(attention: Any, path: str) -> None:
    """A ``GPT2Attention``: q|k|v (of cross-attention k|v, and q by itself), then the output."""
    head = attention.head_dim
    if attention.is_cross_attention:
        cut_outputs(attention.q_attn, unit=head)
        cut_outputs(attention.c_attn, unit=head, blocks=2)
    else:
        cut_outputs(attention.c_attn, unit=head, blocks=3)
    cut_inputs(attention.c_proj, f"{path}.c_proj", unit=head)
    attention.num_heads = group.shares(attention.num_heads)[group.rank()]
    attention.split_size = attention.num_heads * head
    region = Region(
        samples=("hidden_states", "encoder_hidden_states"),
        masks=(
            ("attention_mask", "hidden_states"),
            ("encoder_attention_mask", "encoder_hidden_states"),
        ),
        causal=attention.is_causal,
    )
    make_region(attention, region, path)


def split_mlp(mlp: Any, path: str) -> None:
    """A ``GPT2MLP``."""
    cut_outputs(mlp.c_fc)
    cut_inputs(mlp.c_proj, f"{path}.c_proj")
    make_region(mlp, Region(samples=("hidden_states",)), path)


IN_PLACE = {"GPT2Attention": split_attention, "GPT2MLP": split_mlp}

translate_state_dict_to_hf_gpt2 = not_built.function("translate_state_dict_to_hf_gpt2")
translate_hf_state_dict_to_smdistributed_gpt2 = not_built.function(
    "translate_hf_state_dict_to_smdistributed_gpt2"
)
translate_hf_state_dict_to_smdistributed = not_built.function(
    "translate_hf_state_dict_to_smdistributed"
)
get_hf_gpt2_transformer_layer_hooks = not_built.function("get_hf_gpt2_transformer_layer_hooks")
translate_hf_block_state_dict_to_smdistributed = not_built.function(
    "translate_hf_block_state_dict_to_smdistributed"
)
translate_layer_state_dict_to_hf_gpt2_block = not_built.function(
    "translate_layer_state_dict_to_hf_gpt2_block"
)
