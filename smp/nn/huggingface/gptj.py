"""GPT-J: attention by heads, the MLP beside it by its channels."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from smp.nn.huggingface.forms import Arguments, Form, language_model, refuse
from smp.nn.huggingface.translation import StateDict, Translation, part
from smp.nn.transformer.lm_head import DistributedTransformerLMHead
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


def translate_hf_state_dict_to_smdistributed_gptj(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> StateDict:
    """From ``GPTJForCausalLM``'s state dict to that of the distributed module in its place.

    Args:
        state_dict: of the plain model; other dicts are returned as they are.
        max_seq_len: taken for scripts that give it.
    """
    return NAMES.to_ours(state_dict)


translate_hf_gptj_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj


def translate_state_dict_to_hf_gptj(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> StateDict:
    """From the distributed module's state dict to ``GPTJForCausalLM``'s.

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
        "intermediate_size": config.n_inner or 4 * size,
        "vocab_size": config.vocab_size,
        "num_positions": 0,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "embedding_dropout_prob": config.embd_pdrop,
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.n_positions,
        "pre_layernorm": True,
        "post_layernorm": False,
        "parallel_attn_output": True,
        "single_pre_layernorm": True,
        "use_qkv_bias": False,
        "use_attn_dense_bias": False,
        "use_lm_head_bias": True,
        "tie_input_output_embedding": config.tie_word_embeddings,
        "rotary_dim": config.rotary_dim or size // heads,
        "attention_in_fp32": True,
    }


def _call(module: Any, forward: Callable[..., Any], arguments: Arguments) -> Any:
    refuse(arguments, "token_type_ids")  # the original looks them up in the word embedding
    return language_model(module, arguments)


FORMS = {
    "GPTJForCausalLM": Form(
        DistributedTransformerLMHead,
        _options,
        _call,
        translate_hf_state_dict_to_smdistributed_gptj,
        translate_state_dict_to_hf_gptj,
    )
}
