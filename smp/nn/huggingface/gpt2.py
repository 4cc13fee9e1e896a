"""GPT-2: attention by heads, the MLP by its channels."""

from functools import partial
from typing import Any

from smp import not_built
from smp.tensor_parallel import plans
from smp.tensor_parallel.linears import cut_outputs


def split_attention(attention: Any, path: str) -> None:
    """A ``GPT2Attention``: q|k|v, or of cross-attention k|v and q by itself."""
    cross = attention.is_cross_attention
    if cross:
        cut_outputs(attention.q_attn, unit=attention.head_dim)
    plans.attention(
        attention,
        path,
        columns=("c_attn",),
        row="c_proj",
        head="head_dim",
        heads="num_heads",
        widths=("split_size",),
        blocks=2 if cross else 3,
        samples=("hidden_states", "encoder_hidden_states"),
        masks=(
            ("attention_mask", "hidden_states"),
            ("encoder_attention_mask", "encoder_hidden_states"),
        ),
    )


IN_PLACE = {
    "GPT2Attention": split_attention,
    "GPT2MLP": partial(plans.mlp, column="c_fc", row="c_proj"),
}

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
