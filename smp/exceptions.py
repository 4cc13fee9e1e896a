"""The exceptions of the library, under the name that launchers import them from."""

from smp.job.config import ConfigError
from smp.partitioning.partition import PartitionError

__all__ = ["ConfigError", "PartitionError"]
