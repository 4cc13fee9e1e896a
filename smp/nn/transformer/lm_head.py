"""``DistributedTransformerLMHead``: embeddings, a transformer, and logits or a loss."""

import torch
from torch import Tensor, nn

from smp.nn.cross_entropy import vocabulary_parallel_cross_entropy
from smp.nn.distributed_linear import DistributedLinear
from smp.nn.embedding import DistributedEmbedding
from smp.nn.layer_norm import FusedLayerNorm
from smp.nn.transformer.layer import DistributedTransformer
from smp.nn.transformer.options import Options, takes
from smp.nn.transformer.seeds import dropout_of_stream
from smp.tensor_parallel.rows.kernels import HIDES
from smp.tensor_parallel.splits.distributed_module import DistributedModule


@takes(
    "num_layers", "num_attention_heads", "attention_head_size", "hidden_size",
    "intermediate_size", "vocab_size", "num_positions", "attention_dropout_prob",
    "hidden_dropout_prob", "activation", "layernorm_epsilon", "num_token_types",
    "causal_mask_size", "add_cross_attention", "add_lm_head", "initializer_range",
    "use_normal_initialization", "pre_layernorm", "post_layernorm", "embedding_dropout_prob",
    "tie_input_output_embedding", "use_lm_head_bias", "final_layernorm", "use_qkv_bias",
    "use_attn_dense_bias", "use_alibi", "alibi_bias_max", "rotary_dim", "rotary_base",
    "rotary_pairs", "parallel_attn_output", "single_pre_layernorm", "attention_in_fp32",
    "query_key_layer_scaling", "scale_attention_scores", "scale_attn_by_layer_idx",
    "mask_value", "window_size", "fp32_residual_addition", "fused_softmax", "fused_dropout",
    "fused_bias_gelu", "flash_attention", "optimize",
)  # fmt: skip
class DistributedTransformerLMHead(DistributedModule):
    """Word, position and token type embeddings, a transformer, and a head.

    Its options are those of :class:`smp.nn.transformer.options.Options`.

    Rows of the word embedding, and so of a tied head, are split over the TP_GROUP.

    ``forward`` takes one tuple, ``(ids, mask, token_types, position_ids, labels)``; with
    ``add_cross_attention`` ``(ids, mask, token_types, position_ids, cross_states, cross_mask,
    labels)``.  All but ``ids`` may be None.

    Raises:
        ValueError: an option out of range, or at odds with another; the text names it.
    """

    IS_CONTAINER = True
    options: Options

    def build(self, options: Options) -> None:
        """Make the modules inside.  Collective over the TP_GROUP.

        Args:
            options: those given to ``__init__``.
        """
        size, eps = options.hidden_size, options.layernorm_epsilon
        self.word_embedding = nn.Embedding(options.vocab_size, size)
        options.initialize(self.word_embedding)
        DistributedEmbedding.take_over(self.word_embedding, vocab_parallel=True)
        self.position_embedding = _embedding(options.num_positions, options)
        self.token_type_embedding = _embedding(options.num_token_types, options)
        self.transformer = DistributedTransformer(
            **options.of(DistributedTransformer.TAKES)  # type: ignore[attr-defined]
        )
        final = options.final_layernorm
        if final is None:
            final = options.pre_layernorm and not options.post_layernorm
        self.layernorm = FusedLayerNorm(size, eps) if final else None
        self.lm_head: DistributedLinear | None = None
        if options.add_lm_head:
            self.lm_head = self._head(options)

    def _head(self, options: Options) -> DistributedLinear:
        size, rows, bias = options.hidden_size, options.vocab_size, options.use_lm_head_bias
        if not options.tie_input_output_embedding:
            head = nn.Linear(size, rows, bias)
            options.initialize(head)
        else:
            head = nn.Linear(size, rows, bias=False, device="meta")
            head.weight = self.word_embedding.weight
            head.bias = nn.Parameter(torch.zeros(rows)) if bias else None  # type: ignore[assignment]
        DistributedLinear.take_over(head, by_outputs=True)
        assert isinstance(head, DistributedLinear)
        return head

    def forward(self, inputs: tuple[Tensor | None, ...]) -> Tensor:
        """Logits, or with labels the loss.  Collective over the TP_GROUP.

        Args:
            inputs: ``(ids, mask, token_types, position_ids, labels)``; with
                ``add_cross_attention`` cross_states and cross_mask stand before the labels.
                ids, token_types, position_ids and labels are ``[samples, positions]``.  Mask is
                ``[samples, positions]``, 1 where a position is hidden.  cross_states are
                ``[samples, others, hidden_size]``; cross_mask is ``[samples, 1, 1, others]``,
                added to the scores.  All but ids may be None.  A causal model's labels are the
                ids themselves: each position is to tell the next one's.  A label of -100 does
                not count.

        Returns:
            without labels: logits ``[samples, positions, vocab_size]``, or with
            ``add_lm_head=False`` hidden states ``[samples, positions, hidden_size]``.  With
            labels: the mean loss of this rank's samples, a scalar; no rank has whole logits.

        Raises:
            IndexError: an id or a label is no row of the embedding; on a GPU an assertion
                fails.
            TypeError: another number of inputs.
            ValueError: ids or mask of another shape, or more positions than
                ``num_positions``.
        """
        loss, logits = self.loss_and_logits(inputs, logits=False)
        out = logits if loss is None else loss
        assert out is not None
        return out

    def loss_and_logits(
        self, inputs: tuple[Tensor | None, ...], logits: bool, reduction: str = "mean"
    ) -> tuple[Tensor | None, Tensor | None]:
        """The loss, without labels None; and logits (or hidden states) without labels.

        Args:
            inputs: as for ``forward``.
            logits: whether to have them with labels, too.
            reduction: of the loss, "mean" or "sum" over the labels other than -100.
        """
        ids, mask, types, places, cross, labels = self._arguments(inputs)
        hidden = self.word_embedding(ids)
        if self.position_embedding is not None:
            if places is None:
                places = torch.arange(ids.size(1), device=ids.device)[None]
            hidden = hidden + self.position_embedding(places)
        if types is not None and self.token_type_embedding is not None:
            hidden = hidden + self.token_type_embedding(types)
        hidden = dropout_of_stream(hidden, self.options.embedding_dropout_prob, self.training)
        if mask is not None:
            mask = mask[:, None, None, :].to(hidden.dtype) * HIDES
        if cross is None:
            hidden = self.transformer((hidden, mask))[0]
        else:
            hidden = self.transformer((hidden, cross[0], mask, cross[1]))[0]
        if self.layernorm is not None:
            hidden = self.layernorm(hidden)
        if self.lm_head is None:
            return None, hidden
        if labels is None:
            return None, self.lm_head(hidden)
        return self._loss(hidden, labels, reduction), self.lm_head(hidden) if logits else None

    def _arguments(self, inputs: tuple[Tensor | None, ...]) -> tuple:
        crossing = self.options.add_cross_attention
        names = "(ids, mask, token_types, position_ids, labels)"
        if crossing:
            names = names.replace("labels", "cross_states, cross_mask, labels")
        if not isinstance(inputs, tuple | list) or len(inputs) != names.count(",") + 1:
            raise TypeError(f"smp.nn.DistributedTransformerLMHead takes one tuple {names}")
        ids, mask, types, places, *between, labels = inputs
        if ids is None or ids.dim() != 2:
            raise ValueError(
                "smp.nn.DistributedTransformerLMHead: ids must be [samples, positions], got "
                f"{None if ids is None else list(ids.shape)}"
            )
        most = self.options.num_positions
        if places is None and most and ids.size(1) > most:
            raise ValueError(
                f"smp.nn.DistributedTransformerLMHead: ids of shape {list(ids.shape)}: there "
                f"are num_positions={most}"
            )
        if mask is not None and (mask.dim() != 2 or mask.size(1) != ids.size(1)):
            raise ValueError(
                f"smp.nn.DistributedTransformerLMHead: mask of shape {list(mask.shape)} with "
                f"ids of shape {list(ids.shape)}: must be [samples, positions], 1 where a "
                "position is hidden"
            )
        return ids, mask, types, places, between or None, labels

    def _loss(self, hidden: Tensor, labels: Tensor, reduction: str) -> Tensor:
        assert self.lm_head is not None
        if self.options.causal_mask_size is not None:
            hidden, labels = hidden[:, :-1], labels[:, 1:]
        return vocabulary_parallel_cross_entropy(
            self.lm_head, hidden, labels, reduction=reduction
        )


def _embedding(rows: int, options: Options) -> nn.Embedding | None:
    if not rows:
        return None
    made = nn.Embedding(rows, options.hidden_size)
    options.initialize(made)
    return made
