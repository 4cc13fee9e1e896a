"""Importing this makes the backend ``smddp`` known to ``torch.distributed``.

Under mpirun it also sets what of RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
is missing, so that ``init_process_group("smddp")`` finds the other processes.
"""

from smp.collectives import backend, launch

backend.register()
launch.complete_environment()
