"""GPT-J: attention by heads, the MLP beside it by its channels."""

from functools import partial

from smp import not_built
from smp.tensor_parallel import plans

IN_PLACE = {
    "GPTJAttention": partial(
        plans.attention,
        columns=("q_proj", "k_proj", "v_proj"),
        row="out_proj",
        head="head_dim",
        heads="num_attention_heads",
        samples=("hidden_states", "position_ids"),
    ),
    "GPTJMLP": partial(plans.mlp, column="fc_in", row="fc_out"),
}

translate_state_dict_to_hf_gptj = not_built.function("translate_state_dict_to_hf_gptj")
translate_hf_state_dict_to_smdistributed_gptj = not_built.function(
    "translate_hf_state_dict_to_smdistributed_gptj"
)
translate_hf_gptj_state_dict_to_smdistributed = not_built.function(
    "translate_hf_gptj_state_dict_to_smdistributed"
)
