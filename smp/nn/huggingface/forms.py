"""Distributed modules in the place of Hugging Face's: for scripts that reach for their names.

The newest transformers are split in place.  What scripts of transformers before 4.27 expect
(``.transformer.seq_layers``, ``.attention``, ``.output``), and what
``smp.tensor_parallelism(replace=True)`` asks for, is a distributed module with the original's
weights, arguments and results.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smp.modules.stand_ins import users_class
from smp.nn.huggingface.translation import StateDict
from smp.state_mod import state
from smp.tensor_parallel import marking, replacement

Arguments = dict[str, Any]  # of a forward, by name

# Added to scores: as good as minus infinity, and small enough that the scores of a position
# which sees hidden ones only are not lost beside it.
HIDES = -1e4


@dataclass(frozen=True)
class Form:
    """What takes the place of a class of transformers.

    Attributes:
        dist_module: a class of ``smp.nn``.
        options: from the original module to the keyword arguments of ``dist_module``.
        call: ``call(module, forward, arguments)`` returns what the original would, by
            ``forward(tuple)``, the distributed module's own.
        to_ours, to_hugging_face: between the state dicts of original and ``dist_module``.
    """

    dist_module: type[nn.Module]
    options: Callable[[Any], dict[str, Any]]
    call: Callable[[Any, Callable[..., Any], Arguments], Any]
    to_ours: Callable[[Mapping[str, Any]], StateDict]
    to_hugging_face: Callable[[Mapping[str, Any]], StateDict]

    def replace(self, original: nn.Module, path: str) -> nn.Module:
        """The distributed module with the original's weights, hooks and pin.

        Collective over the TP_GROUP.  Errors as of ``replacement.take_over``.

        Raises:
            ValueError: the original has parameters of which ``dist_module`` knows nothing.
        """
        made = self._make(original, marking.configuration(original) or {})
        parameters = self.to_ours(dict(original.named_parameters()))
        if unknown := sorted(set(parameters) - set(dict(made.named_parameters()))):
            raise ValueError(
                f"smp: '{path or type(original).__name__}' has parameters "
                f"{', '.join(unknown)}, which {type(made).__name__}, made as its configuration "
                "says, has not: split it in place, smp.tensor_parallelism(replace=False)"
            )
        given = parameters | self.to_ours(dict(original.named_buffers()))
        replacement.take_over(original, made, path, given)
        functions = state.module_manager.translate_functions
        if (self.to_hugging_face, self.to_ours) not in functions:
            functions.append((self.to_hugging_face, self.to_ours))
        return made

    def _make(self, original: nn.Module, config: Mapping[str, Any]) -> nn.Module:
        """The distributed module, with new weights.  Collective over the TP_GROUP.

        Args:
            original: what it takes the place of.
            config: what the original was marked with; of its keys those that are options.
        """
        accepted = inspect.signature(self.dist_module.__init__).parameters
        chosen = {key: value for key, value in config.items() if key in accepted}
        made = self.dist_module(**{**self.options(original), **chosen})
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
        made.__class__ = type(base.__name__, (base,), members)
        if hasattr(original, "config"):
            made.config = original.config  # scripts ask the wrapped model for it
        return made


def refuse(arguments: Arguments, *names: str) -> None:
    """Raise on arguments that the distributed form has no use for.

    Raises:
        NotImplementedError: names the first one that is given.
    """
    for name in names:
        if arguments.get(name) is not None and arguments[name] is not False:
            instead = "pass use_cache=False, or " if "past" in name else ""
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
    """A mask that is added to scores, from what layers of transformers get.

    Args:
        mask: of bools, True where a position is seen; ``[samples, positions]``, 1 where it is;
            or added to scores already.
        like: the hidden state.
    """
    if mask is None or (mask.dim() == 4 and mask.dtype != torch.bool):
        return mask
    seen = mask if mask.dim() == 4 else mask[:, None, None, :].bool()
    return torch.zeros_like(seen, dtype=like.dtype).masked_fill(~seen, HIDES)


def language_model(module: Any, arguments: Arguments, *cross: Tensor | None) -> Any:
    """Call a ``DistributedTransformerLMHead`` as a ``...ForCausalLM`` is called.

    In training with labels there are no logits: no rank has them whole.
    """
    refuse(
        arguments, "past_key_values", "inputs_embeds", "head_mask", "output_attentions",
        "output_hidden_states", "cache_position",
    )  # fmt: skip
    labels, keep = arguments.get("labels"), arguments.get("logits_to_keep")
    given = (
        arguments["input_ids"],
        hidden_positions(arguments.get("attention_mask")),
        arguments.get("token_type_ids"),
        arguments.get("position_ids"),
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
    if logits is not None and keep is not None:
        logits = logits[:, slice(-keep, None) if isinstance(keep, int) else keep]
    wanted = arguments.get("return_dict")
    if wanted if wanted is not None else getattr(module.config, "return_dict", True):
        outputs = importlib.import_module("transformers.modeling_outputs")
        return outputs.CausalLMOutputWithCrossAttentions(loss=loss, logits=logits)
    return tuple(value for value in (loss, logits) if value is not None)
