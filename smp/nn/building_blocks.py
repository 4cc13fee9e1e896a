"""What users' own distributed modules are made of, by the names of the original.

``smp.nn.utils`` and ``smdistributed.modelparallel.torch.nn.utils`` are this module.
"""

from smp import not_built

parameter_creation_scope = not_built.function("smp.nn.utils.parameter_creation_scope")
initialize_with_input_partition = not_built.function(
    "smp.nn.utils.initialize_with_input_partition"
)
initialize_with_output_partition = not_built.function(
    "smp.nn.utils.initialize_with_output_partition"
)
fused_allgather_for_tp = not_built.function("smp.nn.utils.fused_allgather_for_tp")
fwd_allreduce_for_tp = not_built.function("smp.nn.utils.fwd_allreduce_for_tp")
bwd_allreduce_for_tp = not_built.function("smp.nn.utils.bwd_allreduce_for_tp")
scatter_and_merge_for_tp = not_built.function("smp.nn.utils.scatter_and_merge_for_tp")
reduce_scatter_for_tp = not_built.function("smp.nn.utils.reduce_scatter_for_tp")
shard_sequence = not_built.function("smp.nn.utils.shard_sequence")
get_local_channels = not_built.function("smp.nn.utils.get_local_channels")
get_start_pos_for_slicing = not_built.function("smp.nn.utils.get_start_pos_for_slicing")
