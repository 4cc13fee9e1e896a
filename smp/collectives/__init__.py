"""Collectives for ``torch.distributed``: the backend ``smddp``.

``backend`` makes the groups, ``process_group`` has torch's interface, ``ranks`` connects the
processes, ``work`` is what an asynchronous call returns, ``dense`` brings tensors into the
shape that the core takes.  The collectives themselves are in ``csrc/comm/collective``.
"""
