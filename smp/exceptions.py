"""The exceptions of the library, under the name that launchers import them from."""

from smp.config import ConfigError
from smp.partitioning import PartitionError

__all__ = ["ConfigError", "PartitionError"]
