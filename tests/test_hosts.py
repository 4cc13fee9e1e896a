"""Spec: a job on several hosts, which are network namespaces of this machine.

Each host has its own network, host name and /dev/shm, so that only the network connects
its ranks to those of the other.  Needs root, ``ip`` and ``unshare``.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import RanksFailed, mpirun_command, rank_environment

HOSTS = 2
SCRIPT = """
import sys
import torch
import torch.distributed as dist
import smp

smp.init({"pipeline_parallel_degree": 2, "placement_strategy": sys.argv[1]})
total = torch.tensor(float(smp.rank()))
dist.all_reduce(total)
seen = (
    smp.rank(), smp.local_rank(), smp.local_size(), smp.instance_id(), smp.is_multi_node(),
    smp.get_pp_group(), total.item(), smp.allgather(smp.rank(), smp.WORLD),
)
sys.stdout.write(f"seen {seen}\\n")
sys.stdout.flush()
smp.barrier()
"""

EQUAL_SCRIPT = """
import json
import sys
import smp
import torch
from tests.test_transports import begin, check_against_the_cut_loop, used

torch.manual_seed(0)
begin(**json.loads(sys.argv[1]))
check_against_the_cut_loop(30)
sys.stdout.write(f"rank {smp.rank()} over {sorted(used())}\\n")
sys.stdout.flush()
smp.barrier()
"""
ENDLESS_SCRIPT = """
import torch
from torch import nn
import smp

smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
smp.set_partition(net[0], 0)
smp.set_partition(net[1], 1)
model = smp.DistributedModel(net)

@smp.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

train(model, torch.randn(4, 16))
print("going", flush=True)
while True:
    train(model, torch.randn(4, 16))
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def agent(tmp_path) -> Iterator[Path]:
    """What mpirun starts its daemons with, in place of ssh: host i is 10.77.0.i."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("network namespaces need root, ip and unshare")
    names = [f"smp-test-{os.getpid()}-{i}" for i in range(HOSTS + 1)]
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
        except subprocess.CalledProcessError:
            pytest.skip("network namespaces are not permitted here")
        switch, *hosts = names
        ip("-n", switch, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "name", "switch", "type", "bridge")
        ip("-n", switch, "addr", "add", "10.77.0.250/24", "dev", "switch")
        ip("-n", switch, "link", "set", "switch", "up")
        for i, host in enumerate(hosts, start=1):
            ip(
                "link",
                "add",
                "net",
                "netns",
                host,
                "type",
                "veth",
                "peer",
                f"port{i}",
                "netns",
                switch,
            )
            ip("-n", switch, "link", "set", f"port{i}", "master", "switch", "up")
            ip("-n", host, "addr", "add", f"10.77.0.{i}/24", "dev", "net")
            ip("-n", host, "link", "set", "net", "up")
            ip("-n", host, "link", "set", "lo", "up")
        path = tmp_path / "agent"
        path.write_text(
            "#!/bin/sh\n"
            "host=$1; shift\n"
            f"exec ip netns exec smp-test-{os.getpid()}-${{host##*.}} unshare -u -m sh -c '\n"
            '    hostname "$1"; mount -t tmpfs tmpfs /dev/shm; eval "$2"\n'
            '\' sh host-${host##*.} "$*"\n'
        )
        path.chmod(0o755)
        (tmp_path / "switch").write_text(switch)
        yield path
    finally:
        for name in made:
            ip("netns", "del", name)


def mpirun_on_hosts(agent: Path, ranks: int, *argv: str | Path) -> str:
    """What a job on all hosts prints, with ``ranks`` on each of them."""
    switch = (agent.parent / "switch").read_text()
    where = ",".join(f"10.77.0.{i}:{ranks}" for i in range(1, HOSTS + 1))
    command = [
        *["ip", "netns", "exec", switch, *mpirun_command(ranks * HOSTS)],
        *["--prtemca", "plm_ssh_agent", str(agent), "--host", where],
        *["-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS", sys.executable, *map(str, argv)],
    ]
    process = subprocess.Popen(
        command,
        env=rank_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.terminate()  # mpirun takes its daemons and ranks with it
        process.wait()
    if process.returncode != 0:
        raise RanksFailed(f"{out}\n{err}")
    return out


@pytest.mark.parametrize(
    "strategy, groups", [("cluster", [[0, 1], [2, 3]]), ("spread", [[0, 2], [1, 3]])]
)
def test_two_hosts_with_two_ranks_each(agent, tmp_path, strategy, groups):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    out = mpirun_on_hosts(agent, 2, script, strategy)

    for rank in range(4):
        [group] = [group for group in groups if rank in group]
        seen = (rank, rank % 2, 2, rank // 2, True, group, 6.0, [0, 1, 2, 3])
        assert f"seen {seen}\n" in out


@pytest.mark.parametrize(
    "config, over",
    [
        ("{}", ["shm", "tcp"]),
        ('{"comm_transports": ["tcp"], "comm_interface": "10.77.0.0/24"}', ["tcp"]),
        ('{"comm_transports": ["shm", "mpi"]}', ["mpi", "shm"]),
    ],
    ids=["default", "tcp", "mpi"],
)
def test_across_hosts_the_results_have_the_same_bits(agent, tmp_path, config, over):
    """A pipeline of four ranks on two hosts equals the cut loop, bit for bit."""
    script = tmp_path / "script.py"
    script.write_text(EQUAL_SCRIPT)

    out = mpirun_on_hosts(agent, 2, script, config)

    for rank in range(4):
        assert f"rank {rank} over {over}\n" in out


def start_without_mpi(agent: Path, script: Path) -> list[subprocess.Popen]:
    """One rank on each host, started as torchrun does."""
    environment = {
        k: v for k, v in rank_environment().items() if not k.startswith(("OMPI_", "PMI"))
    }
    return [
        subprocess.Popen(
            [str(agent), f"10.77.0.{rank + 1}", sys.executable, str(script)],
            env={
                **environment,
                "RANK": str(rank),
                "WORLD_SIZE": str(HOSTS),
                "LOCAL_RANK": "0",
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": "29577",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(HOSTS)
    ]


def test_a_host_that_falls_silent_is_named(agent, tmp_path):
    """Its cable is pulled in the middle of a step: no connection is closed, nothing comes."""
    script = tmp_path / "script.py"
    script.write_text(ENDLESS_SCRIPT)
    switch = (agent.parent / "switch").read_text()
    ranks = start_without_mpi(agent, script)
    try:
        for rank in ranks:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            assert line == "going\n", rank.communicate(timeout=60)
        ip("-n", switch, "link", "set", "port2", "down")
        said = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
    for i, rank in enumerate(ranks):
        assert rank.returncode != 0
        assert f"pp_rank {1 - i} is gone" in said[i][1], said
