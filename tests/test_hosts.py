"""Spec: a job on several hosts, which are network namespaces of this machine.

Each host has its own network, host name and /dev/shm, so that only the network connects
its ranks to those of the other.  Needs root, ``ip`` and ``unshare``.
"""

import os
import shutil
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
