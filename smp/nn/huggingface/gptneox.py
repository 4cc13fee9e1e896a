"""GPT-NeoX: attention by heads, whose q, k, v lie side by side; the MLP by its channels."""

from functools import partial

from smp import not_built
from smp.tensor_parallel import plans

IN_PLACE = {
    "GPTNeoXAttention": partial(
        plans.attention,
        columns=("query_key_value",),
        row="dense",
        head="head_size",
        packed=3,
        # Flash attention finds packed sequences by position_ids.
        samples=("hidden_states", "position_embeddings", "position_ids"),
    ),
    "GPTNeoXMLP": partial(plans.mlp, column="dense_h_to_4h", row="dense_4h_to_h"),
}

translate_state_dict_to_hf_gptneox = not_built.function("translate_state_dict_to_hf_gptneox")
translate_hf_state_dict_to_smdistributed_gptneox = not_built.function(
    "translate_hf_state_dict_to_smdistributed_gptneox"
)
