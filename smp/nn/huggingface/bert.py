"""BERT: attention by heads, the feed-forward part of a layer by its channels."""

from functools import partial
from typing import Any

from smp import not_built
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

translate_state_dict_to_hf_bert = not_built.function("translate_state_dict_to_hf_bert")
translate_hf_state_dict_to_smdistributed_bert = not_built.function(
    "translate_hf_state_dict_to_smdistributed_bert"
)
