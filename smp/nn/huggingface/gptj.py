"""GPT-J: the names that scripts import; see the package."""

from smp import not_built

translate_state_dict_to_hf_gptj = not_built.function("translate_state_dict_to_hf_gptj")
translate_hf_state_dict_to_smdistributed_gptj = not_built.function(
    "translate_hf_state_dict_to_smdistributed_gptj"
)
translate_hf_gptj_state_dict_to_smdistributed = not_built.function(
    "translate_hf_gptj_state_dict_to_smdistributed"
)
