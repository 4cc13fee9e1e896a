"""PyTorch's own tests of process groups pass on smddp wherever they pass on gloo.

``reference/torch_suite_gloo.txt`` has the names of those that pass on gloo (torch 2.13), with
a 4 behind those that do so with 4 ranks alone: ``torch_suite.py gloo 4 --native`` prints them.
"""

import json
from pathlib import Path

import pytest

from tests.ranks import SEEDS, python

pytestmark = pytest.mark.stress

HERE = Path(__file__).parent
ON_GLOO = HERE / "reference" / "torch_suite_gloo.txt"
ALL_TO_ALL = [
    f"test_all_to_all{form}{group}"
    for form in (
        "",
        "_complex",
        "_single_equal_split",
        "_single_equal_split_complex",
        "_single_unequal_split",
        "_single_unequal_split_complex",
    )
    for group in ("", "_full_group")
    if not (form.endswith("complex") and group)
]

# What passes on 2 ranks is tried on 4, too.
at_ranks = pytest.mark.parametrize("ranks", ["2", "4"] if SEEDS > 1 else ["4"])


def passed(*arguments: str) -> tuple[set[str], int]:
    """The tests that passed, and the number of operations that smddp did."""
    done = python(HERE / "torch_suite.py", *arguments, timeout_s=600)
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    answer = json.loads(done.stdout.splitlines()[-1])
    return set(answer["passed"]), answer["operations"]


@at_ranks
def test_what_passes_on_gloo_passes_on_smddp(ranks):
    lines = [line.split() for line in ON_GLOO.read_text().splitlines()]
    wanted = {name for name, *only in lines if only in ([], [ranks])}

    names, operations = passed("gloo", ranks, "--list", str(ON_GLOO))
    if missing := wanted - names:  # some of its limits are a second
        names |= passed("gloo", ranks, *missing)[0]

    assert wanted - names == set()
    assert operations > 2 * len(wanted)


@at_ranks
def test_its_all_to_all_which_it_has_for_mpi_alone_passes_too(ranks):
    names, operations = passed("mpi", ranks, *ALL_TO_ALL)

    assert set(ALL_TO_ALL) - names == set()
    assert operations >= 2 * len(ALL_TO_ALL)
