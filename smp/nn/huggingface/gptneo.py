"""GPT-Neo: attention by heads, global or in a window, and the MLP by its channels."""

from functools import partial
from typing import Any

from smp.compat import forms
from smp.compat.forms import Form
from smp.compat.translation import Translation, functions_of, part
from smp.nn.transformer.lm_head import DistributedTransformerLMHead
from smp.tensor_parallel.splits import plans

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

NAMES = Translation(
    layers="h",
    parts={
        "ln_1": part("attention.pre_layernorm"),
        "attn.attention.q_proj": part("attention.query"),
        "attn.attention.k_proj": part("attention.key"),
        "attn.attention.v_proj": part("attention.value"),
        "attn.attention.out_proj": part("attention.dense"),
        "ln_2": part("output.pre_layernorm"),
        "mlp.c_fc": part("output.dense1"),
        "mlp.c_proj": part("output.dense2"),
    },
    others={
        "transformer.wte": "word_embedding",
        "transformer.wpe": "position_embedding",
        "transformer.ln_f": "layernorm",
    },
    dropped=r"attn\.attention\.(masked_)?bias",
)


(
    translate_hf_state_dict_to_smdistributed_gptneo,
    translate_state_dict_to_hf_gptneo,
) = functions_of(NAMES, "gptneo", "GPTNeoForCausalLM")
translate_hf_gptneo_state_dict_to_smdistributed = (
    translate_hf_state_dict_to_smdistributed_gptneo
)


def _options(model: Any) -> dict[str, Any]:
    config = model.config
    size = config.hidden_size
    return {
        **forms.options_of_a_language_model(config),
        "intermediate_size": config.intermediate_size or 4 * size,
        "num_positions": config.max_position_embeddings,
        "attention_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": config.resid_dropout,
        "embedding_dropout_prob": config.embed_dropout,
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "causal_mask_size": config.max_position_embeddings,
        "use_qkv_bias": False,
        "scale_attention_scores": False,
        "window_size": [
            config.window_size if kind == "local" else None for kind in config.attention_layers
        ],
        "attention_in_fp32": True,
    }


FORMS = {
    "GPTNeoForCausalLM": Form(
        DistributedTransformerLMHead,
        _options,
        forms.language_model_without_types,
        translate_hf_state_dict_to_smdistributed_gptneo,
        translate_state_dict_to_hf_gptneo,
    )
}
