"""What the environment says of who started the ranks, and where these meet."""

import os
import signal
import socket
import stat
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from smp.collectives import launch, ranks
from smp.job import addresses, bootstrap, transports
from smp.job.config import ConfigError
from smp.start import initialization


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


def test_the_interface_towards_the_others_is_that_of_the_route_to_them(monkeypatch):
    """To a rank of another network; loopback's where all share one."""
    found = {"lo": "127.0.0.1", "eth0": "10.0.0.9", "eth1": "10.1.2.3"}
    monkeypatch.setattr(addresses, "_interfaces", lambda: found)
    monkeypatch.setattr(addresses._core, "addresses", lambda name: ["eth1 10.1.2.3/24"])
    monkeypatch.setattr(addresses, "_own_address", lambda: "10.0.0.9")
    asked, told = [], []

    class Route:
        def __init__(self, *kind):
            assert kind == (socket.AF_INET, socket.SOCK_DGRAM)

        def __enter__(self):
            return self

        def __exit__(self, *_): ...

        def connect(self, to):
            asked.append(to[0])

        def getsockname(self):
            return ("10.1.2.3", 1)

    def everyone(mine: bytes) -> list[bytes]:
        told.append(mine)
        return [mine, b"0/7 10.0.0.7", b"2/7 10.0.0.8"]

    far = SimpleNamespace(has_one_network=False, network="0/7", allgather_bytes=everyone)
    monkeypatch.setattr(addresses.socket, "socket", Route)
    assert addresses.interface(far, None) == "eth1" and asked == ["10.0.0.8"]
    assert addresses.interface(far, "10.1.2.0/24") == "eth1"
    assert asked == ["10.0.0.8"] and told == [b"0/7 10.0.0.9", b"0/7 10.1.2.3"]
    near = SimpleNamespace(has_one_network=True)
    assert addresses.interface(near, "10.1.2.0/24") == "lo"


class Hosts(bootstrap.Bootstrap):
    """A rank that sees the files of some others."""

    def __init__(self, rank: int, seen: list[str], networks: list[str]) -> None:
        self.rank, self.size = rank, len(seen)
        self.cards = [seen, networks]
        self._find_hosts()

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        cards = [card.encode() for card in self.cards.pop(0)]
        return [*cards[: self.rank], data, *cards[self.rank + 1 :]]


def test_hosts_are_ranks_that_see_each_others_files(tmp_path, monkeypatch):
    """... in whatever order they come; on one host there may be several networks."""
    monkeypatch.setattr(bootstrap, "network_namespace", lambda: 7)
    here, gone = str(tmp_path), str(tmp_path / "none")
    boot = Hosts(3, [gone, here, gone, "", here], ["0/7", "1/7", "0/7", "", "1/7"])
    assert (boot.network, boot.host, boot.hosts) == ("1/7", 1, 2)
    assert (boot.local_rank, boot.local_size, boot.has_one_network) == (1, 3, False)
    boot = Hosts(4, [gone, gone, here, here, ""], ["0/7", "0/7", "2/7", "2/7", ""])
    assert (boot.host, boot.local_rank, boot.local_size) == (1, 2, 3)
    boot = Hosts(2, [here, here, ""], ["0/7", "0/8", ""])
    assert (boot.host, boot.hosts, boot.local_rank, boot.local_size) == (0, 1, 2, 3)
    assert not boot.has_one_network
    assert Hosts(1, [here, ""], ["0/7", ""]).has_one_network


def test_the_file_of_a_host_is_its_users_alone_and_gone_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "SHARED_FOLDER", tmp_path)
    with bootstrap.socket_file() as path:
        assert [str(one) for one in tmp_path.iterdir()] == [path]
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(path)  # somebody listens there
    assert list(tmp_path.iterdir()) == []

    def refuse(*_):
        raise OSError("no rename")

    monkeypatch.setattr(bootstrap.Path, "rename", refuse)
    with bootstrap.socket_file() as path:
        assert list(tmp_path.iterdir()) == []


def test_ranks_that_meet_again_over_a_store_have_other_keys():
    store = dist.HashStore()
    names = [bootstrap._name_of_life("a", store, 3) for _ in range(9)]
    assert names == ["a 0"] * 3 + ["a 1"] * 3 + ["a 2"] * 3
    assert bootstrap._name_of_life("b", store, 3) == "b 0"


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_which_may_have_the_store_waits_until_all_have_read(rank, monkeypatch):
    boot = bootstrap.OverStore.__new__(bootstrap.OverStore)
    boot.rank, boot.size, boot.store = rank, 2, dist.HashStore()
    boot._calls = iter([5])
    boot.store.set(f"5/{1 - rank}", "theirs")
    waited = []
    monkeypatch.setattr(boot, "_wait", lambda *given: waited.append(given))

    got = boot.allgather_bytes(b"mine")

    assert got == ([b"mine", b"theirs"] if rank == 0 else [b"theirs", b"mine"])
    read = [(["5/read/0", "5/read/1"], bootstrap.READ_S)]
    assert waited == [(["5/0", "5/1"],), *(read if rank == 0 else [])]
    assert boot.store.check([f"5/read/{rank}"])


def test_a_store_s_own_time_is_the_most_that_ranks_wait_for_each_other():
    boot = bootstrap.OverStore.__new__(bootstrap.OverStore)
    boot.store, boot.size, boot.names = dist.HashStore(), 1, [0]
    boot.store.set_timeout(bootstrap.dist.default_pg_timeout * 0)
    with pytest.raises(dist.DistStoreError, match=r"ranks \[0\] of 1 .* within 0 s"):
        boot._wait(["a"])


