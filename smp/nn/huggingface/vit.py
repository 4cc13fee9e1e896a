"""ViT: attention by heads, the MLP by its channels."""

from functools import partial
from typing import Any

from smp.compat import forms
from smp.compat.forms import Form
from smp.compat.translation import Translation, functions_of, part
from smp.nn.transformer.layer import DistributedTransformer
from smp.tensor_parallel import group
from smp.tensor_parallel.rows.linears import cut_inputs, cut_outputs
from smp.tensor_parallel.rows.regions import Region, make_region


def split_attention(attention: Any, path: str) -> None:
    """A ``ViTAttention``."""
    head = attention.head_dim
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
        cut_outputs(linear, unit=head)
    cut_inputs(attention.o_proj, f"{path}.o_proj", unit=head)
    attention.num_attention_heads = group.shares(attention.num_attention_heads)[group.rank()]
    region = Region(samples=("hidden_states",), masks=(("attention_mask", "hidden_states"),))
    make_region(attention, region, path)


def split_mlp(mlp: Any, path: str) -> None:
    """A ``ViTMLP``."""
    cut_outputs(mlp.fc1)
    cut_inputs(mlp.fc2, f"{path}.fc2")
    make_region(mlp, Region(samples=("hidden_states",)), path)


IN_PLACE = {"ViTAttention": split_attention, "ViTMLP": split_mlp}

# The names of transformers before 5: later ones have no encoder beside the model.
NAMES = Translation(
    layers="layer",
    parts={
        "layernorm_before": part("attention.pre_layernorm"),
        "attention.attention.query": part("attention.query"),
        "attention.attention.key": part("attention.key"),
        "attention.attention.value": part("attention.value"),
        "attention.output.dense": part("attention.dense"),
        "layernorm_after": part("output.pre_layernorm"),
        "intermediate.dense": part("output.dense1"),
        "output.dense": part("output.dense2"),
    },
)


(
    translate_hf_state_dict_to_smdistributed_vit,
    translate_state_dict_to_hf_vit,
) = functions_of(NAMES, "vit", "ViTEncoder")


def _options(encoder: Any) -> dict[str, Any]:
    config = encoder.config
    return {
        **forms.options_of_an_encoder(config),
        "pre_layernorm": True,
        "post_layernorm": False,
        "use_qkv_bias": config.qkv_bias,
    }


FORMS = {
    "ViTEncoder": Form(
        DistributedTransformer,
        _options,
        partial(forms.encoder, returns="BaseModelOutput"),
        translate_hf_state_dict_to_smdistributed_vit,
        translate_state_dict_to_hf_vit,
    )
}
