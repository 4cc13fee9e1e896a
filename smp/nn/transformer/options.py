"""The options of the transformer's modules: one set, and each module takes some.

Names and defaults are the original's.  Sources: the SageMaker paper, appendix I.3; SageMaker
Python SDK documentation, ``smp.nn``.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from torch import nn

from smp import ranks
from smp.tensor_parallel import group
from smp.tensor_parallel.rows.activations import ACTIVATIONS


@dataclass(frozen=True)
class Options:
    """Options of ``smp.nn.DistributedTransformerLMHead`` and of its parts.

    Attributes:
        num_layers: of the transformer.
        num_attention_heads: on all tp_ranks together; need not divide.
        attention_head_size: channels of a head.
        hidden_size: channels of the residual stream.
        intermediate_size: channels between the two linears of the output layer.
        vocab_size, num_positions: rows of the embeddings; 0 positions: there is none.
        attention_dropout_prob: of the attention's probabilities.
        hidden_dropout_prob: of the terms added to the residual stream.
        embedding_dropout_prob: of the embeddings, in the LM head model.
        activation: between the linears of the output layer, a name of ``ACTIVATIONS``.
        layernorm_epsilon: added to variances.
        num_token_types: rows of the token types' embedding; 0: there is none.
        causal_mask_size: the largest number of positions of a model whose positions see the
            earlier ones only; None: they see all.
        add_cross_attention: whether layers attend to ``cross_states``, too.
        cross_attention: whether this attention is such a one.
        add_lm_head: whether the model ends in logits, with the word embedding's weight.
        tie_input_output_embedding: whether the head's weight is the word embedding's.
        use_lm_head_bias: whether the head has a bias.
        initializer_range: standard deviation of new weights, with
            ``use_normal_initialization``; else they are torch's.
        pre_layernorm, post_layernorm: whether a layer normalises its input, its output.
        final_layernorm: whether the LM head model normalises its transformer's result; None: if
            the transformer does not, the case with ``pre_layernorm`` alone.
        use_qkv_bias, use_attn_dense_bias: whether those linears have biases.
        use_alibi: whether scores fall with the distance (ALiBi).
        alibi_bias_max: the least of the heads' slopes is 2 ** -alibi_bias_max a position.
        rotary_dim: first channels of a head, rotated by their position; 0: none.
        rotary_base: of the angles.
        rotary_pairs: "neighbours" rotates channels 2i and 2i + 1 (GPT-J), "halves" i and
            i + rotary_dim / 2 (GPT-NeoX).
        parallel_attn_output: whether attention and output layer have the same input.
        single_pre_layernorm: whether they have the same layer norm, too.
        attention_in_fp32: whether scores are computed in float32 where hidden states are
            narrower.
        query_key_layer_scaling: whether scores are computed divided by the layer's number
            from 1, and multiplied again in float32: the same function, without overflow.
        scale_attention_scores: whether scores are divided by the root of the head's size.
        scale_attn_by_layer_idx: whether they are divided by the layer's number from 1, too.
        layer_idx: the layer's number, from 0.
        mask_value: added to the scores of later positions, instead of minus infinity.
        window_size: how many positions, its own the last, a position sees; for a transformer
            also one number (or None) a layer.
        fp32_residual_addition: whether residual connections are added in float32.
        fused_softmax, fused_dropout, fused_bias_gelu: of no effect: kernels are chosen by
            themselves.
        flash_attention: whether attention is a ``smp.nn.FlashAttentionLayer``.
        optimize: "speed" keeps tokens gathered from all tp_ranks for the backward, "memory"
            gathers them again; with ``prescaled_batch`` it cuts the residual stream along its
            positions.  "channels" splits the residual stream by its channels: nothing is
            gathered, and more travels.  None: as in ``smp.init``.
    """

    num_layers: int = 12
    num_attention_heads: int = 32
    attention_head_size: int = 32
    hidden_size: int = 1024
    intermediate_size: int = 4096
    vocab_size: int = 30522
    num_positions: int = 1024
    attention_dropout_prob: float = 0.1
    hidden_dropout_prob: float = 0.1
    activation: str = "gelu"
    layernorm_epsilon: float = 1e-5
    num_token_types: int = 0
    causal_mask_size: int | None = None
    add_cross_attention: bool = False
    cross_attention: bool = False
    add_lm_head: bool = True
    initializer_range: float = 0.02
    use_normal_initialization: bool = False
    pre_layernorm: bool = False
    post_layernorm: bool = True
    embedding_dropout_prob: float = 0.1
    tie_input_output_embedding: bool = True
    use_lm_head_bias: bool = False
    final_layernorm: bool | None = None
    use_qkv_bias: bool = True
    use_attn_dense_bias: bool = True
    use_alibi: bool = False
    alibi_bias_max: int = 8
    rotary_dim: int | None = None
    rotary_base: float = 10000.0
    rotary_pairs: str = "neighbours"
    parallel_attn_output: bool = False
    single_pre_layernorm: bool = False
    attention_in_fp32: bool = False
    query_key_layer_scaling: bool = False
    scale_attention_scores: bool = True
    scale_attn_by_layer_idx: bool = False
    layer_idx: int = 0
    mask_value: float | None = None
    window_size: int | Sequence[int | None] | None = None
    fp32_residual_addition: bool = False
    fused_softmax: bool = True
    fused_dropout: bool = False
    fused_bias_gelu: bool = False
    flash_attention: bool = False
    optimize: str | None = None

    def optimizes(self) -> str:
        """``optimize``, or that of ``smp.init``; "speed" before that."""
        if self.optimize is not None:
            return self.optimize
        is_told = ranks.state.is_initialized
        return ranks.state.job("smp").cfg.optimize if is_told else "speed"

    def splits_channels(self) -> bool:
        """Whether each tp_rank has some channels of the residual stream."""
        return self.optimizes() == "channels" and group.size() > 1

    def check(self, name: str) -> None:
        """Refuse senseless values.

        Args:
            name: of the class, for errors.

        Raises:
            ValueError: the text names the option, its value and the values wanted.
        """

        def wants(right: bool, option: str, wanted: str) -> None:
            if not right:
                value = getattr(self, option)
                raise ValueError(f"smp.nn.{name}: {option}={value!r}: {wanted}")

        for option in _COUNTS:
            wants(getattr(self, option) > 0, option, "must be at least 1")
        for option in ("num_positions", "num_token_types"):
            wants(getattr(self, option) >= 0, option, "must be at least 0")
        wants(
            self.activation in ACTIVATIONS, "activation", f"must be one of {list(ACTIVATIONS)}"
        )
        for option in _PROBABILITIES:
            wants(0 <= getattr(self, option) < 1, option, "must be in [0, 1)")
        wants(
            self.pre_layernorm or self.post_layernorm,
            "post_layernorm",
            "pre_layernorm or post_layernorm must be True",
        )
        wants(self.rotary_pairs in ("neighbours", "halves"), "rotary_pairs", _ROTARY_PAIRS)
        dim = self.rotary_dim or 0
        wants(
            0 <= dim <= self.attention_head_size and dim % 2 == 0,
            "rotary_dim",
            f"must be even and at most attention_head_size={self.attention_head_size}",
        )
        windows = self.window_size
        each = windows if isinstance(windows, Sequence) else [windows]
        wants(all(w is None or w > 0 for w in each), "window_size", "must be at least 1")
        wants(
            not self.window_size or self.causal_mask_size is not None,
            "window_size",
            "needs causal_mask_size: a window is of earlier positions",
        )
        wants(
            not self.parallel_attn_output or (self.pre_layernorm and not self.post_layernorm),
            "parallel_attn_output",
            "needs pre_layernorm=True and post_layernorm=False",
        )
        wants(
            not self.single_pre_layernorm or self.parallel_attn_output,
            "single_pre_layernorm",
            "needs parallel_attn_output=True",
        )
        wants(
            not (self.parallel_attn_output and self.add_cross_attention),
            "parallel_attn_output",
            "does not go with add_cross_attention",
        )
        wants(self.optimize in (None, "speed", "memory", "channels"), "optimize", _OPTIMIZE)

    def of(self, taken: Sequence[str], **changes: Any) -> dict[str, Any]:
        """Those of these names, for another module's ``__init__``.

        Args:
            taken: the names.
            changes: values in place of this one's.
        """
        return {name: changes.get(name, getattr(self, name)) for name in taken}

    def initialize(self, module: nn.Module) -> None:
        """Give new weights of linears and embeddings their values.

        Args:
            module: with all parts inside.
        """
        if not self.use_normal_initialization:
            return
        for one in module.modules():
            if isinstance(one, nn.Linear | nn.Embedding) and one.weight is not None:
                one.weight.data.normal_(0.0, self.initializer_range)
            if isinstance(one, nn.Linear) and one.bias is not None:
                one.bias.data.zero_()


_COUNTS = (
    "num_layers", "num_attention_heads", "attention_head_size", "hidden_size",
    "intermediate_size", "vocab_size",
)  # fmt: skip
_PROBABILITIES = [f"{of}_dropout_prob" for of in ("attention", "hidden", "embedding")]
_ROTARY_PAIRS = "must be 'neighbours' or 'halves'"
_OPTIMIZE = "must be 'speed', 'memory' or 'channels'"

_DEFAULTS = {field.name: field.default for field in fields(Options)}
Class = TypeVar("Class", bound=type[nn.Module])


def takes(*names: str) -> Callable[[Class], Class]:
    """Give a class an ``__init__`` with these options, in this order.

    It checks them and calls ``build(options)``.
    """

    def decorate(cls: Class) -> Class:
        order = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        order += [
            inspect.Parameter(
                name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=_DEFAULTS[name]
            )
            for name in names
        ]
        signature = inspect.Signature(order)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                given = signature.bind(self, *args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"smp.nn.{cls.__name__}: {error}") from None
            del given["self"]
            nn.Module.__init__(self)
            options = Options(**given)
            options.check(cls.__name__)
            self.options = options
            self.build(options)

        __init__.__signature__ = signature  # type: ignore[attr-defined]
        __init__.__doc__ = f"{cls.__name__} with these of the options of ``Options``."
        cls.__init__ = __init__  # type: ignore[method-assign, misc]
        cls.TAKES = names  # type: ignore[attr-defined]
        return cls

    return decorate
