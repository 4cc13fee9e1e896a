"""GPT-Neo: attention by heads, global or in a window, and the MLP by its channels."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from smp.nn.huggingface.forms import Arguments, Form, language_model, refuse
from smp.nn.huggingface.translation import StateDict, Translation, part
from smp.nn.transformer.lm_head import DistributedTransformerLMHead
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


def translate_hf_state_dict_to_smdistributed_gptneo(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> StateDict:
    """From ``GPTNeoForCausalLM``'s state dict to that of the distributed module in its place.

    Args:
        state_dict: of the plain model; other dicts are returned as they are.
        max_seq_len: taken for scripts that give it.
    """
    return NAMES.to_ours(state_dict)


translate_hf_gptneo_state_dict_to_smdistributed = (
    translate_hf_state_dict_to_smdistributed_gptneo
)


def translate_state_dict_to_hf_gptneo(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> StateDict:
    """From the distributed module's state dict to ``GPTNeoForCausalLM``'s.

    Args:
        state_dict: the whole one; that of a model which is split in place, or plain, is
            returned as it is.
        max_seq_len: taken for scripts that give it: buffers that transformers before 4.27
            saves beside the parameters follow from the configuration.
    """
    return NAMES.to_hugging_face(state_dict)


def _options(model: Any) -> dict[str, Any]:
    config = model.config
    size, heads = config.hidden_size, config.num_attention_heads
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": heads,
        "attention_head_size": size // heads,
        "hidden_size": size,
        "intermediate_size": config.intermediate_size or 4 * size,
        "vocab_size": config.vocab_size,
        "num_positions": config.max_position_embeddings,
        "attention_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": config.resid_dropout,
        "embedding_dropout_prob": config.embed_dropout,
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.max_position_embeddings,
        "pre_layernorm": True,
        "post_layernorm": False,
        "use_qkv_bias": False,
        "tie_input_output_embedding": config.tie_word_embeddings,
        "scale_attention_scores": False,
        "window_size": [
            config.window_size if kind == "local" else None for kind in config.attention_layers
        ],
        "attention_in_fp32": True,
    }


def _call(module: Any, forward: Callable[..., Any], arguments: Arguments) -> Any:
    refuse(arguments, "token_type_ids")  # the original looks them up in the word embedding
    return language_model(module, arguments)


FORMS = {
    "GPTNeoForCausalLM": Form(
        DistributedTransformerLMHead,
        _options,
        _call,
        translate_hf_state_dict_to_smdistributed_gptneo,
        translate_state_dict_to_hf_gptneo,
    )
}
