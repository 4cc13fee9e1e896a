"""Runs the tests that are marked with ``on_ranks`` inside the ranks of a job."""

import signal

import hypothesis
import pytest

from tests import accelerator, ranks

SIZE = "ranks_of_job"

# A shared machine makes any example slow at times; a hang has its own deadline.
hypothesis.settings.register_profile("smp", deadline=None)
hypothesis.settings.load_profile("smp")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "on_ranks(*sizes, timeout_s): run on that many ranks (tests/ranks.py)"
    )
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell that starts pytest in the background has it ignored; scripts inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if mark := metafunc.definition.get_closest_marker("on_ranks"):
        metafunc.fixturenames.append(SIZE)
        metafunc.parametrize(SIZE, mark.args, ids=[f"{n}ranks" for n in mark.args])


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
