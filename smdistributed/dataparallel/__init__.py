"""``smdistributed.dataparallel``: the collectives of ``smp.collectives``."""
