"""The project's own version; `smdistributed.modelparallel` has that of the interface."""

__version__ = "0.2.0"
