"""Parts of users' own distributed modules, under the original's names.

``smp.nn.utils`` and ``smdistributed.modelparallel.torch.nn.utils`` are this module.
"""

from smp.nn import parameter_creation
from smp.tensor_parallel import group, primitives

parameter_creation_scope = parameter_creation.parameter_creation_scope
initialize_with_input_partition = parameter_creation.initialize_with_input_partition
initialize_with_output_partition = parameter_creation.initialize_with_output_partition
fused_allgather_for_tp = primitives.fused_allgather_for_tp
reduce_scatter_for_tp = primitives.reduce_scatter_for_tp
scatter_and_merge_for_tp = primitives.scatter_and_merge_for_tp
fwd_allreduce_for_tp = primitives.fwd_allreduce_for_tp
bwd_allreduce_for_tp = primitives.bwd_allreduce_for_tp
shard_sequence = primitives.shard_sequence


def get_local_channels(n: int) -> int:
    """The number of this tp_rank's channels of ``n``, by the cut of ``torch.tensor_split``.

    Args:
        n: channels of all tp_ranks; it need not divide.
    """
    return group.shares(n)[group.rank()]


def get_start_pos_for_slicing(n: int) -> int:
    """The first of this tp_rank's channels of ``n``, counted from 0.

    Args:
        n: channels of all tp_ranks; it need not divide.
    """
    return sum(group.shares(n)[: group.rank()])
