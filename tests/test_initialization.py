"""Spec: start and end of the job (api section 1; failures: start, uncaught, signals)."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import smp
from smp import _core
from smp.collectives import shared_gpus, torch_process_groups
from smp.job import bootstrap, config
from smp.job.placement import Placement
from tests.ranks import (
    job,
    mpirun,
    on_ranks,
    torchrun,
    wait_until_gone,
)

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def not_initialised():
    smp.reset()
    yield
    smp.reset()


@pytest.mark.parametrize(("tasks", "size"), [("3", 3), (None, 0)])
def test_a_launcher_that_does_not_say_how_many_ranks_it_has_started(tasks, size, monkeypatch):
    """srun says it elsewhere; from others it is not known."""
    for name in (*bootstrap.MPI_SIZES, *bootstrap.MPI_MARKS, "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    assert bootstrap.mpi_size() == 1
    monkeypatch.setenv("PMI_RANK", "0")
    if tasks is not None:
        monkeypatch.setenv("SLURM_NTASKS", tasks)
    assert bootstrap.mpi_size() == size


def test_a_launcher_that_does_not_say_so_starts_as_many_ranks_as_mpi_sees(script):
    path = script("""
import os
import smp
from smp.job import (bootstrap)

for name in bootstrap.MPI_SIZES:
    os.environ.pop(name, None)
assert bootstrap.mpi_size() == 0
smp.init()
print("rank", smp.rank(), "of", smp.size(), flush=True)
""")
    done = mpirun(2, path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def test_one_rank_needs_no_launcher():
    smp.init()

    assert (smp.rank(), smp.size(), smp.local_rank(), smp.local_size()) == (0, 1, 0, 1)
    assert (smp.instance_id(), smp.is_multi_node()) == (0, False)
    for kind in ("pp", "tp", "dp", "rdp", "mp"):
        assert getattr(smp, f"{kind}_rank")() == 0
        assert getattr(smp, f"{kind}_size")() == 1
        assert getattr(smp, f"get_{kind}_group")() == [0]
    assert dist.get_world_size(smp.get_world_process_group()) == 1


def test_a_folder_for_shared_memory_that_cannot_be_written_shows_no_file(tmp_path, monkeypatch):
    """A removal fails there, too: not for want of the file alone."""
    monkeypatch.setattr(bootstrap, "SHARED_FOLDER", tmp_path / "no folder")
    bootstrap.SHARED_FOLDER.touch()
    with bootstrap.socket_file() as path:
        assert not os.path.exists(path)


@on_ranks(2)
def test_two_ranks_see_each_other():
    smp.init({"pipeline_parallel_degree": 2})

    assert smp.rank() == int(os.environ["OMPI_COMM_WORLD_RANK"])
    assert (smp.size(), smp.local_size(), smp.local_rank()) == (2, 2, smp.rank())
    assert (smp.pp_rank(), smp.pp_size(), smp.get_pp_group()) == (smp.rank(), 2, [0, 1])
    assert (smp.dp_rank(), smp.dp_size(), smp.get_dp_group()) == (0, 1, [smp.rank()])
    assert (smp.instance_id(), smp.is_multi_node()) == (0, False)


@on_ranks(2)
def test_init_may_be_tried_again_when_ranks_did_not_reach_each_other(monkeypatch):
    def connect(*_):
        raise ConnectionError("no way to the other rank")

    with monkeypatch.context() as patched:
        patched.setattr(_core, "connect", connect)
        with pytest.raises(ConnectionError, match="no way"):
            smp.init({"pipeline_parallel_degree": 2})
    smp.init({"pipeline_parallel_degree": 2})

    assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1]


@on_ranks(2)
def test_the_core_is_opened_as_it_is_configured(monkeypatch):
    given, open_core = [], _core.open

    def opened(*arguments):
        given.append(arguments)
        return open_core(*arguments)

    monkeypatch.setattr(_core, "open", opened)
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "comm_pool_bytes": 8 << 20,
            "comm_device_pool_bytes": 4 << 20,
            "comm_transports": ["shm", "tcp"],
            "comm_interface": "127.0.0.1",
            "watchdog_report_s": 50.0,
            "watchdog_end_s": 100.0,
            "static_mode": True,
        }
    )
    [call] = given
    *place, pool, device_pool, _, transports, interface, _, report, end, names, _, steps = call
    assert place == [smp.rank(), 2, 1] and names == ("pp_rank 0", "pp_rank 1")
    assert (pool, device_pool) == (8 << 20, 4 << 20)
    assert (transports, interface) == ("shm,tcp", "127.0.0.1")
    assert (report, end, steps) == (50.0, 100.0, 5)


@on_ranks(4)
@pytest.mark.parametrize("strategy", ["cluster", "spread"])
def test_groups_of_four_ranks(strategy):
    smp.init({"pipeline_parallel_degree": 2, "placement_strategy": strategy})
    rank = smp.rank()

    near, far = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
    mp, dp = (near, far) if strategy == "cluster" else (far, near)
    assert smp.get_mp_group() == smp.get_pp_group() == mp
    assert smp.get_dp_group() == smp.get_rdp_group() == dp
    assert smp.get_tp_group() == [rank]
    assert smp.mp_rank() == smp.pp_rank() == mp.index(rank)
    assert smp.dp_rank() == smp.rdp_rank() == dp.index(rank)
    assert (smp.tp_rank(), smp.tp_size(), smp.state.cfg.ddp) == (0, 1, True)
    for kind, members in [("mp", mp), ("pp", mp), ("dp", dp), ("rdp", dp), ("tp", [rank])]:
        group = getattr(smp, f"get_{kind}_process_group")()
        total = torch.tensor(float(rank + 1))
        dist.all_reduce(total, group=group)
        assert total.item() == sum(member + 1 for member in members)
        assert dist.get_process_group_ranks(group) == members
        getattr(smp, f"get_{kind}_group")().clear()  # a list of the script's own
        assert getattr(smp, f"get_{kind}_group")() == members
        assert getattr(smp, f"{kind}_size")() == len(members)


@on_ranks(2)
def test_the_default_group_is_over_all_ranks():
    smp.init()

    assert (dist.get_rank(), dist.get_world_size()) == (smp.rank(), 2)
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [2, 2, 2]
    dist.barrier()


@on_ranks(2)
@pytest.mark.parametrize("wanted", ["auto", "smddp", "gloo"])
def test_beside_a_script_s_own_default_group_others_have_the_backend_that_is_named(
    tmp_path, wanted
):
    """... or, by default, the one that the script chose, and are its own group then."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=bootstrap.connect().rank, world_size=2)
    try:
        smp.init({"ddp_dist_backend": wanted})

        group = smp.get_dp_process_group()
        assert dist.get_backend(group) == ("gloo" if wanted == "auto" else wanted)
        assert (group is dist.group.WORLD) is (wanted != "smddp")
        total = torch.ones(3)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [2, 2, 2]
    finally:
        smp.reset()
        dist.destroy_process_group()


