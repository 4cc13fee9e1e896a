"""BERT: attention by heads, the feed-forward part of a layer by its channels."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from smp.nn.huggingface import forms
from smp.nn.huggingface.forms import Arguments, Form
from smp.nn.huggingface.translation import StateDict, Translation, part
from smp.nn.transformer.layer import DistributedTransformer
from smp.tensor_parallel import plans


def split_attention(attention: Any, path: str) -> None:
    """A ``BertAttention``; the residual is added outside of what gathers."""
    source = "encoder_hidden_states" if attention.is_cross_attention else "hidden_states"
    plans.attention(
        attention,
        path,
        columns=("self.query", "self.key", "self.value"),
        row="output.dense",
        head="attention_head_size",
        heads="num_attention_heads",
        widths=("all_head_size",),
        entry="self",
        samples=("hidden_states", source),
        masks=(("attention_mask", source),),
    )


split_feed_forward = partial(
    plans.mlp, column="intermediate.dense", row="output.dense", entry="intermediate"
)

IN_PLACE = {"BertAttention": split_attention, "BertLayer": split_feed_forward}

NAMES = Translation(
    layers="layer",
    parts={
        "attention.self.query": part("attention.query"),
        "attention.self.key": part("attention.key"),
        "attention.self.value": part("attention.value"),
        "attention.output.dense": part("attention.dense"),
        "attention.output.LayerNorm": part("attention.layernorm"),
        "intermediate.dense": part("output.dense1"),
        "output.dense": part("output.dense2"),
        "output.LayerNorm": part("output.layernorm"),
    },
)


def translate_hf_state_dict_to_smdistributed_bert(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> StateDict:
    """From the state dict of a model with a ``BertEncoder`` to that of it with ours.

    Args:
        state_dict: of the plain model; other dicts are returned as they are.
        max_seq_len: taken for scripts that give it.
    """
    return NAMES.to_ours(state_dict)


def translate_state_dict_to_hf_bert(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> StateDict:
    """From the state dict of a model with a distributed encoder to ``BertModel``'s names.

    Args:
        state_dict: the whole one; that of a model which is split in place, or plain, is
            returned as it is.
        max_seq_len: taken for scripts that give it.
    """
    return NAMES.to_hugging_face(state_dict)


def options(encoder: Any) -> dict[str, Any]:
    """Of the ``DistributedTransformer`` in the place of a ``BertEncoder`` or alike."""
    config = encoder.config
    crosses = config.add_cross_attention
    forms.wants(not crosses, "add_cross_attention", crosses)
    positions = getattr(config, "position_embedding_type", "absolute")
    forms.wants(positions == "absolute", "position_embedding_type", positions)
    size, heads = config.hidden_size, config.num_attention_heads
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": heads,
        "attention_head_size": size // heads,
        "hidden_size": size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_probs_dropout_prob,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "activation": config.hidden_act,
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.max_position_embeddings if config.is_decoder else None,
    }


def call(module: Any, forward: Callable[..., Any], arguments: Arguments) -> Any:
    """As a ``BertEncoder`` is called."""
    returns = "BaseModelOutputWithPastAndCrossAttentions"
    return forms.encoder(module, forward, arguments, returns)


FORMS = {
    "BertEncoder": Form(
        DistributedTransformer,
        options,
        call,
        translate_hf_state_dict_to_smdistributed_bert,
        translate_state_dict_to_hf_bert,
    )
}
