"""``smp.nn``: modules for the user's own models."""

import sys

from torch import nn

from smp.nn import building_blocks
from smp.nn.cross_entropy import (
    DistributedCrossEntropyLoss,
    vocabulary_parallel_cross_entropy,
)
from smp.nn.distributed_linear import DistributedLinear
from smp.nn.embedding import DistributedEmbedding
from smp.nn.layer_norm import DistributedLayerNorm, FusedLayerNorm
from smp.nn.transformer.attention import DistributedAttentionLayer, FlashAttentionLayer
from smp.nn.transformer.layer import DistributedTransformer, DistributedTransformerLayer
from smp.nn.transformer.lm_head import DistributedTransformerLMHead
from smp.nn.transformer.output_layer import DistributedTransformerOutputLayer
from smp.tensor_parallel.splits import in_place
from smp.tensor_parallel.splits.distributed_module import DistributedModule

# ``import smp.nn.utils`` looks there.
utils = sys.modules["smp.nn.utils"] = building_blocks

__all__ = [
    "DistributedAttentionLayer",
    "DistributedCrossEntropyLoss",
    "DistributedEmbedding",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "utils",
    "vocabulary_parallel_cross_entropy",
]

in_place.register_leaf(nn.Linear, DistributedLinear.take_over)
in_place.register_leaf(nn.Embedding, DistributedEmbedding.take_over)