@on_ranks(1, 2)
def test_the_environment_stays_as_it_is():
    before = dict(os.environ)

    smp.init()

    assert dict(os.environ) == before
    assert not any(name in os.environ for name in LAUNCHER_VARIABLES)


@on_ranks(2)
def test_all_sockets_of_one_host_are_on_loopback():
    bootstrap.connect()  # MPI has sockets of its own
    before = listening()

    smp.init({"pipeline_parallel_degree": 2})

    ours = {at for inode, at in listening().items() if inode not in before}
    assert ours == {"127.0.0.1"}


def listening() -> dict[str, str]:
    """The addresses on which this process listens, by inode; IPv6 as the kernel has it."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{fd}")))
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, state, inode = fields[1].partition(":")[0], fields[3], fields[9]
            if state == "0A" and inode in inodes:
                is_v4 = len(address) == 8
                found[inode] = (
                    socket.inet_ntoa(bytes.fromhex(address)[::-1]) if is_v4 else address
                )
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_cuda_is_left_alone_on_a_host_without(monkeypatch):
    for name in ("_lazy_init", "set_device", "current_device", "device_count"):
        monkeypatch.setattr(torch.cuda, name, lambda *a: pytest.fail("touched torch.cuda"))

    smp.init()

    assert dist.get_backend() == "smddp"


def test_nccl_on_a_host_without_a_gpu_becomes_smddp(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)

    with pytest.warns(UserWarning, match="ddp_dist_backend='nccl' needs a GPU"):
        smp.init({"ddp_dist_backend": "nccl"})

    assert dist.get_backend() == "smddp"


def test_a_gpu_is_served_by_smddp_unless_nccl_is_named(monkeypatch):
    """... and has a GPU for each rank."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shared_gpus, "visible", lambda: ["A", "B"])

    class Others(bootstrap.Alone):
        """The GPUs that the other ranks see."""

        theirs: tuple[bytes, ...] = ()

        def allgather_bytes(self, data):
            return [data, *self.theirs]

    def backend(name, *theirs):
        boot = Others()
        boot.theirs = theirs
        return torch_process_groups.backend_of(config.load({"ddp_dist_backend": name}, 1), boot)

    assert backend("auto") == backend("smddp") == "smddp"
    assert backend("nccl") == backend("nccl", b"A\nB", b"C") == "cpu:gloo,cuda:nccl"
    assert backend("gloo") == "gloo"
    for theirs, said in [
        ((b"A\nB", b"B"), "ranks 0, 1, 2 have 2 in all"),
        ((b"C", b"C"), "ranks 1, 2 have 1 in all"),
        ((b"C", b""), "rank 2 has none"),
    ]:
        with pytest.warns(UserWarning, match=f"a GPU for each rank, and {said}: using 'smddp'"):
            assert backend("nccl", *theirs) == "smddp"


