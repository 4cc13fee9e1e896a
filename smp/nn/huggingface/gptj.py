"""GPT-J: attention by heads, the MLP beside it by its channels."""

from functools import partial
from typing import Any

from smp.compat import forms
from smp.compat.forms import Form
from smp.compat.translation import Translation, functions_of, part
from smp.nn.transformer.lm_head import DistributedTransformerLMHead
from smp.tensor_parallel.splits import plans

IN_PLACE = {
    "GPTJAttention": partial(
        plans.attention,
        columns=("q_proj", "k_proj", "v_proj"),
        row="out_proj",
        head="head_dim",
        heads="num_attention_heads",
        samples=("hidden_states", "position_ids", "position_embeddings"),
    ),
    "GPTJMLP": partial(plans.mlp, column="fc_in", row="fc_out"),
}

NAMES = Translation(
    layers="h",
    parts={
        "ln_1": part("attention.pre_layernorm"),
        "attn.q_proj": part("attention.query"),
        "attn.k_proj": part("attention.key"),
        "attn.v_proj": part("attention.value"),
        "attn.out_proj": part("attention.dense"),
        "mlp.fc_in": part("output.dense1"),
        "mlp.fc_out": part("output.dense2"),
    },
    others={"transformer.wte": "word_embedding", "transformer.ln_f": "layernorm"},
    dropped=r"attn\.(masked_)?bias",
)


(
    translate_hf_state_dict_to_smdistributed_gptj,
    translate_state_dict_to_hf_gptj,
) = functions_of(NAMES, "gptj", "GPTJForCausalLM")
translate_hf_gptj_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj


def _options(model: Any) -> dict[str, Any]:
    config = model.config
    size = config.hidden_size
    return {
        **forms.options_of_a_language_model(config),
        "intermediate_size": config.n_inner or 4 * size,
        "num_positions": 0,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "embedding_dropout_prob": config.embd_pdrop,
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "causal_mask_size": config.n_positions,
        "parallel_attn_output": True,
        "single_pre_layernorm": True,
        "use_qkv_bias": False,
        "use_attn_dense_bias": False,
        "use_lm_head_bias": True,
        "rotary_dim": min(config.rotary_dim or size, size // config.num_attention_heads),
        "attention_in_fp32": True,
    }


FORMS = {
    "GPTJForCausalLM": Form(
        DistributedTransformerLMHead,
        _options,
        forms.language_model_without_types,
        translate_hf_state_dict_to_smdistributed_gptj,
        translate_state_dict_to_hf_gptj,
    )
}
