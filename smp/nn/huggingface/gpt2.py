"""GPT-2: attention by heads, the MLP by its channels."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from smp.compat import forms
from smp.compat.forms import Arguments, Form, additive, language_model, refuse
from smp.compat.translation import QKV, StateDict, Translation, part
from smp.nn.transformer.layer import DistributedTransformerLayer
from smp.nn.transformer.lm_head import DistributedTransformerLMHead
from smp.tensor_parallel.rows.caches import CACHES
from smp.tensor_parallel.rows.linears import cut_outputs
from smp.tensor_parallel.splits import plans
from smp.tensor_parallel.splits.replacement import BothWays, Hook, Known


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
        # Flash attention finds packed sequences by position_ids.
        samples=("hidden_states", "encoder_hidden_states", "position_ids"),
        masks=(
            ("attention_mask", "hidden_states"),
            ("encoder_attention_mask", "encoder_hidden_states"),
        ),
    )


IN_PLACE = {
    "GPT2Attention": split_attention,
    "GPT2MLP": partial(plans.mlp, column="c_fc", row="c_proj"),
}

# Conv1D has weights [in, out].
_LAYER = {
    "ln_1": part("attention.pre_layernorm"),
    "attn.c_attn": part(*(f"attention.{name}" for name in QKV), transposed=True),
    "attn.c_proj": part("attention.dense", transposed=True),
    "ln_cross_attn": part("cross_attention.pre_layernorm"),
    "crossattention.q_attn": part("cross_attention.query", transposed=True),
    "crossattention.c_attn": part(
        "cross_attention.key", "cross_attention.value", transposed=True
    ),
    "crossattention.c_proj": part("cross_attention.dense", transposed=True),
    "ln_2": part("output.pre_layernorm"),
    "mlp.c_fc": part("output.dense1", transposed=True),
    "mlp.c_proj": part("output.dense2", transposed=True),
}
NAMES = Translation(
    layers="h",
    parts=_LAYER,
    others={
        "transformer.wte": "word_embedding",
        "transformer.wpe": "position_embedding",
        "transformer.ln_f": "layernorm",
    },
    dropped=r"(attn|crossattention)\.(masked_)?bias",
)


def translate_hf_state_dict_to_smdistributed_gpt2(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> StateDict:
    """From ``GPT2LMHeadModel``'s state dict to the distributed module's.

    Args:
        state_dict: of the plain model; other dicts are returned as they are.
        max_seq_len: accepted for scripts with it.
    """
    return NAMES.to_ours(state_dict)


translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2


def translate_state_dict_to_hf_gpt2(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> StateDict:
    """From the distributed module's state dict to ``GPT2LMHeadModel``'s.

    Args:
        state_dict: the whole one; that of a plain model, or one split in place, is returned as
            it is.
        max_seq_len: the number of positions; adds the buffers of a layer saved by transformers
            before 4.27.
    """
    buffers = None if max_seq_len is None else partial(_buffers, max_seq_len)
    return NAMES.to_hugging_face(state_dict, buffers=buffers)


def _buffers(positions: int, layer: StateDict) -> StateDict:
    """The buffers of each of a layer's attentions; the layer has Hugging Face's names."""
    seen = torch.ones(positions, positions, dtype=torch.uint8).tril()
    out: StateDict = {}
    for attention in ("attn", "crossattention"):
        if f"{attention}.c_attn.weight" in layer:
            out[f"{attention}.bias"] = seen.view(1, 1, positions, positions)
            out[f"{attention}.masked_bias"] = torch.tensor(-1e4)
    return out


def translate_hf_block_state_dict_to_smdistributed(
    state_dict: Mapping[str, Any],
) -> StateDict:
    """From a ``GPT2Block``'s state dict to a ``DistributedTransformerLayer``'s."""
    return NAMES.layer_to_ours(state_dict)


def translate_layer_state_dict_to_hf_gpt2_block(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> StateDict:
    """From a ``DistributedTransformerLayer``'s state dict to a ``GPT2Block``'s."""
    translated = NAMES.layer_to_hugging_face(state_dict)
    buffers = {} if max_seq_len is None else _buffers(max_seq_len, translated)
    return {**translated, **buffers}


def _options_of_a_layer(config: Any) -> dict[str, Any]:
    return {
        **forms.options_of_a_layer(config),
        "intermediate_size": config.n_inner or 4 * config.hidden_size,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "causal_mask_size": config.n_positions,
        "add_cross_attention": config.add_cross_attention,
        "pre_layernorm": True,
        "post_layernorm": False,
        "scale_attention_scores": config.scale_attn_weights,
        "scale_attn_by_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "attention_in_fp32": config.reorder_and_upcast_attn,
    }


def _options_of_the_model(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        **forms.options_of_a_language_model(config),
        **_options_of_a_layer(config),
        "num_positions": config.n_positions,
        "embedding_dropout_prob": config.embd_pdrop,
    }


def _call_model(module: Any, forward: Callable[..., Any], arguments: Arguments) -> Any:
    cross: tuple = ()
    _check_that_it_crosses(module, arguments.get("encoder_hidden_states"))
    if module.options.add_cross_attention:
        states = arguments["encoder_hidden_states"]
        mask = arguments.get("encoder_attention_mask")
        cross = states, None if states is None else additive(mask, states)
    refuse(arguments, "token_type_ids")  # the original looks them up in the word embedding
    return language_model(
        module, arguments, *cross, returns="CausalLMOutputWithCrossAttentions"
    )


def _check_that_it_crosses(module: Any, states: Any) -> None:
    """Raise as the original does: no cross-attention would look at the states.

    Raises:
        ValueError: there are states, and the model is made without cross-attention.
    """
    if states is not None and not module.options.add_cross_attention:
        raise ValueError(
            "smp: encoder_hidden_states are passed to a model without cross-attention: make it "
            "with add_cross_attention=True in its configuration"
        )


def get_hf_gpt2_transformer_layer_hooks() -> tuple[Hook, Hook, Hook]:
    """Hooks for ``smp.tp_register_with_module(GPT2Block, smp.nn.DistributedTransformerLayer)``.

    Returns:
        init, forward and return hook, for the installed version of transformers.
    """
    block = importlib.import_module("transformers.models.gpt2.modeling_gpt2").GPT2Block
    whole = inspect.signature(block.forward)
    signature = whole.replace(parameters=list(whole.parameters.values())[1:])
    packed = next((p.name for p in whole.parameters.values() if p.kind is p.VAR_KEYWORD), "")
    returns_tuple = "Tuple" in str(whole.return_annotation)

    def init_hook(config: Any, layer_idx: int | None = None) -> tuple[tuple, dict]:
        return (), {**_options_of_a_layer(config), "layer_idx": layer_idx or 0}

    def forward_hook(*args: Any, **kwargs: Any) -> tuple[tuple, dict]:
        given = signature.bind(*args, **kwargs).arguments
        given = {**given.pop(packed, {}), **given}
        refuse(given, *CACHES, "head_mask", "output_attentions")
        hidden = given["hidden_states"]
        mask = additive(given.get("attention_mask"), hidden)
        cross_mask = additive(given.get("encoder_attention_mask"), hidden)
        return ((hidden, given.get("encoder_hidden_states"), mask, cross_mask),), {}

    forward_hook.__signature__ = signature  # type: ignore[attr-defined]

    def return_hook(result: tuple) -> Any:
        return (result[0], None) if returns_tuple else result[0]  # no cache

    return init_hook, forward_hook, return_hook


def _made_with(block: Any) -> tuple[tuple, dict[str, Any]] | None:
    config = getattr(block.attn, "config", None)
    return None if config is None else ((config, block.attn.layer_idx), {})


_OF_A_LAYER = BothWays(NAMES.layer_to_ours, NAMES.layer_to_hugging_face)
BLOCKS = {"GPT2Block": Known(DistributedTransformerLayer, _made_with, _OF_A_LAYER)}

FORMS = {
    "GPT2LMHeadModel": Form(
        DistributedTransformerLMHead,
        _options_of_the_model,
        _call_model,
        translate_hf_state_dict_to_smdistributed_gpt2,
        translate_state_dict_to_hf_gpt2,
    )
}