NEEDS_INIT = [
    *["rank", "size", "local_rank", "local_size", "instance_id", "is_multi_node"],
    "get_world_process_group",
    *(
        name.format(kind)
        for kind in ("pp", "tp", "dp", "rdp", "mp")
        for name in ("{}_rank", "{}_size", "get_{}_group", "get_{}_process_group")
    ),
]


@pytest.mark.parametrize("name", NEEDS_INIT)
def test_before_init_the_missing_call_is_named(name):
    with pytest.raises(RuntimeError, match=rf"smp\.{name}\(\) needs smp\.init\(\)"):
        getattr(smp, name)()


def test_the_state_needs_init_too():
    with pytest.raises(RuntimeError, match=r"smp\.state\.cfg needs smp\.init\(\)"):
        _ = smp.state.cfg
    assert smp.core.initialized() is smp.is_initialized() is False


def test_the_functions_of_a_kind_have_names_and_words():
    assert smp.pp_rank.__name__ == "pp_rank"
    assert smp.get_dp_group.__doc__ == ("The global ranks of this rank's DP_GROUP, in order.")


def test_a_second_init_is_a_no_op(monkeypatch):
    """... without a word where nothing is given, whatever the environment says."""
    smp.init({"microbatches": 2})
    group = dist.group.WORLD

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        smp.init({"microbatches": 2})
        monkeypatch.setenv("SMP_CONFIG", '{"microbatches": 4}')
        smp.init()
        smp.init({})

    assert smp.state.cfg.microbatches == 2
    assert dist.group.WORLD is group


def test_a_second_init_with_another_configuration_warns():
    smp.init({"microbatches": 2})

    with pytest.warns(UserWarning, match=r"microbatches=4 \(was 2\).* has no effect"):
        smp.init({"microbatches": 4})

    assert smp.state.cfg.microbatches == 2


def test_a_hundred_cycles_leave_nothing_behind():
    smp.init()
    smp.shutdown()
    before = len(os.listdir("/proc/self/fd")), threading.active_count(), sys.excepthook

    for count in range(100):
        smp.init({"microbatches": count + 1})
        assert smp.state.cfg.microbatches == count + 1
        smp.shutdown()
        smp.shutdown()  # which has nothing left to do
        assert not smp.is_initialized() and not dist.is_initialized()

    after = len(os.listdir("/proc/self/fd")), threading.active_count(), sys.excepthook
    assert after == before


@on_ranks(2)
def test_two_ranks_start_and_end_many_times():
    hook = sys.excepthook
    for count in range(5):
        smp.init({"pipeline_parallel_degree": 1 + count % 2})
        assert smp.pp_size() == 1 + count % 2
        smp.shutdown()
        assert sys.excepthook is hook


@on_ranks(2)
def test_a_failed_init_can_be_repeated():
    with pytest.raises(smp.ConfigError):
        smp.init({"pipeline_parallel_degree": 3})
    assert not smp.is_initialized() and not dist.is_initialized()

    smp.init({"pipeline_parallel_degree": 2})

    assert smp.pp_size() == 2


