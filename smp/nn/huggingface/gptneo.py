"""GPT-Neo: attention by heads, global or in a window, and the MLP by its channels."""

from functools import partial

from smp import not_built
from smp.tensor_parallel import plans

IN_PLACE = {
    "GPTNeoSelfAttention": partial(
        plans.attention,
        columns=("q_proj", "k_proj", "v_proj"),
        row="out_proj",
        head="head_dim",
        heads="num_heads",
    ),
    "GPTNeoMLP": partial(plans.mlp, column="c_fc", row="c_proj"),
}

translate_state_dict_to_hf_gptneo = not_built.function("translate_state_dict_to_hf_gptneo")
translate_hf_state_dict_to_smdistributed_gptneo = not_built.function(
    "translate_hf_state_dict_to_smdistributed_gptneo"
)
translate_hf_gptneo_state_dict_to_smdistributed = not_built.function(
    "translate_hf_gptneo_state_dict_to_smdistributed"
)
