"""Model parallelism for PyTorch without rewriting the model."""

from importlib.util import find_spec as _find_spec

from smp import torch_versions as _torch_versions  # first: refuses an older PyTorch

if _find_spec("smp._core") is None:
    raise ImportError(
        f"smp's core is not built in {__path__[0]}: run pip install . in the repository, and "
        "start scripts elsewhere; or build it there: python setup.py build_ext --inplace"
    )

from smp import amp, nn, optimizers
from smp._version import __version__
from smp.checkpointing.activation_checkpointing import set_activation_checkpointing
from smp.collectives.objects import (
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    mp_barrier,
    pp_barrier,
    rdp_barrier,
    recv_from,
    send,
    tp_barrier,
)
from smp.compat import script_names as utils
from smp.data_parallel.group import ReplicasDiffer
from smp.distributed_optimizer import DistributedOptimizer
from smp.execution.first_step import PartitionMismatch
from smp.execution.model_creation import model_creation
from smp.execution.planning import plan
from smp.execution.steps import is_tracing, step
from smp.job.collective_calls import CallMismatch
from smp.job.config import ConfigError
from smp.memory import memory_report
from smp.model import DistributedModel, clip_grad_norm_
from smp.modules.delayed_init import delay_param_initialization
from smp.modules.device_placement import empty_cache
from smp.modules.pins import PartitionError, partition, set_partition
from smp.partitioning.report import PartitionReport
from smp.ranks import (
    DP_GROUP,
    DP_RANK,
    MP_GROUP,
    MP_RANK,
    PP_GROUP,
    PP_RANK,
    RDP_GROUP,
    RDP_RANK,
    TP_GROUP,
    TP_RANK,
    WORLD,
    WORLD_RANK,
    CommGroup,
    RankType,
    dp_rank,
    dp_size,
    get_dp_group,
    get_dp_process_group,
    get_mp_group,
    get_mp_process_group,
    get_pp_group,
    get_pp_process_group,
    get_rdp_group,
    get_rdp_process_group,
    get_tp_group,
    get_tp_process_group,
    get_world_process_group,
    instance_id,
    is_multi_node,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    size,
    tp_rank,
    tp_size,
)
from smp.runtime.microbatches import StepOutput
from smp.saving.checkpoints import resume_from_checkpoint, save_checkpoint
from smp.saving.saved_files import CheckpointError, load, save
from smp.start.comm_report import comm_report
from smp.start.initialization import init, is_initialized, reset, shutdown
from smp.state_mod import core, state
from smp.tensor_parallel.splits.marking import set_tensor_parallelism, tensor_parallelism
from smp.tensor_parallel.splits.replacement import tp_register, tp_register_with_module
from smp.timeline.summary import TraceSummary
from smp.timeline.timeline import save_trace, trace_summary