@on_ranks(4)
def test_a_difference_between_the_configurations_is_named_on_every_rank():
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])

    with pytest.raises(
        smp.ConfigError,
        match=r"differ: microbatches=2 on ranks 0, 1, 3; microbatches=3 on rank 2;",
    ):
        smp.init({"microbatches": 2 + (rank == 2), "skip_tracing": rank == 1})


@on_ranks(2)
@pytest.mark.parametrize(
    "given, kind, said",
    [
        ({"microbatches": "2"}, "ConfigError", "microbatches='2'"),
        ({"pipeline": "zero_bubble"}, "NotImplementedError", "pipeline='zero_bubble'"),
    ],
)
def test_a_configuration_refused_on_one_rank_raises_on_every_rank(given, kind, said):
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])

    with pytest.raises(getattr(smp, kind, NotImplementedError)) as caught:
        smp.init(given if rank == 1 else {})

    assert str(caught.value).startswith(said if rank == 1 else f"on rank 1: {said}")


@on_ranks(2)
def test_a_group_that_the_script_made_is_used_and_left_alone():
    boot = bootstrap.connect()
    address = boot.allgather_bytes(free_port() if boot.rank == 0 else b"")[0].decode()
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}", rank=boot.rank, world_size=2
    )
    group = dist.group.WORLD
    try:
        smp.init({"pipeline_parallel_degree": 2})
        assert smp.get_world_process_group() is group
        smp.shutdown()
        assert dist.group.WORLD is group
        assert list(dist.distributed_c10d._world.pg_map) == [group]
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2
    finally:
        dist.destroy_process_group()


def free_port() -> bytes:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}".encode()


@on_ranks(2)
def test_a_group_of_other_ranks_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="rank 0 of 1, but this is rank . of 2"):
            torch_process_groups.form(bootstrap.over_mpi(), Placement(2), config.load(None, 2))
    finally:
        dist.destroy_process_group()


def forked_child_status() -> int:
    child = os.fork()
    if child == 0:
        smp.shutdown()
        os._exit(0 if smp.is_initialized() else 1)
    return os.waitpid(child, 0)[1]


def test_a_forked_child_does_not_end_the_job():
    smp.init()

    assert forked_child_status() == 0
    assert smp.is_initialized()


@on_ranks(2)
def test_the_collectives_of_split_modules_have_a_group_of_their_own():
    """And what torch clips by is its own again in the end."""
    smp.init({"tensor_parallel_degree": 2})

    assert smp.get_mp_process_group() is smp.get_world_process_group()
    assert smp.get_dp_process_group() is smp.get_world_process_group()
    assert smp.get_tp_process_group() is not smp.get_world_process_group()
    assert smp.get_pp_process_group() is smp.get_rdp_process_group()
    smp.reset()
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    assert torch.nn.utils.clip_grad_norm_([weight], 1.0) == 2
    assert weight.grad.tolist() == pytest.approx([0.5] * 4)


def test_objects_wait_for_days():
    smp.init()
    objects = smp.state.job("a test").torch_groups.objects
    backend = objects._get_backend(torch.device("cpu"))
    assert backend.options._timeout == torch_process_groups.OBJECTS_TIMEOUT
    assert torch_process_groups.OBJECTS_TIMEOUT.days == 7
    assert dist.get_backend(objects) == "gloo"


@pytest.mark.parametrize("own", [False, True])
def test_groups_that_could_not_be_made_are_gone_but_not_the_scripts(own, monkeypatch):
    def fail(*_):
        raise OSError("no way")

    monkeypatch.setattr(torch_process_groups, "_form_kinds", fail)
    if own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = sys.excepthook
    try:
        with pytest.raises(OSError, match="no way"):
            smp.init()
        assert dist.is_initialized() is own and not smp.is_initialized()
        smp.shutdown()
        assert sys.excepthook is before
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_script_may_have_left_torchs_groups_before_the_end():
    smp.init()
    dist.destroy_process_group()
    smp.shutdown()
    assert not smp.is_initialized()


@pytest.mark.parametrize("named", [None, "eth7"])
@pytest.mark.parametrize("interface", [None, "eth0"])
def test_gloo_listens_where_the_ranks_reach_each_other(interface, named, monkeypatch):
    """... or where the user says; the environment is as it was in the end."""
    name = torch_process_groups.GLOO_INTERFACE
    monkeypatch.delenv(name, raising=False)
    if named is not None:
        monkeypatch.setenv(name, named)
    before = dict(os.environ)
    with contextlib.suppress(KeyError), torch_process_groups._gloo_on(interface):
        assert os.environ.get(name) == (named or interface)
        raise KeyError
    assert dict(os.environ) == before


