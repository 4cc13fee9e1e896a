"""BERT: attention by heads, the feed-forward part of a layer by its channels."""

from functools import partial
from typing import Any

from smp.compat import forms
from smp.compat.forms import Form
from smp.compat.translation import Translation, functions_of, part
from smp.nn.transformer.layer import DistributedTransformer
from smp.tensor_parallel.splits import plans


def split_attention(attention: Any, path: str) -> None:
    """A ``BertAttention``; the residual is added outside of its gather."""
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


(
    translate_hf_state_dict_to_smdistributed_bert,
    translate_state_dict_to_hf_bert,
) = functions_of(NAMES, "bert", "BertEncoder")


def options(encoder: Any) -> dict[str, Any]:
    """The options of a ``DistributedTransformer`` in place of a ``BertEncoder`` or alike."""
    config = encoder.config
    crosses = config.add_cross_attention
    forms.wants(not crosses, "add_cross_attention", crosses)
    positions = getattr(config, "position_embedding_type", "absolute")
    forms.wants(positions == "absolute", "position_embedding_type", positions)
    return {
        **forms.options_of_an_encoder(config),
        "causal_mask_size": config.max_position_embeddings if config.is_decoder else None,
    }


FORMS = {
    "BertEncoder": Form(
        DistributedTransformer,
        options,
        partial(forms.encoder, returns="BaseModelOutputWithPastAndCrossAttentions"),
        translate_hf_state_dict_to_smdistributed_bert,
        translate_state_dict_to_hf_bert,
    )
}
