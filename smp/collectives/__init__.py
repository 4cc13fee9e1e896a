"""Collectives for ``torch.distributed``: the backend ``smddp``.

``backend`` makes the groups, ``process_group`` has torch's interface, and ``ranks`` connects
the processes.  An asynchronous call returns a ``work``; ``dense`` copies tensors into the
core's shape.  The collectives themselves are in ``csrc/comm/collective``.
"""
