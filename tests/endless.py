"""Scripts of two ranks that work until one of them is lost.

Each rank prints ``going`` once all work; who learns that the other is lost prints when,
by the machine's monotonic clock, and fails.
"""

SCRIPTS = {
    "pipeline": """
from tests.models.jobs import *

model = chain(nn.Linear(16, 16), nn.Linear(16, 16), microbatches=2)
train(model, torch.randn(4, 16))
print("going", flush=True)
try:
    while True:
        train(model, torch.randn(4, 16))
except ConnectionError:
    print(time.monotonic(), flush=True)
    raise
""",
    "smddp": """
import os
import sys
import time
import traceback
import torch
import torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp

dist.init_process_group("smddp")
small, large = torch.ones(3), torch.ones(1_000_000)
dist.barrier()
print("going", flush=True)
try:
    while True:
        dist.all_reduce(small)
        dist.all_reduce(large)
except dist.DistBackendError:
    print(time.monotonic(), flush=True)
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # the store of a silent host answers nobody
""",
}

# What it is told of the other.
LOST = {"pipeline": "pp_rank {} is gone", "smddp": "rank {} is lost"}
