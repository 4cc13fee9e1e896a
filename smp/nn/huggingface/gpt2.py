"""GPT-2: the names that scripts import; see the package."""

from smp import not_built

translate_state_dict_to_hf_gpt2 = not_built.function("translate_state_dict_to_hf_gpt2")
translate_hf_state_dict_to_smdistributed_gpt2 = not_built.function(
    "translate_hf_state_dict_to_smdistributed_gpt2"
)
translate_hf_state_dict_to_smdistributed = not_built.function(
    "translate_hf_state_dict_to_smdistributed"
)
get_hf_gpt2_transformer_layer_hooks = not_built.function("get_hf_gpt2_transformer_layer_hooks")
translate_hf_block_state_dict_to_smdistributed = not_built.function(
    "translate_hf_block_state_dict_to_smdistributed"
)
translate_layer_state_dict_to_hf_gpt2_block = not_built.function(
    "translate_layer_state_dict_to_hf_gpt2_block"
)
