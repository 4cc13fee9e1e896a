"""Spec: ranks of one host whose namespaces differ, as those of containers do.

They share ``/dev/shm``, and so are on one host, whatever else they see of each other.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from smp.job import job_end
from tests import endless
from tests.namespaces import need, outputs, own, process_of, ranks_behind, without_mpi
from tests.ranks import mpirun_command, python, rank_environment

OWN_PIDS = ("--pid", "--fork", "--mount-proc")
OWN_SHARED_MEMORY = "mount -t tmpfs tmpfs /dev/shm"

COLLECTIVES = """
import torch, torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
import smp

dist.init_process_group("smddp")
rank, size = dist.get_rank(), dist.get_world_size()
for count in (1, 1000, 3_000_000):
    x = torch.arange(count, dtype=torch.float64) + rank
    dist.all_reduce(x)
    assert x.equal(size * torch.arange(count, dtype=torch.float64) + sum(range(size)))
    parts = [torch.empty(count) for _ in range(size)]
    dist.all_gather(parts, torch.full((count,), float(rank)))
    assert all(part.eq(r).all() for r, part in enumerate(parts))
    whole = torch.empty(count * size)
    dist.all_to_all_single(whole, torch.full((count * size,), float(rank)))
    assert whole.view(size, count).eq(torch.arange(size).view(size, 1)).all()
    x = torch.full((count,), float(rank))
    dist.broadcast(x, 1)
    assert x.eq(1).all()
[group] = smp.comm_report().groups
print(group.on_host, *group.to_hosts, flush=True)
dist.destroy_process_group()
"""

PIPELINE = """
import smp
import torch
from tests.test_transports import check_against_the_cut_loop, used

smp.init({"pipeline_parallel_degree": 2, "microbatches": 3, "active_microbatches": 3})
torch.manual_seed(0)
check_against_the_cut_loop(3)
check_against_the_cut_loop(3000)
print(smp.local_size(), smp.is_multi_node(), *used(), flush=True)
smp.barrier()
"""


@pytest.fixture(params=["one", "both"])
def pids(request) -> list[list[str]]:
    """One of two ranks, or both, in a pid namespace of its own."""
    apart = own(*OWN_PIDS)
    return [apart if request.param == "both" else [], apart]


@pytest.mark.parametrize(
    ("job", "pids", "said"),
    [(COLLECTIVES, "both", "shared memory\n"), (PIPELINE, "one", "2 False shm\n")],
    indirect=["pids"],
    ids=["smddp", "smp"],
)
def test_ranks_that_do_not_see_each_others_processes_share_memory(script, job, pids, said):
    with ranks_behind(pids, script(job)) as ranks:
        assert outputs(ranks) == [said] * 2


READ_ONLY = "mount -t tmpfs -o ro tmpfs /dev/shm"


@pytest.mark.stress
@pytest.mark.parametrize(
    ("job", "said"), [(COLLECTIVES, " tcp\n"), (PIPELINE, "1 True tcp\n")], ids=["smddp", "smp"]
)
def test_a_job_whose_shared_memory_cannot_be_written_goes_over_tcp(script, job, said):
    behind = own("--mount", first=READ_ONLY)

    with ranks_behind([behind] * 2, script(job), env={"SMP_COMM_TRANSPORTS": "tcp"}) as ranks:
        assert outputs(ranks) == [said] * 2


STARTS_WITH = """
import smp
smp.init({"pipeline_parallel_degree": 2})
assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1]
print("came through", flush=True)
"""


@pytest.mark.stress
@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize("limit", [40, 44, 48])
@pytest.mark.sample(1)
def test_a_job_with_few_descriptors_says_so_and_the_next_one_tidies_up(
    script, limit, transports
):
    """Wherever it runs out of them, no rank waits for what cannot come any more."""
    job = f"{shlex.join(mpirun_command(2))} sh -c 'ulimit -n %d; exec $0 $1' $0 $1"
    both = f"{job % limit}; echo between; {job % 256}; ls -A /dev/shm"
    done = python(
        script(STARTS_WITH),
        env=rank_environment({"SMP_COMM_TRANSPORTS": transports}),
        timeout_s=300,
        before=[*own("--mount", first=OWN_SHARED_MEMORY), "sh", "-c", both],
    )

    first, second = done.stdout.split("between\n")
    refused = f"Too many open files (this process may have {limit}: ulimit -n)"
    of_gloo = re.search(r"gloo/.*Too many open files", done.stderr)  # torch's own words
    assert first == "came through\n" * 2 or refused in done.stderr or of_gloo, done.stderr
    assert second == "came through\n" * 2, done.stderr


class SecondOfTwo:
    """A bootstrap that gathers what a first rank of this host has told."""

    rank = local_rank = 1
    host = 0

    def __init__(self, card: str) -> None:
        self.card = card

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        return [self.card.encode(), data]

    def barrier(self) -> None:
        pass


def test_files_of_a_process_whose_number_means_another_are_left_alone(tmp_path):
    """The flag of who failed first is found by the number of a process."""
    with open(tmp_path / "file", "w+b") as file:
        at = f"0 {os.getpid()} {file.fileno()}"
        found = os.fstat(file.fileno())

        other = job_end.FirstFailure(SecondOfTwo(f"{at} {found.st_dev} {found.st_ino + 1}"))
        assert other.claim(1, "") == (1, True)
        assert file.read() == b""

        same = job_end.FirstFailure(SecondOfTwo(f"{at} {found.st_dev} {found.st_ino}"))
        assert same.claim(1, "this") == (1, True)
        assert same.claim(0, "this") == (1, True)
        assert same.claim(0, "that") == (1, False)
        assert file.read().startswith(b"1 ")
        same.close()


@pytest.mark.parametrize("kind", endless.SCRIPTS)
@pytest.mark.sample(2)
def test_a_rank_of_another_pid_namespace_that_is_killed_is_named(script, pids, kind):
    with ranks_behind(pids, script(endless.SCRIPTS[kind])) as ranks:
        for rank in ranks:
            assert rank.stdout.readline() == "going\n", rank.communicate(timeout=60)
        os.kill(process_of(ranks[1], is_behind=True), signal.SIGKILL)
        _, said = ranks[0].communicate(timeout=60)

    assert ranks[0].returncode != 0 and endless.LOST[kind].format(1) in said, said


STARTS = {
    "smddp": """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("default")  # once a process
    import torch, torch.distributed as dist
    import smdistributed.dataparallel.torch.torch_smddp
    dist.init_process_group("smddp")
