"""Distributed modules in the place of Hugging Face's, for scripts with the names of these.

The newest transformers are split in place.  Scripts for transformers before 4.27 use
``.transformer.seq_layers``, ``.attention`` and ``.output``.  For them, and for
``smp.tensor_parallelism(replace=True)``, a distributed module has the original's weights,
arguments and results.
"""

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smp.marks import set_class
from smp.modules.stand_ins import users_class
from smp.state_mod import state
from smp.tensor_parallel.rows.activations import ACTIVATIONS
from smp.tensor_parallel.rows.caches import CACHES
from smp.tensor_parallel.rows.kernels import HIDES
from smp.tensor_parallel.splits import marking, replacement
from smp.tensor_parallel.splits.replacement import BothWays, Translate

Arguments = dict[str, Any]  # of a forward, by name


_OF_OUTPUTS = ("output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class Form:
    """A distributed module for the place of a class of transformers.

    Attributes:
        dist_module: a class of ``smp.nn``.
        options: from the original module to the keyword arguments of ``dist_module``.
        call: ``call(module, forward, arguments)`` returns the original's result, by
            ``forward(tuple)``, the distributed module's own.
        to_ours, to_hugging_face: between the state dicts of original and ``dist_module``.
        packed_by_heads: whether they take ``num_attention_heads``.
    """

    dist_module: type[nn.Module]
    options: Callable[[Any], dict[str, Any]]
    call: Callable[[Any, Callable[..., Any], Arguments], Any]
    to_ours: Translate
    to_hugging_face: Translate
    packed_by_heads: bool = False

    def replace(self, original: nn.Module, path: str) -> nn.Module:
        """The distributed module with the original's weights, hooks and pin.

        Collective over the TP_GROUP.

        Raises:
            NotImplementedError: the distributed module lacks an option of the original; and
                errors as of ``replacement.take_over``.
            ValueError: the original has parameters unknown to ``dist_module``.
        """
        config: Any = original.config
        refuse(
            {name: getattr(config, name, None) for name in _OF_OUTPUTS},
            *_OF_OUTPUTS,
        )
        if getattr(config, "tie_word_embeddings", False):
            _tie_head(original)
        made = self._make(original, marking.configuration(original) or {})
        to_ours, to_hugging_face = self.to_ours, self.to_hugging_face
        if self.packed_by_heads:
            heads = config.num_attention_heads
            to_ours = functools.partial(to_ours, num_attention_heads=heads)
            to_hugging_face = functools.partial(to_hugging_face, num_attention_heads=heads)
        replacement.take_over(
            original,
            made,
            path,
            BothWays(to_ours, to_hugging_face),
            "its configuration says nothing of that: split it in place, "
            "smp.tensor_parallelism(replace=False)",
        )
        return made

    def _make(self, original: nn.Module, config: Mapping[str, Any]) -> nn.Module:
        """The distributed module, with new weights.  Collective over the TP_GROUP.

        Args:
            original: the module to replace.
            config: the original's marks; options among its keys are used.
        """
        accepted = inspect.signature(self.dist_module.__init__).parameters
        chosen = {key: value for key, value in config.items() if key in accepted}
        options = self.options(original)
        options["activation"] = _activation(original, options["activation"])
        made = self.dist_module(**{**options, **chosen})
        base, call = type(made), self.call
        signature = inspect.signature(users_class(type(original)).forward)
        packs = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]

        @functools.wraps(users_class(type(original)).forward)
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(module, *args, **kwargs)
            bound.apply_defaults()
            arguments = dict(list(bound.arguments.items())[1:])
            for name in packs:
                arguments.update(arguments.pop(name))
            return call(module, functools.partial(base.forward, module), arguments)

        members = {"forward": forward, "__module__": base.__module__}
        set_class(made, type(base.__name__, (base,), members))
        if hasattr(original, "config"):
            made.config = original.config  # scripts ask the wrapped model for it
        return made


