"""The exceptions of the library, under the name imported by launchers."""

from smp.data_parallel.group import ReplicasDiffer
from smp.execution.first_step import PartitionMismatch
from smp.job.collective_calls import CallMismatch
from smp.job.config import ConfigError
from smp.modules.pins import PartitionError
from smp.saving.saved_files import CheckpointError

__all__ = [
    "CallMismatch",
    "CheckpointError",
    "ConfigError",
    "PartitionError",
    "PartitionMismatch",
    "ReplicasDiffer",
]
