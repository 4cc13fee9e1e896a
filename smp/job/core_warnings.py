"""What the core has to warn the script of, raised as warnings of Python's.

The core's threads and functions cannot: what they have to say waits (``smp_warn()`` in
``csrc/common/log.h``) until the script's thread comes by.
"""

import warnings

from smp import _core


def pass_on() -> None:
    """Warn of what waits, if anything does.  Once for each."""
    while (text := _core.take_warning()) is not None:
        warnings.warn(f"smp: {text}", stacklevel=2)