def _tie_head(model: Any) -> None:
    """Have the head's weight be the embedding's, as the configuration says.

    Scripts with ``PreTrainedModel.init_weights`` switched off have two: that function ties
    them.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        return
    tied = model.get_input_embeddings().weight
    if head.weight is tied or head.weight.shape != tied.shape:
        return
    head.weight = tied
    warnings.warn(
        f"smp: {type(model).__name__} has a head whose weight is not the embedding's, and its "
        "configuration says tie_word_embeddings=True: the embedding's stands for both; to keep "
        "two, set config.tie_word_embeddings=False before smp.DistributedModel",
        stacklevel=2,
    )


def _activation(original: nn.Module, configured: Any) -> Any:
    """The name of the activation that the layers were made with.

    A script may have changed the configuration since.

    Args:
        configured: the name there.

    Raises:
        NotImplementedError: the layers have several.
    """
    known = importlib.import_module("transformers.activations").ACT2FN
    kinds = {type(known[name]): name for name in reversed(ACTIVATIONS) if name in known}
    found = {type(module) for module in original.modules()} & kinds.keys()
    if not found or configured in known and found == {type(known[configured])}:
        return configured
    names = sorted(kinds[kind] for kind in found)
    wants(len(names) == 1, "activation", names)
    return names[0]


def heads_of_the_model(given: int | None) -> int | None:
    """The number of attention heads: the given one, or the latest wrapped model's."""
    config = getattr(state.model, "config", None) if given is None else None
    return given if config is None else getattr(config, "num_attention_heads", None)


def options_of_a_layer(config: Any) -> dict[str, Any]:
    """Options under one name in all families' configurations."""
    size, heads = config.hidden_size, config.num_attention_heads
    return {
        "num_attention_heads": heads,
        "attention_head_size": size // heads,
        "hidden_size": size,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
    }


def options_of_an_encoder(config: Any) -> dict[str, Any]:
    """Options common to all encoders' configurations, for a ``DistributedTransformer``."""
    return {
        **options_of_a_layer(config),
        "num_layers": config.num_hidden_layers,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_probs_dropout_prob,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "activation": config.hidden_act,
        "layernorm_epsilon": config.layer_norm_eps,
    }


def options_of_a_language_model(config: Any) -> dict[str, Any]:
    """Options common to all GPTs' configurations, for a ``DistributedTransformerLMHead``."""
    return {
        **options_of_a_layer(config),
        "num_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "tie_input_output_embedding": config.tie_word_embeddings,
        "pre_layernorm": True,
        "post_layernorm": False,
    }


def wants(met: bool, option: str, value: object) -> None:
    """Raise on an option that the distributed form does not have.

    Raises:
        NotImplementedError: the text names the option.
    """
    if not met:
        raise NotImplementedError(
            f"smp: {option}={value!r}: no distributed module can replace a model that is made "
            "so: split it in place, smp.tensor_parallelism(replace=False)"
        )


def _is_absent(value: Any) -> bool:
    if isinstance(value, list | tuple):  # one a layer
        return all(one is None for one in value)
    return value is None or value is False


def refuse(arguments: Arguments, *names: str) -> None:
    """Raise on arguments without a use in the distributed form.

    Raises:
        NotImplementedError: the text names the first one given.
    """
    for name in names:
        if not _is_absent(arguments.get(name)):
            caches = name in (*CACHES, "use_cache")
            instead = "pass use_cache=False, or " if caches else ""
            raise NotImplementedError(
                f"smp: {name} of a model that distributed modules have replaced is not built: "
                f"{instead}split it in place, smp.tensor_parallelism(replace=False)"
            )


