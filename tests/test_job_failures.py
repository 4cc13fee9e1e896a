"""Spec: what a user sees when a rank dies or is interrupted in the middle of a step."""

import re
from pathlib import Path

import pytest

from tests.ranks import mpirun, wait_until_gone

SCRIPT = """
import ctypes, os, signal, sys, time
import torch
from torch import nn
import smp

class Part(nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 20 and smp.rank() == 1:
            print("ends at", time.time(), flush=True)
            {how}
        return super().forward(x)

smp.init({{"pipeline_parallel_degree": 2, "microbatches": 4}})
net = nn.Sequential(nn.Linear(16, 16), Part(16, 16))
smp.set_partition(net[0], 0)
smp.set_partition(net[1], 1)
model = smp.DistributedModel(net)

@smp.step
def train(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss

try:
    for _ in range(100):
        train(model, torch.randn(16, 16))
except BaseException as error:
    print(f"rank {{smp.rank()}} saw {{type(error).__name__}} at", time.time(), flush=True)
    raise
print("finished")
"""

ENDINGS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", {0: "ConnectionError"}),
    "crashed": ("ctypes.string_at(0)", {0: "ConnectionError"}),
    "Ctrl-C": (
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(0)",
        {0: "KeyboardInterrupt", 1: "KeyboardInterrupt"},
    ),
    "raised": ("raise ValueError('no good')", {0: "ValueError", 1: "ValueError"}),
    "sys.exit": ("sys.exit(3)", {0: "SystemExit", 1: "SystemExit"}),
}


def ours_in_shared_memory() -> set[str]:
    return {p.name for p in Path("/dev/shm").iterdir() if "smp" in p.name}


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_rank_hears_of_the_end_of_one(tmp_path, ending):
    """The others name what happened, all ranks end, the exit code is not 0, and nothing
    of ours is left in shared memory."""
    how, seen = ENDINGS[ending]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(how=how))
    before = ours_in_shared_memory()

    done = mpirun(2, script, timeout_s=60)

    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "finished" not in said
    for rank, error in seen.items():
        assert f"rank {rank} saw {error}" in said, said
    if ending in ("killed", "crashed"):
        assert re.search(
            r"pp_rank 1 is gone .*on pp_rank 0: microbatch \d, (forward|backward): "
            r"the step function waits for (the backward of )?module '1' on pp_rank 1",
            said,
        ), said
    if ending == "raised":
        assert re.search(r"raised on pp_rank 1 in module '1', microbatch \d, forward", said)
    assert ours_in_shared_memory() <= before


KILLED = """
import os, random, signal, sys, threading
import torch
from torch import nn
import smp

victim, moment = map(int, sys.argv[1:])
smp.init({"pipeline_parallel_degree": 2, "microbatches": 4})
net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
for i, part in enumerate(net):
    smp.set_partition(part, i % 2)
model = smp.DistributedModel(net)

@smp.step
def train(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss

train(model, torch.randn(64, 64))
print("pid", os.getpid(), flush=True)

def kill():
    for _ in range(random.Random(moment).randrange(100_000)):
        pass
    os.kill(os.getpid(), signal.SIGKILL)

if smp.rank() == victim:
    threading.Thread(target=kill, daemon=True).start()
while True:
    train(model, torch.randn(64, 64))
"""


@pytest.mark.parametrize("moment", range(4))
def test_a_rank_killed_at_any_instant_leaves_nothing_behind(tmp_path, moment):
    """The other says who died; no process and no shared memory is left."""
    script = tmp_path / "train.py"
    script.write_text(KILLED)
    before = ours_in_shared_memory()
    victim = moment % 2

    done = mpirun(2, script, str(victim), str(moment), timeout_s=60)

    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert f"pp_rank {victim} is gone" in said, said
    wait_until_gone([int(pid) for pid in re.findall(r"pid (\d+)", said)])
    assert ours_in_shared_memory() <= before