def test_a_parameter_without_effect_is_told_again_after_a_reset():
    for _ in range(2):
        with pytest.warns(UserWarning, match="no effect here: ddp_port"):
            smp.init({"ddp_port": 7})
        smp.reset()


class AskedStore:
    """A store that counts the keys it is asked for; `late` is set after so many looks."""

    def __init__(self, late: str, looks: int):
        self.store = dist.HashStore()
        self.timeout = self.store.timeout
        self.late, self.looks, self.asked = late, looks, 0

    def check(self, keys: list[str]) -> bool:
        self.asked += len(keys)
        self.looks -= self.late in keys
        if self.looks == 0:
            self.store.set(self.late, "here")
        return self.store.check(keys)


def test_waiting_for_one_rank_does_not_ask_for_all(monkeypatch):
    """Else all ranks of a large job ask rank 0 for all ranks, 100 times a second."""
    monkeypatch.setattr(bootstrap.time, "sleep", lambda seconds: None)
    boot = bootstrap.OverStore(dist.HashStore(), 0, 1)
    keys = [f"0/{rank}" for rank in range(100)]
    store = boot.store = AskedStore(late=keys[50], looks=1000)
    for key in set(keys) - {store.late}:
        store.store.set(key, "here")

    boot._wait(keys)

    assert store.asked <= len(keys) + 1000


TORCHRUN = """
import os, sys
import torch.distributed as dist
import smp
smp.init({"pipeline_parallel_degree": 2})
assert type(smp.state.job("test").boot).__name__ == "OverStore"
value = [None, None]
dist.all_gather_object(value, smp.pp_rank())
sees = smp.rank(), smp.size(), smp.local_rank(), smp.local_size(), value
sys.stdout.write(f"sees {sees}\\n")  # in one piece: both ranks write into one pipe
sys.stdout.flush()
if "fail" in sys.argv:
    dist.barrier()  # else the other may be ended before it has said that
    if smp.rank() == 1:
        raise KeyError("boom")
    dist.barrier()
"""


@pytest.mark.parametrize("arguments", [[], ["fail"]])
def test_torchrun_without_mpi(tmp_path, arguments):
    (tmp_path / "script.py").write_text(TORCHRUN)

    done = torchrun(2, tmp_path / "script.py", *arguments)

    assert "sees (0, 2, 0, 2, [0, 1])" in done.stdout, done.stderr
    assert "sees (1, 2, 1, 2, [0, 1])" in done.stdout
    assert (done.returncode == 0) == (not arguments)
    if arguments:
        assert done.stderr.count("KeyError: 'boom'") == 1
        assert "smp: rank 1 of 2: not caught; ending all ranks" in done.stderr


SCRIPT = """
import os, signal, sys, threading
import torch.distributed as dist
import smp

smp.init({{"pipeline_parallel_degree": 2}})
print("started", smp.rank(), os.getpid(), flush=True)
{body}
"""
# Before a rank fails, which ends the other.
BOTH_HAVE_STARTED = """
from pathlib import Path
folder = Path(sys.argv[0]).parent
(folder / f"started {smp.rank()}").touch()
while len(list(folder.glob("started *"))) < 2:
    threading.Event().wait(0.01)
"""
FAILING = {
    "while the other waits in MPI": (
        "from mpi4py import MPI\nMPI.COMM_WORLD.recv(source=1) if smp.rank() == 0 else int('x')"
    ),
    "while the other waits for ever": (
        "threading.Event().wait() if smp.rank() == 0 else int('x')"
    ),
    "on both": "dist.barrier(); int('x')",
    "in a thread of ours": (
        "def work(): dist.new_group([7])\n"
        "if smp.rank() == 1: threading.Thread(target=work, name='mine').start()\n"
        "threading.Event().wait()"
    ),
}


@pytest.fixture
def script_with(script):
    return lambda body: script(SCRIPT.format(body=body))


@pytest.mark.parametrize("body", FAILING.values(), ids=FAILING)
def test_what_nobody_catches_is_shown_once_and_ends_all_ranks(script_with, body):
    done = mpirun(2, script_with(BOTH_HAVE_STARTED + body))

    assert done.returncode != 0
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    assert re.search(r"smp: rank \d of 2: not caught.*; ending all ranks", done.stderr)
    assert no_process_of(done.stdout)