def hidden_positions(attention_mask: Tensor | None) -> Tensor | None:
    """From Hugging Face's mask, 1 where a position is seen, to the LM head's, 1 where not.

    Raises:
        NotImplementedError: a mask of other axes than samples and positions.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise NotImplementedError(
            f"smp: attention_mask of shape {list(attention_mask.shape)}: a model that "
            "distributed modules have replaced takes [samples, positions]"
        )
    return 1 - attention_mask.long()


def additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask to add to scores, from the masks of transformers' layers.

    Args:
        mask: of bools, True where a position is seen; ``[samples, positions]``, 1 where it is;
            or added to scores already.
        like: the hidden state.
    """
    if mask is None or (mask.dim() == 4 and mask.dtype != torch.bool):
        return mask
    seen = mask if mask.dim() == 4 else mask[:, None, None, :].bool()
    return torch.zeros_like(seen, dtype=like.dtype).masked_fill(~seen, HIDES)


def language_model(
    module: Any,
    arguments: Arguments,
    *cross: Tensor | None,
    returns: str = "CausalLMOutputWithPast",
) -> Any:
    """Call a ``DistributedTransformerLMHead`` as a ``...ForCausalLM`` is called.

    In training with labels there are no logits: no rank has them whole.
    """
    refuse(
        arguments, *CACHES, "inputs_embeds", "head_mask", *_OF_OUTPUTS,
        "cache_position", "shift_labels",
    )  # fmt: skip
    labels, places = arguments.get("labels"), arguments.get("position_ids")
    if places is not None and module.options.rotary_dim:
        _check_that_they_count(places)
    given = (
        arguments["input_ids"],
        hidden_positions(arguments.get("attention_mask")),
        arguments.get("token_type_ids"),
        places,
        *cross,
    )
    # A Trainer's batch may be a part of a larger one, with so many labels in all.
    items = arguments.get("num_items_in_batch")
    loss, logits = module.loss_and_logits(
        (*given, labels),
        logits=not module.training,
        reduction="mean" if items is None else "sum",
    )
    if loss is not None and items is not None:
        loss = loss / items
    keep = arguments.get("logits_to_keep")
    if logits is not None and keep is not None:
        logits = logits[:, slice(-keep, None) if isinstance(keep, int) else keep]
    if _wants_dict(module, arguments):
        outputs = importlib.import_module("transformers.modeling_outputs")
        return getattr(outputs, returns)(loss=loss, logits=logits)
    return tuple(value for value in (loss, logits) if value is not None)


def language_model_without_types(
    module: Any, forward: Callable[..., Any], arguments: Arguments
) -> Any:
    """Likewise, of a family with token types in the word embedding."""
    refuse(arguments, "token_type_ids")
    return language_model(module, arguments)


def _wants_dict(module: Any, arguments: Arguments) -> bool:
    wanted = arguments.get("return_dict")
    return wanted if wanted is not None else getattr(module.config, "return_dict", True)


def _check_that_they_count(places: Tensor) -> None:
    """Raise on ``position_ids`` other than 0, 1, 2...: rotations are by these.

    Raises:
        NotImplementedError: the positions are others.
    """
    counted = torch.arange(places.size(-1), device=places.device)
    if not torch.equal(places, counted.expand_as(places)):
        raise NotImplementedError(
            "smp: position_ids that do not count from 0, of a model with rotary positions that "
            "distributed modules have replaced: pad behind the text, or split it in place, "
            "smp.tensor_parallelism(replace=False)"
        )


def encoder(
    module: Any, forward: Callable[..., Any], arguments: Arguments, returns: str
) -> Any:
    """Call a ``DistributedTransformer`` as an encoder of transformers is called.

    Args:
        module, forward, arguments: as `Form.call` gets them.
        returns: the original's class of results, a name in ``transformers.modeling_outputs``.
    """
    refuse(
        arguments, "head_mask", "encoder_hidden_states", "encoder_attention_mask",
        *CACHES, "use_cache", *_OF_OUTPUTS,
    )  # fmt: skip
    hidden = arguments["hidden_states"]
    out = forward((hidden, additive(arguments.get("attention_mask"), hidden)))[0]
    if arguments.get("return_dict", True):
        outputs = importlib.import_module("transformers.modeling_outputs")
        return getattr(outputs, returns)(last_hidden_state=out)
    return (out,)
