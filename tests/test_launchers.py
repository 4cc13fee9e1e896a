"""What the environment says of who started the ranks, and where these meet."""

import os
import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from smp.collectives import launch, ranks
from smp.job import addresses, bootstrap, transports
from smp.job.config import ConfigError


@pytest.fixture(autouse=True)
def environment(monkeypatch) -> dict[str, str]:
    """Of a process that nothing has started; what a test sets there ends with it."""
    ours = (*bootstrap.MPI_SIZES, *bootstrap.MPI_MARKS, *launch.WANTED, "SLURM_NTASKS")
    left = {name: value for name, value in os.environ.items() if name not in ours}
    left = {name: value for name, value in left.items() if not name.startswith("SMP_")}
    monkeypatch.setattr(os, "environ", left)
    return left


@pytest.mark.parametrize(
    "said, size, has_launcher",
    [
        ({}, 1, False),
        ({"SLURM_NTASKS": "8"}, 1, False),  # a script that sbatch runs
        ({"OMPI_COMM_WORLD_SIZE": "3"}, 3, True),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, 4, True),
        ({"MV2_COMM_WORLD_SIZE": "5"}, 5, True),
        ({"PMIX_RANK": "1"}, 0, True),
        ({"PMI_RANK": "1"}, 0, True),
        ({"PMIX_RANK": "1", "SLURM_NTASKS": "6"}, 6, True),
        ({"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1", "SLURM_NTASKS": "6"}, 2, True),
    ],
)
def test_a_launcher_shows_itself_and_how_many_ranks_there_are(
    said, size, has_launcher, environment
):
    environment.update(said)
    assert bootstrap.mpi_size() == size
    assert bootstrap.has_mpi_launcher() == has_launcher


@pytest.mark.parametrize(
    "host, port, url",
    [
        ("node1", None, "tcp://node1:29500?rank=2&world_size=4"),
        ("fe80::1", None, "tcp://[fe80::1]:29500?rank=2&world_size=4"),
        ("node1", "1234", "env://"),
    ],
)
def test_where_ranks_of_a_store_meet(host, port, url, environment):
    environment.update(RANK="2", WORLD_SIZE="4", MASTER_ADDR=host)
    if port:
        environment["MASTER_PORT"] = port
    before = dict(environment)
    assert bootstrap.meeting_url() == url
    assert environment == before


def test_an_mpi_launcher_without_mpi4py_is_said_with_what_to_do(environment, monkeypatch):
    monkeypatch.setattr(bootstrap, "has_mpi4py", lambda: False)
    environment["OMPI_COMM_WORLD_SIZE"] = "2"
    with pytest.raises(RuntimeError, match="mpi4py is not installed: pip install.*torchrun"):
        bootstrap.connect()
    with pytest.raises(RuntimeError, match="smddp: .*pip install mpi4py, or set RANK, LOCAL"):
        launch.complete_environment()
    environment["OMPI_COMM_WORLD_SIZE"] = "1"  # which needs no MPI
    assert isinstance(bootstrap.connect(), bootstrap.Alone)


def test_ranks_of_a_store_get_torchs_port_unless_they_have_one(environment):
    launch.complete_environment()
    assert "MASTER_PORT" not in environment  # nobody has started ranks
    environment.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="node1")
    launch.complete_environment()
    assert environment["MASTER_PORT"] == "29500" and "LOCAL_RANK" not in environment
    environment["MASTER_PORT"] = "77"
    launch.complete_environment()
    assert environment["MASTER_PORT"] == "77"


def test_the_next_store_is_at_another_port_if_the_port_is_ours(environment, monkeypatch):
    monkeypatch.setattr(launch, "_ports", ["1001", "1002"])
    environment["MASTER_PORT"] = "80"
    launch.take_next_port()
    assert environment["MASTER_PORT"] == "80"
    environment["MASTER_PORT"] = "1001"
    for port in "1002", "1001":
        launch.take_next_port()
        assert environment["MASTER_PORT"] == port


@pytest.mark.parametrize("given", [{}, {"LOCAL_RANK": "3", "MASTER_PORT": "77"}], ids=str)
def test_one_rank_of_an_mpi_launcher_meets_itself_without_mpi(given, environment, monkeypatch):
    """What is there stays; a port that somebody else has chosen is not ours to change."""
    watched: list[bootstrap.Bootstrap] = []
    monkeypatch.setattr(
        launch, "Watch", lambda boot: SimpleNamespace(start=lambda: watched.append(boot))
    )
    monkeypatch.setattr(launch, "_ports", [])
    monkeypatch.setattr(launch, "_reserved", [])
    monkeypatch.setattr(bootstrap, "has_mpi4py", lambda: False)
    environment.update(given, OMPI_COMM_WORLD_SIZE="1")
    launch.complete_environment()
    reserved = [str(listener.getsockname()[1]) for listener in launch._reserved]
    for listener in launch._reserved:
        listener.close()
    first, second = reserved
    assert first != second and [type(boot) for boot in watched] == [bootstrap.Alone]
    want = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    want |= {"MASTER_PORT": first, **given}
    assert {name: environment[name] for name in launch.WANTED} == want
    launch.take_next_port()
    assert environment["MASTER_PORT"] == ("77" if given else second)
    launch.complete_environment()  # all is there
    assert launch._ports == ([] if given else [second, first])


