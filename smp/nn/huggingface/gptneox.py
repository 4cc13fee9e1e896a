"""GPT-NeoX: attention by heads, with q, k, v side by side; the MLP by its channels."""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from smp.compat import forms
from smp.compat.forms import Arguments, Form, heads_of_the_model, language_model
from smp.compat.translation import QKV, StateDict, Translation, part
from smp.nn.transformer.lm_head import DistributedTransformerLMHead
from smp.tensor_parallel.splits import plans

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

_OTHERS = {"gpt_neox.embed_in": "word_embedding", "gpt_neox.final_layer_norm": "layernorm"}
_OLD_HEAD = {"embed_out": "lm_head"}  # its name in transformers before 5
NAMES = Translation(
    layers="gpt_neox.layers",
    parts={
        "input_layernorm": part("attention.pre_layernorm"),
        "attention.query_key_value": part(*(f"attention.{n}" for n in QKV), by_heads=True),
        "attention.dense": part("attention.dense"),
        "post_attention_layernorm": part("output.pre_layernorm"),
        "mlp.dense_h_to_4h": part("output.dense1"),
        "mlp.dense_4h_to_h": part("output.dense2"),
    },
    others={**_OTHERS, **_OLD_HEAD},
    dropped=r"attention\.((masked_)?bias|rotary_emb\.inv_freq)",
    ours="transformer.seq_layers",
)


def translate_hf_state_dict_to_smdistributed_gptneox(
    state_dict: Mapping[str, Any],
    max_seq_len: int | None = None,
    num_attention_heads: int | None = None,
) -> StateDict:
    """From ``GPTNeoXForCausalLM``'s state dict to the distributed module's.

    Args:
        state_dict: of the plain model; other dicts are returned as they are.
        max_seq_len: accepted for scripts with it.
        num_attention_heads: None: as the latest ``smp.DistributedModel`` has them.

    Raises:
        ValueError: the number of heads is not known.
    """
    return NAMES.to_ours(state_dict, heads_of_the_model(num_attention_heads))


def translate_state_dict_to_hf_gptneox(
    state_dict: Mapping[str, Any],
    max_seq_len: int | None = None,
    num_attention_heads: int | None = None,
) -> StateDict:
    """From the distributed module's state dict to ``GPTNeoXForCausalLM``'s.

    Names are those of the installed version of transformers.

    Args:
        state_dict: the whole one; that of a plain model, or one split in place, is returned as
            it is.
        max_seq_len: accepted for scripts with it: the buffers saved by transformers before 4.27
            follow from the configuration.
        num_attention_heads: None: as the latest ``smp.DistributedModel`` has them.

    Raises:
        ValueError: the number of heads is not known.
    """
    names = NAMES if _has_old_head() else NAMES._replace(others=_OTHERS)
    return names.to_hugging_face(state_dict, heads_of_the_model(num_attention_heads))


def _has_old_head() -> bool:
    try:
        cls = importlib.import_module("transformers").GPTNeoXForCausalLM
    except ImportError:
        return False
    return "lm_head.weight" not in (getattr(cls, "_tied_weights_keys", None) or ())


def _options(model: Any) -> dict[str, Any]:
    config, first = model.config, model.gpt_neox.layers[0]
    # Before version 5: rotary_emb_base; before 4.30: no dropout, whatever a config says.
    rotary = getattr(config, "rope_parameters", None) or {}
    kind = rotary.get("rope_type", "default")
    forms.wants(kind == "default", "rope_type", kind)
    scaling = getattr(config, "rope_scaling", None) if not rotary else None
    forms.wants(not scaling, "rope_scaling", scaling)
    drop = getattr(first, "post_mlp_dropout", None)
    drop_embedding = getattr(model.gpt_neox, "emb_dropout", None)
    drop_attention = getattr(first.attention, "attention_dropout", 0.0)
    has_bias = first.attention.query_key_value.bias is not None
    return {
        **forms.options_of_a_language_model(config),
        "intermediate_size": config.intermediate_size,
        "num_positions": 0,
        "attention_dropout_prob": getattr(drop_attention, "p", drop_attention),
        "hidden_dropout_prob": 0.0 if drop is None else drop.p,
        "embedding_dropout_prob": 0.0 if drop_embedding is None else drop_embedding.p,
        "activation": config.hidden_act,
        "layernorm_epsilon": config.layer_norm_eps,
        "causal_mask_size": config.max_position_embeddings,
        # Transformers 4.21 has no such option: the two are side by side.
        "parallel_attn_output": getattr(config, "use_parallel_residual", True),
        "use_qkv_bias": has_bias,
        "use_attn_dense_bias": has_bias,
        "rotary_dim": first.attention.rotary_ndims,
        "rotary_base": rotary.get("rope_theta") or config.rotary_emb_base,
        "rotary_pairs": "halves",
    }


def _call(module: Any, forward: Callable[..., Any], arguments: Arguments) -> Any:
    return language_model(module, arguments)


FORMS = {
    "GPTNeoXForCausalLM": Form(
        DistributedTransformerLMHead,
        _options,
        _call,
        translate_hf_state_dict_to_smdistributed_gptneox,
        translate_state_dict_to_hf_gptneox,
        packed_by_heads=True,
    )
}
