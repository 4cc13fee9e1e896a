"""RoBERTa: the modules are those of BERT, under other names."""

from smp.nn.huggingface import bert

IN_PLACE = {
    "RobertaAttention": bert.split_attention,
    "RobertaLayer": bert.split_feed_forward,
}
FORMS = {"RobertaEncoder": bert.FORMS["BertEncoder"]}

translate_hf_state_dict_to_smdistributed_roberta = (
    bert.translate_hf_state_dict_to_smdistributed_bert
)
translate_state_dict_to_hf_roberta = bert.translate_state_dict_to_hf_bert
