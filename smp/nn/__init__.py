"""``smp.nn``: modules for the user's own models."""

from torch import nn

from smp import not_built
from smp.nn import building_blocks
from smp.nn.cross_entropy import (
    DistributedCrossEntropyLoss as DistributedCrossEntropyLoss,
)
from smp.nn.cross_entropy import (
    vocabulary_parallel_cross_entropy as vocabulary_parallel_cross_entropy,
)
from smp.nn.distributed_module import DistributedModule
from smp.nn.embedding import DistributedEmbedding
from smp.nn.linear import DistributedLinear
from smp.tensor_parallel import in_place

utils = building_blocks


class FusedLayerNorm(nn.LayerNorm):
    """Layer normalisation in one kernel, which PyTorch's own is.

    A class of its own, because scripts tell by ``isinstance`` which parameters get no
    weight decay.
    """


DistributedLayerNorm = not_built.class_of(DistributedModule, "smp.nn.DistributedLayerNorm")
DistributedAttentionLayer = not_built.class_of(
    DistributedModule, "smp.nn.DistributedAttentionLayer"
)
DistributedTransformerOutputLayer = not_built.class_of(
    DistributedModule, "smp.nn.DistributedTransformerOutputLayer"
)
DistributedTransformerLayer = not_built.class_of(
    DistributedModule, "smp.nn.DistributedTransformerLayer"
)
DistributedTransformer = not_built.class_of(DistributedModule, "smp.nn.DistributedTransformer")
DistributedTransformerLMHead = not_built.class_of(
    DistributedModule, "smp.nn.DistributedTransformerLMHead"
)
FlashAttentionLayer = not_built.class_of(nn.Module, "smp.nn.FlashAttentionLayer")

in_place.register_leaf(nn.Linear, DistributedLinear.take_over)
in_place.register_leaf(nn.Embedding, DistributedEmbedding.take_over)
