"""``smp.nn``: modules for the user's own models."""

from torch import nn

from smp import not_built
from smp.nn import building_blocks

utils = building_blocks


class FusedLayerNorm(nn.LayerNorm):
    """Layer normalisation in one kernel, which PyTorch's own is.

    A class of its own, because scripts tell by ``isinstance`` which parameters get no
    weight decay.
    """


DistributedModule = not_built.class_of(nn.Module, "smp.nn.DistributedModule")
DistributedLinear = not_built.class_of(DistributedModule, "smp.nn.DistributedLinear")
DistributedEmbedding = not_built.class_of(DistributedModule, "smp.nn.DistributedEmbedding")
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
