"""Llama: the names that scripts import; see the package."""

from smp import not_built

translate_state_dict_to_hf_llama = not_built.function("translate_state_dict_to_hf_llama")
translate_hf_state_dict_to_smdistributed_llama = not_built.function(
    "translate_hf_state_dict_to_smdistributed_llama"
)
