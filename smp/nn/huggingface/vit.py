"""ViT: attention by heads, the MLP by its channels."""

from collections.abc import Callable, Mapping
from typing import Any

from smp.nn.huggingface import forms
from smp.nn.huggingface.forms import Arguments, Form
from smp.nn.huggingface.translation import StateDict, Translation, part
from smp.nn.transformer.layer import DistributedTransformer
from smp.tensor_parallel import group
from smp.tensor_parallel.linears import cut_inputs, cut_outputs
from smp.tensor_parallel.regions import Region, make_region


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

# Of transformers before 5: later ones have no encoder beside the model.
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


def translate_hf_state_dict_to_smdistributed_vit(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> StateDict:
    """From the state dict of a model with a ``ViTEncoder`` to that of it with ours.

    Args:
        state_dict: of the plain model; other dicts are returned as they are.
        max_seq_len: taken for scripts that give it.
    """
    return NAMES.to_ours(state_dict)


def translate_state_dict_to_hf_vit(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> StateDict:
    """From the state dict of a model with a distributed encoder to ``ViTModel``'s names.

    Args:
        state_dict: the whole one; that of a model which is split in place, or plain, is
            returned as it is.
        max_seq_len: taken for scripts that give it.
    """
    return NAMES.to_hugging_face(state_dict)


def _options(encoder: Any) -> dict[str, Any]:
    config = encoder.config
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
        "pre_layernorm": True,
        "post_layernorm": False,
        "use_qkv_bias": config.qkv_bias,
    }


def _call(module: Any, forward: Callable[..., Any], arguments: Arguments) -> Any:
    return forms.encoder(module, forward, arguments, "BaseModelOutput")


FORMS = {
    "ViTEncoder": Form(
        DistributedTransformer,
        _options,
        _call,
        translate_hf_state_dict_to_smdistributed_vit,
        translate_state_dict_to_hf_vit,
    )
}
