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

from tests.ranks import RanksFailed, mpirun, mpirun_command, rank_environment

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

COLLECTIVES_SCRIPT = """
import hashlib
import os
import sys
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = sys.argv[1], sys.argv[2]
import torch
import torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
from torch import nn

dist.init_process_group("smddp")
rank, size = dist.get_rank(), dist.get_world_size()
seen = hashlib.blake2b()


def see(*tensors):
    for tensor in tensors:
        seen.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())


def mine(count, dtype=torch.float32):
    torch.manual_seed(count * size + rank)
    return torch.randn(count).mul_(torch.logspace(-3, 3, count)).to(dtype)


dist.barrier()
for count in (size, 1000 * size, 300_000 * size):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        for dtype in (torch.float32, torch.bfloat16):
            x = mine(count, dtype)
            dist.all_reduce(x, op)
            see(x)
    part = torch.empty(count // size)
    dist.reduce_scatter_tensor(part, mine(count))
    whole = torch.empty(count)
    dist.all_gather_into_tensor(whole, part)
    see(whole)
    for root in range(size):
        x = mine(count)
        dist.broadcast(x, root)
        see(x)
    dist.all_to_all_single(whole, mine(count))
    parts = [torch.empty(count) for _ in range(size)]
    dist.all_gather(parts, whole)
    see(*parts)
x = torch.tensor([float(rank)])
dist.send(x, (rank + 1) % size)
dist.recv(x, (rank - 1) % size)
assert x.item() == (rank - 1) % size
odd = dist.new_group([1, 3])
if rank % 2:
    x = mine(5000)
    dist.all_reduce(x, group=odd)
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x, group=odd)
    assert parts[0].equal(parts[1])
    gathered = x
else:
    gathered = torch.zeros(5000)
dist.broadcast(gathered, 1)
see(gathered)

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 1))
model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.01)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(10):
    model(mine(40 * 16).view(16, 40)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
see(*net.parameters())
print("digest", seen.hexdigest(), flush=True)
dist.destroy_process_group()
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
        out, err = process.communicate(timeout=200)
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
        ('{"comm_transports": ["shm", "ucx"]}', ["shm", "ucx"]),
        ('{"comm_transports": ["ucx"], "comm_interface": "10.77.0.0/24"}', ["ucx"]),
    ],
    ids=["default", "tcp", "mpi", "ucx", "ucx alone"],
)
def test_across_hosts_the_results_have_the_same_bits(agent, tmp_path, config, over):
    """A pipeline of four ranks on two hosts equals the cut loop, bit for bit."""
    script = tmp_path / "script.py"
    script.write_text(EQUAL_SCRIPT)

    out = mpirun_on_hosts(agent, 2, script, config)

    for rank in range(4):
        assert f"rank {rank} over {over}\n" in out


def test_collectives_across_hosts_have_the_bits_of_one_host(agent, tmp_path):
    """smddp on 2 hosts of 2 ranks: all operations, sub-groups and DDP."""
    script = tmp_path / "script.py"
    script.write_text(COLLECTIVES_SCRIPT)

    on_one = mpirun(4, script, "127.0.0.1", "29578", timeout_s=200)
    on_two = mpirun_on_hosts(agent, 2, script, "10.77.0.1", "29578")

    assert on_one.returncode == 0, on_one.stderr
    digests = [line for line in on_one.stdout.splitlines() if line.startswith("digest")]
    assert len(digests) == 4 and len(set(digests)) == 1, on_one.stdout
    assert sorted(on_two.splitlines()) == digests


def start_without_mpi(agent: Path, script: Path, transports: str) -> list[subprocess.Popen]:
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
                "SMP_COMM_TRANSPORTS": transports,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(HOSTS)
    ]


@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_a_host_that_falls_silent_is_named(agent, tmp_path, transport):
    """Its cable is pulled in the middle of a step: no connection is closed, nothing comes."""
    script = tmp_path / "script.py"
    script.write_text(ENDLESS_SCRIPT)
    switch = (agent.parent / "switch").read_text()
    ranks = start_without_mpi(agent, script, transport)
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