IN_ONE_LINE = {
    "configuration": (
        "smp.init({'partition': 2})",
        r"ConfigError: partition=2 .* \(at .*:\d+\)",
    ),
    "Ctrl-C": (
        "if smp.rank() == 1: os.kill(os.getpid(), signal.SIGINT)\nthreading.Event().wait()",
        r"interrupted at .*train.py:\d+",
    ),
}


@pytest.mark.parametrize(("body", "line"), IN_ONE_LINE.values(), ids=IN_ONE_LINE)
def test_what_needs_no_traceback_is_said_in_one_line(script_with, body, line):
    written = script_with(BOTH_HAVE_STARTED + body)
    if "smp.init" in body:
        written.write_text(f"import smp\n{body}\n")

    done = mpirun(2, written)

    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    # The launcher's own words may come before the line's end.
    assert len(re.findall(rf"smp: rank \d of 2: {line}[\n-]", done.stderr)) == 1, done.stderr
    assert len(re.findall("ConfigError|interrupted", done.stderr)) == 1, done.stderr


def test_an_exit_code_ends_the_job(script_with):
    ends = "dist.barrier() if smp.rank() == 0 else sys.exit(3)"
    done = mpirun(2, script_with(BOTH_HAVE_STARTED + ends))

    assert done.returncode != 0
    assert no_process_of(done.stdout)


def test_a_script_that_ends_leaves_the_other_ranks_alone(script_with):
    """A rank may finish long before the others; they are not disturbed."""
    body = """
if smp.rank() == 1:
    sys.exit(0)
try:
    smp.recv_from(1, smp.RankType.WORLD_RANK)
except ConnectionError as error:
    said = "smp.recv_from(1, RankType.WORLD_RANK): receiving from rank 1: rank 1 is gone"
    assert f"PeerLost: smp: {said} (its process" in f"{type(error).__name__}: {error}"
print("rank 0 is done", flush=True)
"""
    done = mpirun(2, script_with(body))

    assert done.returncode == 0, done.stderr
    assert "rank 0 is done" in done.stdout


def started(process: subprocess.Popen) -> list[int]:
    """The process ids of both ranks, once both have started."""
    pids = {}
    while len(pids) < 2:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        if line.startswith("started"):
            _, rank, pid = line.split()
            pids[int(rank)] = int(pid)
    return [pids[0], pids[1]]


@pytest.mark.parametrize("body", ["dist.barrier()", "threading.Event().wait()"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("to", ["mpirun", "rank 1"])
@pytest.mark.sample(2)
def test_a_signal_ends_the_job(script_with, body, name, to):
    body = f"{body} if smp.rank() == 0 else threading.Event().wait()"
    with job(2, script_with(body)) as process:
        pids = started(process)

        os.kill(process.pid if to == "mpirun" else pids[1], signal.Signals[name])

        out, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert err.count("Traceback (most recent call last)") <= 1, err
    wait_until_gone(pids)


def no_process_of(output: str) -> bool:
    pids = [int(line.split()[2]) for line in output.splitlines() if "started" in line]
    assert len(pids) == 2
    wait_until_gone(pids)
    return True


@on_ranks(4)
def test_errors_call_the_jobs_groups_by_their_names():
    smp.init({"pipeline_parallel_degree": 2})

    for name, group in [
        ("WORLD", smp.get_world_process_group()),
        ("MP_GROUP", smp.get_pp_process_group()),  # the same ranks
        ("DP_GROUP", smp.get_dp_process_group()),
    ]:
        with pytest.raises(RuntimeError, match=f"smp: group '{name}': .*all-reduce 1"):
            torch.distributed.all_reduce(torch.zeros(2 + smp.rank()), group=group)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_leaves_when_all_do_takes_nobody_for_dead(script, transport):
    """Else it would not wait at its end for those that still have something to do."""
    path = script(
        "import smp\n"
        "from smp import _core\n"
        "for _ in range(10):\n"
        f'    smp.init({{"comm_transports": ["{transport}"]}})\n'
        "    smp.allgather(smp.rank(), smp.WORLD)\n"
        "    smp.shutdown()\n"
        "assert not _core.someone_died()\n"
    )

    done = mpirun(3, path)

    assert done.returncode == 0, done.stderr
