"""The project's own version; `smdistributed.modelparallel` has the interface's."""

__version__ = "0.2.0"
