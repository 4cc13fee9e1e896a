"""Spec: a job on several hosts, which are network namespaces of this machine.

Each host has its own network, host name, System V memory and /dev/shm, so that only the
network connects its ranks to those of the other.  Needs root, ``ip`` and ``unshare``.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests import endless
from tests.namespaces import cannot, need, without_mpi
from tests.ranks import RanksFailed, mpirun, mpirun_command, rank_environment

pytestmark = pytest.mark.stress

HOSTS = 2
PORT = "29577"  # of the store, in the network of a host
ONE_SHM = "SMP_TEST_ONE_SHM"  # set: hosts share this machine's /dev/shm
# Lost hosts are named after a few seconds; a busy machine may take longer.
SOON_S = 40

# Argument: a list of the cases below, each of which has a smp.init of its own.  Rank 0 prints
# for each what all of its ranks have seen.
PIPELINES_SCRIPT = """
import hashlib
import json
import sys
import smp
import torch
import torch.distributed as dist
from tests.test_transports import Chain, begin, check_against_the_cut_loop, train_step, used


def places(strategy):
    smp.init({"pipeline_parallel_degree": 2, "placement_strategy": strategy})
    total = torch.tensor(float(smp.rank()))
    dist.all_reduce(total)
    return [
        smp.rank(), smp.local_rank(), smp.local_size(), smp.instance_id(), smp.is_multi_node(),
        smp.get_pp_group(), total.item(), smp.allgather(smp.rank(), smp.WORLD),
    ]


def equal(config):
    torch.manual_seed(0)
    begin(**config)
    check_against_the_cut_loop(30)
    return sorted(used())


def replicas(transports):  # two of two ranks each; the configuration is the groups', too
    begin(pipeline_parallel_degree=2, ddp=True, comm_transports=transports)
    torch.manual_seed(0)
    model = Chain(3)
    for i in range(3):
        smp.set_partition(model.blocks[i], i % 2)
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = smp.step(train_step)
    for _ in range(3):
        torch.manual_seed(10 + smp.dp_rank())
        step(model, torch.randn(300, 64))
        optimizer.step()
        optimizer.zero_grad()
    seen = hashlib.blake2b()
    for name, parameter in model.local_named_parameters():
        seen.update(name.encode() + parameter.detach().numpy().tobytes())
    groups = [group for group in smp.comm_report().groups if len(group.ranks) == 2]
    over = {way for group in groups for way in group.to_hosts}
    return [seen.hexdigest(), sorted(over), sorted(used())]


for kind, argument in json.loads(sys.argv[1]):
    seen = {"places": places, "equal": equal, "replicas": replicas}[kind](argument)
    everywhere = smp.allgather(seen, smp.WORLD)
    if smp.rank() == 0:
        sys.stdout.write(json.dumps([kind, argument, everywhere]) + "\\n")
        sys.stdout.flush()
    smp.reset()
