"""Runs the tests that are marked with ``on_ranks`` inside the ranks of a job, sorts tests into
two tiers, and shows where the time went.

The gate is what every change passes, and a plain ``pytest`` runs: quick, and no verdict of it
depends on the machine's pace.  The rest is marked ``stress`` (``pytest -m stress``; a test by
its name: ``pytest -m "" ...``).  Of a test with many cases, ``@pytest.mark.sample(n)`` leaves
so many in the gate, and half as many others in stress (``SEEDS=5``: five times that); what
is beyond is marked ``wide``.
"""

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import accelerator, ranks, spent

SIZE = "ranks_of_job"

# A shared machine makes any example slow at times; a hang has its own deadline.
hypothesis.settings.register_profile("smp", deadline=None)
hypothesis.settings.load_profile("smp")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "on_ranks(*sizes, timeout_s): run on that many ranks (tests/ranks.py)"
    )
    config.addinivalue_line("markers", "stress: not in the gate")
    config.addinivalue_line("markers", "sample(n): n of the test's cases are in the gate")
    config.addinivalue_line("markers", "wide: in stress with a higher SEEDS alone")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell that starts pytest in the background has it ignored; scripts inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if mark := metafunc.definition.get_closest_marker("on_ranks"):
        metafunc.fixturenames.append(SIZE)
        metafunc.parametrize(SIZE, mark.args, ids=[f"{n}ranks" for n in mark.args])


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m does not name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sampled: dict[tuple, list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("sample"):
            sampled.setdefault((item.path, item.originalname), []).append(item)
    for cases in sampled.values():
        count = min(case.get_closest_marker("sample").args[0] for case in cases)
        chosen = sample(cases, count + (count * ranks.SEEDS + 1) // 2)
        for case in chosen[count:]:
            case.add_marker("stress")
        for case in set(cases) - set(chosen):
            case.add_marker("wide")


def sample(cases: list[pytest.Function], count: int) -> list[pytest.Function]:
    """So many of the cases, which hold as many pairs of parameters as possible."""

    def pairs_of(case: pytest.Function) -> set[tuple]:
        values = [(name, str(value)) for name, value in sorted(case.callspec.params.items())]
        return {(value,) for value in values} | set(itertools.combinations(values, 2))

    pairs = {case: pairs_of(case) for case in cases}
    seen: set[tuple] = set()
    chosen: list[pytest.Function] = []
    while len(chosen) < min(count, len(cases)):
        # The values themselves come first, then their pairs; in a tie the first case.
        chosen.append(
            max(
                (case for case in cases if case not in chosen),
                key=lambda case: (
                    sum(len(pair) == 1 for pair in pairs[case] - seen),
                    len(pairs[case] - seen),
                ),
            )
        )
        seen |= pairs[chosen[-1]]
    return chosen


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Writes the script of a job, ``train.py``, in ``tmp_path``."""

    def write(text: str) -> Path:
        (tmp_path / "train.py").write_text(text)
        return tmp_path / "train.py"

    return write


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    spent.file = item.location[0]
    known = spent.seconds[spent.file].total()
    begin = time.monotonic()
    yield
    known = spent.seconds[spent.file].total() - known
    spent.add("here", time.monotonic() - begin - known)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("where the time went")
    for line in spent.table():
        terminalreporter.line(line)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    mark = pyfuncitem.get_closest_marker("on_ranks")
    if mark is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    kwargs = {name: pyfuncitem.funcargs[name] for name in names}
    size = pyfuncitem.callspec.params[SIZE]
    # The pretended accelerator changes a process for good.
    team = kwargs.get("device") if kwargs.get("device") == accelerator.NAME else ""
    if team:
        accelerator.build()  # here, so that the ranks need not wait for one another
    try:
        ranks.call_on_ranks(size, pyfuncitem.obj, team=team, **mark.kwargs, **kwargs)
    except ranks.RanksFailed as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    return True


def pytest_unconfigure() -> None:
    ranks.close_teams()