x = torch.ones(1000)
dist.all_reduce(x)
assert x.eq(2).all()
import smp
[group] = smp.comm_report().groups
print(*group.to_hosts or ["shm"], end=" ")
print(sum("SMP_SECRET_FILE" in str(each.message) for each in caught), flush=True)
""",
    "smp.init": """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("default")  # once a process
    import smp
    smp.init({"pipeline_parallel_degree": 2})
assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1]
over = [peer.transport for peer in smp.comm_report().peers]
hosts = smp.instance_id(), smp.is_multi_node()
print(smp.local_rank(), smp.local_size(), *hosts, *over, end=" ")
print(sum("SMP_SECRET_FILE" in str(each.message) for each in caught), flush=True)
""",
}


def secret_file(folder: Path, mode: int) -> dict[str, str]:
    """The environment of ranks that have one."""
    path = folder / "secret"
    path.write_text("of the whole group")
    path.chmod(mode)
    return {"SMP_SECRET_FILE": str(path)}


@pytest.mark.parametrize(
    ("start", "differs", "with_file", "said"),
    [
        ("smddp", "name", False, ["shm 0\n"] * 2),
        ("smddp", "memory", False, ["tcp 1\n", "tcp 0\n"]),
        ("smp.init", "memory", False, ["0 1 0 True tcp 1\n", "0 1 1 True tcp 0\n"]),
        ("smp.init", "memory", True, ["0 1 0 True tcp 0\n", "0 1 1 True tcp 0\n"]),
    ],
)
def test_other_shared_memory_is_another_host(tmp_path, script, start, differs, with_file, said):
    """... and another name is not; rank 0 warns once of a secret from the store."""
    if differs == "name":
        before = [[], own("--uts", first="hostname elsewhere")]
    else:
        before = [own("--mount", first=OWN_SHARED_MEMORY)] * 2

    env = secret_file(tmp_path, 0o600) if with_file else {}
    with ranks_behind(before, script(STARTS[start]), env=env) as ranks:
        assert outputs(ranks) == said


def test_a_secret_file_that_others_may_read_is_refused(tmp_path, script):
    env = secret_file(tmp_path, 0o644)

    with ranks_behind([[], []], script(STARTS["smddp"]), env=env) as ranks:
        said = [rank.communicate(timeout=60)[1] for rank in ranks]

    assert all(rank.returncode != 0 for rank in ranks)
    assert all(f"SMP_SECRET_FILE='{tmp_path}/secret' has mode 0644" in text for text in said)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.sample(1)
def test_ranks_that_know_no_port_meet_at_torchs_own(script, start):
    """RANK, WORLD_SIZE and MASTER_ADDR are enough.  In a network of their own."""
    need("ip")
    both = 'RANK=1 "$@" & RANK=0 "$@"; first=$?; wait $! && (exit $first)'
    network = own("--net", first=f"ip link set lo up && eval '{both}' && exec true")
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    inherited = {k: v for k, v in without_mpi().items() if k != "MASTER_PORT"}

    with subprocess.Popen(
        [*network, sys.executable, script(STARTS[start])],
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as both_ranks:
        try:
            printed, said = both_ranks.communicate(timeout=90)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(both_ranks.pid, signal.SIGKILL)

    assert both_ranks.returncode == 0, said
    assert len(printed.splitlines()) == 2


MANY_ADDRESSES = (
    "ip link set lo up && "
    "for i in $(seq 20); do ip address add 10.9.0.$i/24 dev lo; done && "
    "ip route add default dev lo src 10.9.0.20"
)


def test_of_many_addresses_the_one_that_leads_to_the_world_is_offered():
    """It is the first of 16, though the kernel names it as the last of 21."""
    need("ip")
    network = own("--net", first=MANY_ADDRESSES)
    program = "from smp import _core; print(*_core.addresses(None), sep=',')"
    done = python("-c", program, env=without_mpi(), before=network)
    addresses = done.stdout.strip().split(",")
    assert len(addresses) == 16
    assert addresses[:3] == ["lo 10.9.0.20/24", "lo 127.0.0.1/8", "lo 10.9.0.1/24"]
