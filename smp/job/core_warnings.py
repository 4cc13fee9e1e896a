"""Warnings of the core, raised as Python's.

The core's threads and functions cannot raise: their texts wait (``smp_warn()`` in
``csrc/common/log.h``) for the script's thread.
"""

import warnings

from smp import _core


def pass_on() -> None:
    """Raise the waiting warnings, each once."""
    while (text := _core.take_warning()) is not None:
        warnings.warn(f"smp: {text}", stacklevel=2)
