"""What the documents say is so: whole scripts in them run, and lists are those of the code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import smp
from smp.job import config
from tests.ranks import mpirun, on_ranks, rank_environment
from tests.reference.whole_job import WholeJob, split_over_all_ranks

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md")),
]


def test_the_citation_is_of_this_project():
    """A key a line: read without YAML, which the tests do not need."""
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    said = dict(line.split(": ", 1) for line in lines if re.match(r"[a-z-]+: ", line))
    project = (ROOT / "pyproject.toml").read_text()

    assert said["cff-version"] == "1.2.0" and said["message"] and "authors:" in lines
    assert said["version"] == smp.__version__
    description = re.search(r'^description = "(.*)"$', project, re.M)
    assert description is not None and said["title"] == f'"smp: {description[1]}"'
    assert f'license = "{said["license"]}"' in project


def python_blocks(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / document).read_text(), re.M | re.S)


def whole_scripts() -> list:
    """Those that need nothing that is not in them."""
    return [
        pytest.param(block, id=f"{document}-{number}")
        for document in DOCUMENTS
        for number, block in enumerate(python_blocks(document))
        if block.startswith("import torch\n") and "\nsmp.init(" in block
    ]


def test_there_are_whole_scripts():
    assert {param.id.partition("-")[0] for param in whole_scripts()} == {
        "docs/porting.md",
        "docs/quickstart.md",
    }


@pytest.mark.parametrize("script", whole_scripts())
def test_a_whole_script_runs_on_two_ranks(script, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(script)

    done = mpirun(2, path)

    assert done.returncode == 0, done.stderr
    assert done.stdout and not done.stderr


def test_the_first_script_prints_the_same_losses_on_any_number_of_ranks(tmp_path):
    [script] = [b for b in python_blocks("docs/quickstart.md") if b.startswith("import torch")]
    path = tmp_path / "train.py"
    path.write_text(script)

    one, two = (
        re.findall(r"^\d+ [\d.]+$", mpirun(ranks, path).stdout, re.M) for ranks in (1, 2)
    )

    assert len(one) == 4 and one == two


NOTEBOOK = """
import ast

names = {}
for cell in CELLS:
    code = ast.parse(cell)
    shown = code.body.pop() if isinstance(code.body[-1], ast.Expr) else None
    exec(compile(code, "cell", "exec"), names)
    if shown is not None:
        value = eval(compile(ast.Expression(shown.value), "cell", "eval"), names)
        if hasattr(value, "_repr_svg_"):
            print("picture", value._repr_svg_()[:4])
        elif value is not None:
            print("shown", value)
"""


def test_the_cells_of_the_notebook_page_run_one_after_the_other(tmp_path):
    """In one process that no launcher started; what ends a cell is shown."""
    path = tmp_path / "notebook.py"
    path.write_text(f"CELLS = {python_blocks('docs/notebooks.md')!r}\n{NOTEBOOK}")

    done = subprocess.run(
        [sys.executable, path], env=rank_environment(), capture_output=True, text=True
    )

    # A machine that is busy is told how far the tracing has come.
    said = [line for line in done.stderr.splitlines() if not line.startswith("smp: trac")]
    assert done.returncode == 0 and not said, done.stderr
    assert done.stdout.startswith("picture <svg\nPartition over 3 ranks")
    assert " kept " in done.stdout and done.stdout.count("picture <svg\n") == 2
    costs, losses, last = re.findall("^shown (.*)$", done.stdout, re.M)
    assert "'rank of the last layer': 2" in costs
    values = [float(loss) for loss in losses.strip("[]").split(",")]
    assert len(values) == 5 and values == sorted(values, reverse=True)
    assert last.startswith("tensor(")


@on_ranks(2)
def test_the_distributed_module_that_is_written_from_the_primitives_equals_the_plain_one():
    """The block itself, in float64; it is between two linears that are not marked."""
    [block] = [b for b in python_blocks("docs/tensor_parallelism.md") if "class SplitGate" in b]
    names: dict = {"__name__": "example"}
    exec(compile(block, "docs/tensor_parallelism.md", "exec"), names)
    split_over_all_ranks()
    torch.set_default_dtype(torch.float64)
    net = nn.Sequential(nn.Linear(3, 5), names["Gate"](5), nn.Linear(5, 3))
    smp.set_tensor_parallelism(net[1])

    def batch(rank: int, step: int) -> tuple:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return (torch.randn(4, 3, generator=generator),)

    job = WholeJob(net, lambda model, x: model(x).square().mean(), batch)
    assert type(net[1]) is names["SplitGate"] and net[1].first.weight.shape == (10, 5)
    for step in range(3):
        job.step(step, max_norm=0.05)
    job.check_parameters()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_is_python(document):
    for block in python_blocks(document):
        compile(block.replace(", ...}", "}"), document, "exec")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_link_leads_somewhere(document):
    text = re.sub(r"^```.*?^```$|`[^`]*`", "", (ROOT / document).read_text(), flags=re.M | re.S)
    for target, anchor in re.findall(r"\]\((?!https?:)([\w./]*)(?:#([\w-]+))?\)", text):
        file = (ROOT / document).parent / target if target else ROOT / document
        assert file.exists(), (document, target)
        if anchor:
            heads = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            names = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in heads}
            assert anchor in names, (document, target, anchor)


def test_the_readme_names_every_parameter_that_is_not_built():
    text = (ROOT / "README.md").read_text()
    [row] = [line for line in text.splitlines() if line.startswith("| not built yet |")]
    said = set(re.findall(r"`(\w+)(?:=[^`]*)?`", row))

    assert said == {name for name, _, _ in config._NOT_BUILT}