@pytest.mark.parametrize(
    "started, mpi_rank, found",
    [(2, 1, "mpi"), (2, 0, "store"), (4, 1, "store"), (1, 1, "store")],
)
def test_ranks_of_a_group_that_is_there_meet_over_mpi_if_it_numbers_them_so(
    started, mpi_rank, found, environment, monkeypatch
):
    """Rank 1 of 2 in torch's group."""
    there = SimpleNamespace(
        is_initialized=lambda: True,
        get_rank=lambda: 1,
        get_world_size=lambda: 2,
        distributed_c10d=SimpleNamespace(_get_default_store=lambda: "its store"),
    )
    monkeypatch.setattr(bootstrap, "dist", there)
    monkeypatch.setattr(bootstrap, "has_mpi4py", lambda: True)
    monkeypatch.setattr(bootstrap, "over_mpi", lambda: SimpleNamespace(rank=mpi_rank))
    monkeypatch.setattr(bootstrap, "OverStore", lambda *given: given)
    environment["OMPI_COMM_WORLD_SIZE"] = str(started)

    boot = bootstrap.connect()

    want = ("its store", 1, 2) if found == "store" else SimpleNamespace(rank=1)
    assert boot == want


class OneRank:
    """MPI of a job of one rank, as mpi4py shows it."""

    BYTE, THREAD_MULTIPLE = "byte", 3

    def __init__(self, thread: int = 3) -> None:
        self.rank, self.size = 0, 1
        self.COMM_WORLD = SimpleNamespace(Idup=lambda: (self, self))
        self.Query_thread = lambda: thread
        self.Get_library_version = lambda: "MPICH 4.2"

    def Test(self) -> bool:
        return True

    def Iallgather(self, mine, sizes):
        sizes[:] = mine
        return self

    def Iallgatherv(self, mine, parts):
        parts[0][:] = mine[0]
        return self


def test_an_mpi4py_of_another_mpi_than_the_launchers_is_told(environment, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=OneRank()))
    assert bootstrap.OverMPI().size == 1
    environment["OMPI_COMM_WORLD_SIZE"] = "2"
    told = r"launcher started 2 ranks, but mpi4py sees 1: .* another MPI .*\(MPICH 4.2\)"
    with pytest.raises(RuntimeError, match=told):
        bootstrap.OverMPI()


@pytest.mark.parametrize("thread, runs", [(3, True), (2, False)])
def test_an_mpi_that_runs_is_used_only_where_any_thread_may_call_it(
    thread, runs, environment, monkeypatch
):
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=OneRank(thread)))
    made = []

    def over_mpi() -> bootstrap.OverMPI:
        made.append(1)
        return bootstrap.OverMPI()

    monkeypatch.setattr(bootstrap, "over_mpi", bootstrap.cache(over_mpi))
    assert bootstrap.running_mpi() is None and not made  # it is not started for this
    mpi = bootstrap.over_mpi()
    assert bootstrap.running_mpi() is (mpi if runs else None)
    assert mpi.is_for_any_thread is runs


@pytest.mark.parametrize("why", [KeyboardInterrupt(), ValueError("of MPI")])
def test_buffers_of_a_wait_that_is_left_stay_mpis(why):
    """Whatever ends it: MPI may write into them later."""
    boot = bootstrap.OverMPI.__new__(bootstrap.OverMPI)
    boot._abandoned = []

    def test():
        raise why

    request, buffer = SimpleNamespace(Test=test), bytearray(3)
    with pytest.raises(type(why)):
        boot._wait(request, buffer)
    assert boot._abandoned == [(request, (buffer,))]


@pytest.mark.parametrize("mpi, died", [(1, True), (1, False), (0, True)])
def test_after_a_death_mpis_clean_up_has_so_much_time_whatever_a_script_does_with_alarms(
    mpi, died, monkeypatch
):
    done = []
    runs = SimpleNamespace(cache_info=lambda: SimpleNamespace(currsize=mpi))
    monkeypatch.setattr(bootstrap, "over_mpi", runs)
    monkeypatch.setattr(bootstrap, "_core", SimpleNamespace(someone_died=lambda: died))
    for name in ("signal", "setitimer"):
        monkeypatch.setattr(signal, name, lambda *given: done.append(given))
    bootstrap._end_without_the_dead()
    want = [
        (signal.SIGALRM, signal.SIG_DFL),
        (signal.ITIMER_REAL, bootstrap.END_AFTER_DEATH_S),
    ]
    assert done == (want if mpi and died else [])


class Different(bootstrap.Bootstrap):
    """Ten ranks, of which this is the first; the others say what is changed."""

    def __init__(self, size: int, change) -> None:
        self.rank, self.size, self.change = 0, size, change

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        return [data, *[self.change(data) for _ in range(1, self.size)]]


@pytest.mark.parametrize(
    "size, others",
    [
        (2, "rank 1"),
        (9, "ranks 1, 2, 3, 4, 5, 6, 7, 8"),
        (10, "ranks 1, 2, 3, 4, 5, 6, 7, 8, ..."),
    ],
)
def test_ranks_of_another_version_are_told_and_not_all_of_many(size, others):
    version = initialization.__version__
    boot = Different(size, lambda mine: mine.replace(version.encode(), b"0.0"))
    with pytest.raises(ConfigError) as told:
        initialization._agreed(boot, None)
    assert str(told.value) == (
        f"the ranks' configurations differ: version={version} on rank 0; "
        f"version=0.0 on {others}"
    )


def test_every_parameter_is_the_same_on_all_ranks_but_for_names_of_networks():
    cfg = initialization.config.load({"comm_interface": "eth0"}, 2)
    assert {*cfg.as_texts()} == {*vars(cfg)} - {"comm_interface"}