class Everyone(bootstrap.Bootstrap):
    """Three ranks, of which this one is the second; what the others say is given."""

    def __init__(self, *others: bytes) -> None:
        self.rank, self.size, self.names, self.others = 1, 3, [10, 11, 12], others

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        first, last = self.others
        return [first, data, last]


def test_what_one_rank_cannot_make_is_an_error_on_all_that_names_it():
    """By its number in the job; on that rank it is what was raised."""
    made = Everyone(b"+a", b"+").gather_made(lambda: b"b")
    assert made == [b"a", b"b", b""]
    with pytest.raises(RuntimeError, match="rank 12 cannot start: OSError: no memory"):
        Everyone(b"+a", b"-OSError: no memory").gather_made(lambda: b"b")
    own = LookupError("mine")

    def fail() -> bytes:
        raise own

    with pytest.raises(LookupError) as caught:
        Everyone(b"-ValueError: x", b"+").gather_made(fail)
    assert caught.value is own


def test_who_does_not_come_to_a_store_is_named():
    store = dist.HashStore()
    boot = bootstrap.OverStore.__new__(bootstrap.OverStore)
    boot.store, boot.size, boot.names = store, 3, [4, 5, 9]
    store.set("b", b"")
    with pytest.raises(dist.DistStoreError, match=r"ranks \[4, 9\] of 3 have not come within"):
        boot._wait(["a", "b", "c"], 0.0)


class Comm:
    """In place of the core's; what it was asked."""

    def __init__(self, *given):
        self.given, self.asked, self.fails = given, [], Comm.fails

    fails = False

    def __getattr__(self, name):
        def ask(*given):
            self.asked.append((name, *given))
            if name == "connect" and self.fails:
                raise dist.DistBackendError("nobody")
            return b"a card" if name == "card" else None

        return ask


@pytest.mark.parametrize(
    "limit, milliseconds",
    [(timedelta(seconds=7.5), 7500), (timedelta(days=300), 2**31 - 1)],
    ids=str,
)
@pytest.mark.parametrize("fails", [False, True])
def test_ranks_of_a_group_connect_as_the_settings_say(fails, limit, milliseconds, monkeypatch):
    """Ranks that cannot connect leave nothing behind."""
    made = []
    monkeypatch.setattr(Comm, "fails", fails)
    monkeypatch.setattr(ranks._core, "Comm", lambda *a: made.append(Comm(*a)) or made[-1])
    monkeypatch.setattr(transports, "job_secret", lambda boot, token: "secret")
    monkeypatch.setattr(transports, "check_interface", lambda interface: None)
    settings = {
        "comm_pool_bytes": 1 << 21,
        "comm_transports": ("tcp", "shm"),
        "comm_interface": "eth9",
        "comm_device_gather_bytes": 77,
        "watchdog_report_s": 2.5,
    }
    before = len(ranks.Ranks.open)
    with ranks.with_settings(settings):
        if fails:
            with pytest.raises(dist.DistBackendError, match="nobody"):
                ranks.Ranks(dist.HashStore(), 0, 1, limit, [4])
        else:
            here = ranks.Ranks(dist.HashStore(), 0, 1, limit, [4])
    (comm,) = made
    assert comm.given == (0, [4], 1 << 21, "tcp,shm", "eth9", "secret")
    asked = [("card",), ("report_after", 2.5), ("connect", [b"a card"], milliseconds)]
    if fails:
        assert comm.asked == [*asked, ("close",)]
    else:
        assert comm.asked == asked and here.is_open and here.gather_bytes == 77
        assert (here.rank, here.global_rank) == (0, 4)
        here.close_unused()
        assert comm.asked == [*asked, ("stop",), ("close",)] and not here.is_open
    assert len(ranks.Ranks.open) == before


@pytest.mark.parametrize(
    "named, found, address",
    [
        ("10.0.0.7", {"lo": "127.0.0.1", "eth0": "10.0.0.9"}, "10.0.0.7"),
        ("127.0.1.1", {"lo": "127.0.0.1", "eth0": "10.0.0.9"}, "10.0.0.9"),
        ("127.0.1.1", {"lo": "127.0.0.1"}, "127.0.1.1"),
        (None, {"lo": "127.0.0.1", "eth1": "10.0.0.8"}, "10.0.0.8"),
        (None, {}, "127.0.0.1"),
    ],
)
def test_a_hosts_own_address(named, found, address, monkeypatch):
    """What its name stands for, unless that is loopback or nothing."""

    def look_up(host: str) -> str:
        if named is None:
            raise socket.gaierror("no such host")
        return named

    monkeypatch.setattr(socket, "gethostbyname", look_up)
    monkeypatch.setattr(addresses, "_interfaces", lambda: found)
    far = SimpleNamespace(has_one_network=False)
    assert addresses.address(far, None) == address
    assert addresses.address(SimpleNamespace(has_one_network=True), None) == "127.0.0.1"


def test_an_interface_that_is_named_gives_its_ipv4_address(monkeypatch):
    there = {"eth0": ["eth0 fe80::1/64", "eth0 10.1.2.3/24"], "eth1": ["eth1 fe80::2/64"]}
    monkeypatch.setattr(
        addresses._core, "addresses", lambda name: there.get(name, []) if name else ["eth0"]
    )
    far = SimpleNamespace(has_one_network=False)
    assert addresses.address(far, "eth0") == "10.1.2.3"
    assert addresses.address(far, "eth1") == "fe80::2"
    with pytest.raises(ConfigError, match="comm_interface='eth7'.*which has eth0"):
        addresses.address(far, "eth7")
