"""``smdistributed.modelparallel.torch`` is ``smp``: the same modules, the same objects.

``__version__`` is that of the interface, which scripts compare; ``smp.__version__`` is
the project's own.
"""

from smdistributed.modelparallel import _aliases

__version__ = "1.15.0"

_aliases.install()