"""
COLLECTIVES_SCRIPT = """
import hashlib
import sys
import warnings
warnings.filterwarnings("error", message=".*SMP_SECRET_FILE")  # MPI brings the secret
import torch
import torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
import smp
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
over = {way for group in smp.comm_report().groups for way in group.to_hosts}
sys.stdout.write(" ".join(["digest", seen.hexdigest(), "over", *sorted(over)]) + "\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""

ONE_HOST_SCRIPT = """
import sys
import smp
import torch
from tests.test_transports import begin, check_against_the_cut_loop, used

torch.manual_seed(0)
begin(pipeline_parallel_degree=2)  # begin() asks MPI, which is not there
assert (smp.local_rank(), smp.local_size(), smp.is_multi_node()) == (smp.rank(), 2, False)
assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1]
check_against_the_cut_loop(30)
sys.stdout.write(f"rank {smp.rank()} over {sorted(used())}\\n")
sys.stdout.flush()
"""

# What the sockets of smddp are connected to.
SOCKETS_SCRIPT = """
import os
import re
import socket
import torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp

dist.init_process_group("smddp")
links = (os.readlink(f"/proc/self/fd/{fd}") for fd in map(int, os.listdir("/proc/self/fd"))
         if os.path.islink(f"/proc/self/fd/{fd}"))
inodes = {inode for link in links for inode in re.findall(r"socket:.(\\d+)", link)}
for line in open("/proc/net/tcp").read().splitlines()[1:]:
    _, local, remote, state, *_, inode = line.split()[:10]
    ports = {int(end.partition(":")[2], 16) for end in (local, remote)}
    if state == "01" and inode in inodes and int(os.environ["MASTER_PORT"]) not in ports:
        print(socket.inet_ntoa(bytes.fromhex(remote.partition(":")[0])[::-1]))
dist.barrier()
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def agent(tmp_path) -> Iterator[Path]:
    """Hosts of a test's own."""
    with hosts(tmp_path) as path:
        yield path


@contextmanager
def hosts(folder: Path) -> Iterator[Path]:
    """What mpirun starts its daemons with, in place of ssh: host i is 10.77.0.i."""
    need("ip", "unshare")
    names = [f"smp-test-{os.getpid()}-{i}" for i in range(HOSTS + 1)]
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
        except subprocess.CalledProcessError:
            cannot("network namespaces are not permitted here")
        switch, *hosts = names
        ip("-n", switch, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "name", "switch", "type", "bridge")
        ip("-n", switch, "addr", "add", "10.77.0.250/24", "dev", "switch")
        ip("-n", switch, "link", "set", "switch", "up")
        for i, host in enumerate(hosts, start=1):
            veth = f"net netns {host} type veth peer port{i} netns {switch}"
            ip("link", "add", *veth.split())
            ip("-n", switch, "link", "set", f"port{i}", "master", "switch", "up")
            ip("-n", host, "addr", "add", f"10.77.0.{i}/24", "dev", "net")
            ip("-n", host, "link", "set", "net", "up")
            ip("-n", host, "link", "set", "lo", "up")
        path = folder / "agent"
        path.write_text(
            "#!/bin/sh\n"
            "host=$1; shift\n"
            f"exec ip netns exec smp-test-{os.getpid()}-${{host##*.}} unshare -uim sh -c '\n"
            f'    hostname "$1"; [ -n "${ONE_SHM}" ] || mount -t tmpfs tmpfs /dev/shm\n'
            '    eval "$2"\n'
            '\' sh host-${host##*.} "$*"\n'
        )
        path.chmod(0o755)
        (folder / "switch").write_text(switch)
        yield path
    finally:
        for name in made:
            ip("netns", "del", name)


def start_on_hosts(
    agent: Path, ranks: int, *argv: str | Path, env: dict[str, str] | None = None
) -> subprocess.Popen:
    """``mpirun`` of a job on all hosts, with ``ranks`` on each of them."""
    passed = [
        word
        for name in ("PYTHONPATH", "OMP_NUM_THREADS", *(env or ()))
        for word in ("-x", name)
    ]
    switch = (agent.parent / "switch").read_text()
    where = ",".join(f"10.77.0.{i}:{ranks}" for i in range(1, HOSTS + 1))
    command = [
        *["ip", "netns", "exec", switch, *mpirun_command(ranks * HOSTS)],
        *["--prtemca", "plm_ssh_agent", str(agent), "--host", where],
        *[*passed, *map(str, argv)],
    ]
    return subprocess.Popen(
        command,
        env=rank_environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def mpirun_on_hosts(
    agent: Path, ranks: int, *argv: str | Path, env: dict[str, str] | None = None
) -> str:
    """What a script prints on all hosts, with ``ranks`` on each of them."""
    process = start_on_hosts(agent, ranks, sys.executable, *argv, env=env)
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.terminate()  # mpirun takes its daemons and ranks with it
        process.wait()
    if process.returncode != 0:
        raise RanksFailed(f"{out}\n{err}")
    return out


STRATEGIES = {"cluster": [[0, 1], [2, 3]], "spread": [[0, 2], [1, 3]]}
TRANSPORTS = {
    "default": ({}, ["shm", "tcp"]),
    "tcp": ({"comm_transports": ["tcp"], "comm_interface": "10.77.0.0/24"}, ["tcp"]),
    "mpi": ({"comm_transports": ["shm", "mpi"]}, ["mpi", "shm"]),
    "ucx": ({"comm_transports": ["shm", "ucx"]}, ["shm", "ucx"]),
    "ucx alone": ({"comm_transports": ["ucx"], "comm_interface": "10.77.0.0/24"}, ["ucx"]),
}
REPLICAS = ["tcp", "ucx", "mpi"]


def cases_of(lines: list[str]) -> dict[tuple[str, str], list]:
    """What the ranks have seen, by kind and argument."""
    cases = [json.loads(line) for line in lines]
    return {(kind, json.dumps(argument)): seen for kind, argument, seen in cases}


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory) -> dict[tuple[str, str], list]:
    """All cases of two hosts with two ranks each, in one job: starting it takes longest."""
    folder = tmp_path_factory.mktemp("pipelines")
    script = folder / "script.py"
    script.write_text(PIPELINES_SCRIPT)
    cases: list[tuple[str, object]] = [("places", strategy) for strategy in STRATEGIES]
    cases += [("equal", config) for config, _ in TRANSPORTS.values()]
    cases += [("replicas", ["shm", transport]) for transport in REPLICAS]
    with hosts(folder) as agent:
        return cases_of(mpirun_on_hosts(agent, 2, script, json.dumps(cases)).splitlines())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_hosts_with_two_ranks_each(pipelines, strategy):
    groups = STRATEGIES[strategy]
    for rank, seen in enumerate(pipelines["places", json.dumps(strategy)]):
        [group] = [group for group in groups if rank in group]
        assert seen == [rank, rank % 2, 2, rank // 2, True, group, 6.0, [0, 1, 2, 3]]


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.sample(2)
def test_across_hosts_the_results_have_the_same_bits(pipelines, name):
    """A pipeline of four ranks on two hosts equals the cut loop, bit for bit."""
    config, over = TRANSPORTS[name]

    assert pipelines["equal", json.dumps(config)] == [over] * 4


def on_one_host(folder: Path, script: str, *argv: str) -> list[str]:
    """The lines that four ranks of this host print, sorted."""
    path = folder / "script.py"
    path.write_text(script)
    done = mpirun(4, path, *argv, timeout_s=200)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.fixture(scope="module")
def collectives_of_one_host(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("collectives")
    return on_one_host(folder, COLLECTIVES_SCRIPT)


@pytest.fixture(scope="module")
def replicas_of_one_host(tmp_path_factory) -> list[list]:
    folder = tmp_path_factory.mktemp("replicas")
    cases = json.dumps([("replicas", ["shm"])])
    [seen] = cases_of(on_one_host(folder, PIPELINES_SCRIPT, cases)).values()
    return seen


@pytest.mark.parametrize("transports", ["shm,tcp", "shm,ucx", "shm,mpi", "mpi"])
def test_collectives_across_hosts_have_the_bits_of_one_host(
    agent, script, collectives_of_one_host, transports
):
    """smddp on 2 hosts of 2 ranks: all operations, sub-groups and DDP."""
    over = transports.rpartition(",")[2]

    on_two = mpirun_on_hosts(
        agent, 2, script(COLLECTIVES_SCRIPT), env={"SMP_COMM_TRANSPORTS": transports}
    )

    [digest] = set(collectives_of_one_host)
    assert on_two.splitlines() == [f"{digest} {over}"] * 4


def test_torchrun_on_two_hosts_that_have_one_secret_file(
    agent, tmp_path, script, collectives_of_one_host
):
    """Without the file, the warning of the store would end the script."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("of the whole group")
    torchrun = (
        f"-m torch.distributed.run --nnodes={HOSTS} --nproc-per-node=2 --node-rank={{host}} "
        f"--master-addr=10.77.0.1 --master-port={PORT}"
    )

    with started_without_mpi(
        agent, script(COLLECTIVES_SCRIPT), {"SMP_SECRET_FILE": str(secret)}, torchrun
    ) as two:
        said = [host.communicate(timeout=150) for host in two]

    [digest] = set(collectives_of_one_host)
    assert [out.splitlines() for out, _ in said] == [[f"{digest} tcp"] * 2] * 2, said


@pytest.mark.parametrize("transport", REPLICAS)
def test_replicas_on_other_hosts_have_the_bits_of_one_host(
    pipelines, replicas_of_one_host, transport
):
    """Gradients are averaged between the hosts by the transport that smp.init was told."""
    here = replicas_of_one_host
    assert len({digest for digest, *_ in here}) == 2  # the replicas are equal
    assert [rest for _, *rest in here] == [[[], ["shm"]]] * 4

    there = pipelines["replicas", json.dumps(["shm", transport])]

    assert there == [[digest, [transport], ["shm"]] for digest, *_ in here]


@contextmanager
def started_without_mpi(
    agent: Path, script: Path, env: dict[str, str], launcher: str = ""
) -> Iterator[list[subprocess.Popen]]:
    """One rank on each host, or one launcher; what still runs at the end is killed.

    Args:
        launcher: python's arguments before the script; ``{host}``: the number of the host.
    """
    ranks = [
        subprocess.Popen(
            [str(agent), f"10.77.0.{rank + 1}", sys.executable]
            + [*launcher.format(host=rank).split(), str(script)],
            env={
                **without_mpi(),
                "RANK": str(rank),
                "WORLD_SIZE": str(HOSTS),
                "LOCAL_RANK": "0",
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": PORT,
                **env,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(HOSTS)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):  # torchrun may have left its workers
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


@pytest.mark.parametrize("transport", ["tcp", "ucx"])
@pytest.mark.parametrize("kind", endless.SCRIPTS)
@pytest.mark.sample(2)
def test_a_host_that_falls_silent_is_named(agent, script, kind, transport):
    """Its cable is pulled while all work: no connection is closed, nothing comes."""
    switch = (agent.parent / "switch").read_text()
    with started_without_mpi(
        agent, script(endless.SCRIPTS[kind]), {"SMP_COMM_TRANSPORTS": transport}
    ) as ranks:
        for rank in ranks:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            assert line == "going\n", rank.communicate(timeout=60)
        pulled = time.monotonic()
        ip("-n", switch, "link", "set", "port2", "down")
        said = [rank.communicate(timeout=90) for rank in ranks]
    for i, rank in enumerate(ranks):
        heard, errors = said[i]
        assert rank.returncode != 0
        assert endless.LOST[kind].format(1 - i) in errors, said
        assert heard and float(heard) - pulled < SOON_S, said


def read_until(pipe: int, pattern: str, deadline: float) -> None:
    """Reads until the pattern has come; fails at the deadline."""
    text = ""
    while not re.search(pattern, text, re.MULTILINE | re.DOTALL):
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"no {pattern!r} in {text!r}"
        text += os.read(pipe, 1 << 16).decode()


@pytest.mark.parametrize("kind", endless.SCRIPTS)
@pytest.mark.sample(1)
def test_a_host_that_falls_silent_is_named_over_mpi(agent, tmp_path, script, kind):
    """Each rank has a pipe of its own: what it prints reaches mpirun no more."""
    switch = (agent.parent / "switch").read_text()
    pipes = []
    for rank in range(HOSTS):
        os.mkfifo(tmp_path / f"rank{rank}")
        pipes.append(os.open(tmp_path / f"rank{rank}", os.O_RDWR))  # so that nobody waits
    into_its_pipe = f'exec "$0" "$@" > {tmp_path}/rank$OMPI_COMM_WORLD_RANK 2>&1'
    command = ["sh", "-c", into_its_pipe, sys.executable, script(endless.SCRIPTS[kind])]
    process = start_on_hosts(agent, 1, *command, env={"SMP_COMM_TRANSPORTS": "mpi"})
    try:
        for pipe in pipes:
            read_until(pipe, "^going$", time.monotonic() + 60)
        pulled = time.monotonic()
        ip("-n", switch, "link", "set", "port2", "down")
        for rank, pipe in enumerate(pipes):
            lost = endless.LOST[kind].format(1 - rank)
            read_until(pipe, lost, pulled + SOON_S)
    finally:
        process.kill()
        for i in range(1, HOSTS + 1):  # mpirun does not reach the silent one
            host = f"{switch.rpartition('-')[0]}-{i}"
            pids = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True)
            for pid in map(int, pids.stdout.split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.communicate()
        for pipe in pipes:
            os.close(pipe)


def test_containers_that_share_memory_but_no_network_are_one_host(agent, script):
    with started_without_mpi(agent, script(ONE_HOST_SCRIPT), {ONE_SHM: "1"}) as ranks:
        said = [rank.communicate(timeout=120) for rank in ranks]

    for i, rank in enumerate(ranks):
        assert rank.returncode == 0, said
        assert said[i][0] == f"rank {i} over ['shm']\n"


def test_mpirun_and_smddp_use_the_interface_that_the_environment_names(agent, script):
    """Each host has a second address."""
    switch = (agent.parent / "switch").read_text()
    for i in range(1, HOSTS + 1):
        host = f"{switch.rpartition('-')[0]}-{i}"
        ip("-n", host, "addr", "add", f"10.88.0.{i}/24", "dev", "net")
    named = {"SMP_COMM_INTERFACE": "10.88.0.0/24", "SMP_COMM_TRANSPORTS": "tcp"}
    path = script(
        "import os, smdistributed.dataparallel.torch.torch_smddp\n"
        "print(os.environ['MASTER_ADDR'], os.environ['LOCAL_RANK'])"
    )

    assert mpirun_on_hosts(agent, 1, path, env=named) == "10.88.0.1 0\n" * 2

    path.write_text(SOCKETS_SCRIPT)
    with started_without_mpi(agent, path, named) as ranks:
        said = [rank.communicate(timeout=60) for rank in ranks]
    assert [out for out, _ in said] == ["10.88.0.2\n", "10.88.0.1\n"], said
