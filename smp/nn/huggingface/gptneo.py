"""GPT-Neo: the names that scripts import; see the package."""

from smp import not_built

translate_state_dict_to_hf_gptneo = not_built.function("translate_state_dict_to_hf_gptneo")
translate_hf_state_dict_to_smdistributed_gptneo = not_built.function(
    "translate_hf_state_dict_to_smdistributed_gptneo"
)
translate_hf_gptneo_state_dict_to_smdistributed = not_built.function(
    "translate_hf_gptneo_state_dict_to_smdistributed"
)
