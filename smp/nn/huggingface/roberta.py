"""RoBERTa: the modules are those of BERT, under other names."""

from smp import not_built
from smp.nn.huggingface.bert import split_attention, split_feed_forward

IN_PLACE = {"RobertaAttention": split_attention, "RobertaLayer": split_feed_forward}

translate_state_dict_to_hf_roberta = not_built.function("translate_state_dict_to_hf_roberta")
translate_hf_state_dict_to_smdistributed_roberta = not_built.function(
    "translate_hf_state_dict_to_smdistributed_roberta"
)
