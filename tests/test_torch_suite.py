"""PyTorch's own tests of process groups pass on smddp wherever they pass on gloo.

``reference/torch_suite_gloo.txt`` has the names of those that pass on gloo (torch 2.13), with
a 4 behind those that do so with 4 ranks alone: ``torch_suite.py gloo 4 --native`` prints them.
"""

import json
import subprocess
import sys
from pathlib import Path

from tests.ranks import rank_environment

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


def passed(*arguments: str) -> tuple[set[str], int]:
    """The tests that passed at 2 ranks, and the number of operations that smddp did."""
    done = subprocess.run(
        [sys.executable, HERE / "torch_suite.py", *arguments],
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    answer = json.loads(done.stdout.splitlines()[-1])
    return set(answer["passed"]), answer["operations"]


def test_what_passes_on_gloo_passes_on_smddp():
    lines = ON_GLOO.read_text().splitlines()
    wanted = {line for line in lines if not line.endswith(" 4")}

    names, operations = passed("gloo", "2", "--list", str(ON_GLOO))

    assert wanted - names == set()
    assert operations > 2 * len(wanted)


def test_its_all_to_all_which_it_has_for_mpi_alone_passes_too():
    names, operations = passed("mpi", "2", *ALL_TO_ALL)

    assert set(ALL_TO_ALL) - names == set()
    assert operations >= 2 * len(ALL_TO_ALL)
