"""What the documents say is so: their snippets run, and lists are those of the code."""

import contextlib
import io
import itertools
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import smp
from smp.job import config
from tests.prose import PYTHON, RATE, C, comments, page_of, prose, remarks
from tests.ranks import mpirun, on_ranks, python
from tests.reference.whole_job import WholeJob, split_over_all_ranks

ROOT = Path(__file__).resolve().parent.parent
CODE = itertools.chain(ROOT.glob("csrc/**/*"), ROOT.glob("smp/**/*"))
SOURCES = sorted({str(p.parent.relative_to(ROOT)) for p in CODE if p.suffix in (*C, *PYTHON)})
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
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
        "docs/precision.md",
        "docs/quickstart.md",
        "docs/tuning.md",
    }


@pytest.mark.parametrize(
    "text", [one for one in whole_scripts() if "quickstart" not in str(one.id)]
)
def test_a_whole_script_runs_on_two_ranks(text, script):
    done = mpirun(2, script(text))

    assert done.returncode == 0, done.stderr
    assert done.stdout and not done.stderr


def test_the_first_script_prints_the_same_losses_on_any_number_of_ranks(script):
    [text] = [b for b in python_blocks("docs/quickstart.md") if b.startswith("import torch")]
    done = [mpirun(ranks, script(text)) for ranks in (1, 2)]
    one, two = (re.findall(r"^\d+ [\d.]+$", each.stdout, re.M) for each in done)

    assert not any(each.returncode or each.stderr for each in done), done
    assert len(one) == 4 and one == two


A_STEP = """
import torch
import torch.nn.functional as F
from torch import nn

import smp

smp.init({"pipeline_parallel_degree": -1, "microbatches": 4})
torch.manual_seed(0)
model = smp.DistributedModel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
x, y = torch.randn(8, 6), torch.randint(3, (8,))


@smp.step
def train_step(model, x, y):
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


train_step(model, x, y)
"""

FOUR_RANKS = 4
IN_JOBS = "torch_smddp"  # of which the import sets up the process: see the test of a job


class Around(NamedTuple):
    """What a page leaves to its reader, and what then is so.

    Attributes:
        before: what runs before the block: what it uses and no earlier block has made.
        after: what runs after it.
        smaller: numbers of the block, for a test's.
    """

    before: str = ""
    after: str = ""
    smaller: dict[str, str] = {}


AROUND = {  # by page, and what one block of it has
    ("README.md", "import torch, smp"): Around(
        """
import torch
from torch import nn


class MyModel(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(3)]
""",
        "assert loss.isfinite() and model.partitioned",
    ),
    ("docs/quickstart.md", "def predict"): Around(after="assert classes.shape == (32,)"),
    ("docs/quickstart.md", "smp.save_checkpoint"): Around(after="assert saved == {'step': 20}"),
    ("docs/quickstart.md", "smp.save_trace"): Around(
        after="""
import os
smp.barrier()
assert {"partition.svg", "trace.json", "timeline.svg"} <= set(os.listdir())
"""
    ),
    ("docs/saving.md", "import os"): Around(
        after="""
assert first == 0 and not os.path.exists("checkpoints/step10_partial")
assert smp.resume_from_checkpoint("checkpoints", tag="step15")["step"] == 15
"""
    ),
    ("docs/tuning.md", "trace_memory_usage"): Around(
        after="assert ' kept ' in str(model.partition_report())"
    ),
    ("docs/porting.md", "class Centred"): Around(
        after="""
model = smp.DistributedModel(nn.Sequential(nn.Linear(6, 8), Centred(), nn.Linear(8, 3)))
step = smp.step(lambda model, x: (model.backward(model(x).sum()), model(x))[1])
assert step(model, torch.randn(8, 6)).concat().mean(0).shape == (3,)
assert not Centred()(torch.arange(6.0)[:, None]).mean(0)
"""
    ),
    ("docs/porting.md", "import smdistributed"): Around(
        after="import smp as plain; assert smp.DistributedModel is plain.DistributedModel"
    ),
    ("docs/precision.md", "import torch"): Around(
        after="assert loss.dtype == torch.float32 and optimizer.redefined_params"
    ),
    ("docs/partition.md", "smp.set_partition"): Around(
        """
import types
from torch import nn

self, Decoder = types.SimpleNamespace(), lambda: nn.Linear(6, 3)
""",
        """
from smp.modules.pins import pin_of
assert pin_of(model.transformer.h[11]) == 0 and pin_of(self.decoder) == 1
""",
    ),
    ("docs/operating.md", "comm_transports"): Around(
        "import smp", "assert smp.state.cfg.comm_transports == ('shm', 'mpi')"
    ),
    ("docs/debugging.md", "smp.save_trace"): Around(
        A_STEP,
        """
import os
smp.barrier()
assert {"trace.json", "timeline.svg"} <= set(os.listdir())
""",
    ),
    ("docs/memory.md", "smp.memory_report(everyone=True)"): Around(
        after="""
for one in report.every:  # as in the table
    counted = one.parameters, one.gradients, one.masters, one.optimizer_state
    assert [round(bytes / 2**20) for bytes in counted] == [8, 16, 16, 32]
"""
    ),
    ("docs/tensor_parallelism.md", "with smp.tensor_parallelism():  "): Around(
        """
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config

import smp

config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16)
""",
        """
ids = torch.randint(50, (2, 8))


@smp.step
def train_step(model, ids):
    loss = model(ids, labels=ids).loss
    model.backward(loss)
    return loss


assert train_step(model, ids).reduce_mean().isfinite()
assert "Split over the TP_GROUP: 2 x GPT2Attention" in str(model.partition_report())
""",
    ),
    ("docs/tensor_parallelism.md", "smp.nn.DistributedTransformerLMHead"): Around(
        """
smp.reset()
smp.init({"tensor_parallel_degree": 2})
ids = torch.randint(50, (2, 8))
""",
        "loss.backward(); assert model.word_embedding.weight.grad is not None",
        {
            "num_layers=12": "num_layers=2",
            "num_attention_heads=12": "num_attention_heads=4",
            "hidden_size=768": "hidden_size=256",
            "intermediate_size=3072": "intermediate_size=64",
            "vocab_size=50257": "vocab_size=50",
        },
    ),
    ("docs/tensor_parallelism.md", "class Classifier"): Around(
        after="""
plain = Classifier()
smp.set_tensor_parallelism(plain.head)
model = smp.DistributedModel(plain)
model(torch.randn(3, 64), torch.tensor([0, 7, 999])).backward()
assert model.module.head.weight.shape[0] == 500
""",
        smaller={"200_000": "1_000"},
    ),
    ("docs/tensor_parallelism.md", "self.gain"): Around(
        """
from smp.nn import utils as tp

self, width, x = smp.nn.DistributedModule(), 3, torch.ones(2, 3)
""",
        """
assert everyones.shape == (4, 3)
everyones.sum().backward()
assert self.gain.grad.tolist() == [8.0] * 3
""",
    ),
}


def around(document: str, block: str) -> Around:
    found = [
        value for (page, text), value in AROUND.items() if page == document and text in block
    ]
    assert len(found) <= 1
    return found[0] if found else Around()


def run_in_order(document: str, but: str = IN_JOBS) -> list[str]:
    """Run a page's blocks one after the other, as a reader pastes them; what each printed.

    One that begins a job begins it anew.

    Args:
        but: what those blocks have that something else runs.
    """
    names: dict = {}
    printed = []
    for block in python_blocks(document):
        if but in block:
            continue
        before, after, smaller = around(document, block)
        for full, small in smaller.items():
            assert full in block
            block = block.replace(full, small)
        if smp.is_initialized() and "smp.init(" in block:
            smp.reset()
        with contextlib.redirect_stdout(io.StringIO()) as output:
            for code in (before, block, after):
                exec(compile(code, f"{document}: {block[:40]!r}...", "exec"), names)
        printed.append(output.getvalue())
    return printed


# Those of a job: "docs/communication.md"; of "docs/generality.md": test_generality.py.
OWN_TESTS = {"docs/communication.md", "docs/notebooks.md", "docs/generality.md"}


def test_every_page_with_snippets_has_a_test_that_runs_them():
    run = {document for document, _ in AROUND} | OWN_TESTS
    assert {document for document in DOCUMENTS if python_blocks(document)} == run
    for document, text in AROUND:
        assert sum(text in block for block in python_blocks(document)) == 1, (document, text)


@on_ranks(2)
@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/quickstart.md",
        "docs/saving.md",
        "docs/tuning.md",
        "docs/porting.md",
        "docs/precision.md",
        "docs/operating.md",
        "docs/debugging.md",
    ],
)
def test_the_blocks_of_a_page_run_one_after_the_other(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_in_order(document)


def test_the_blocks_of_the_partitions_page_run_and_print_what_it_shows(tmp_path, monkeypatch):
    pytest.importorskip("transformers", minversion="5")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/partition.md").read_text()
    [shown] = re.findall(r"^```text\n(Partition over 4 ranks.*?)^```$", text, re.M | re.S)

    said = run_in_order("docs/partition.md")

    assert said[0] == shown
    assert (tmp_path / "gpt2.svg").read_text() == (ROOT / "docs/gpt2_partition.svg").read_text()


@on_ranks(2)
def test_the_script_of_the_page_on_memory_has_the_bytes_of_its_table():
    [table] = run_in_order("docs/memory.md")
    assert bool(table) == (smp.rank() == 0)


@on_ranks(FOUR_RANKS)
def test_the_blocks_of_the_page_on_tensor_parallelism_run(tmp_path, monkeypatch):
    """Two pipelines of two ranks.  A module of one's own: test_tensor_parallel_modules.py."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    run_in_order("docs/tensor_parallelism.md", but="SplitGate")


def test_the_blocks_that_use_the_collectives_alone_run_in_a_job(script):
    blocks = [b for page in DOCUMENTS for b in python_blocks(page) if IN_JOBS in b]
    check = """
x = torch.ones(3)
torch.distributed.all_reduce(x)
assert x.tolist() == [2.0] * 3
torch.distributed.destroy_process_group()
"""
    done = mpirun(2, script("".join(block + "import torch\n" + check for block in blocks)))

    assert len(blocks) == 2 and done.returncode == 0 and not done.stderr, done.stderr


def sides_of_the_diff() -> tuple[str, str]:
    """The training script of the page on porting, without smp and with it."""
    text = (ROOT / "docs/porting.md").read_text()
    [diff] = re.findall(r"^```diff\n(.*?)^```$", text, re.M | re.S)
    lines = diff.splitlines()
    old, new = ("\n".join(x[1:] for x in lines if x[:1] != skip) for skip in "+-")
    return old, new


LEFT_OUT = """
import torch
import torch.nn.functional as F
from torch import nn

device = "cpu"
torch.set_default_dtype(torch.float64)


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


torch.manual_seed(1)
loader = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(3)]
torch.manual_seed(0)
"""


@on_ranks(2)
def test_the_lines_that_porting_changes_leave_the_losses_as_they_were():
    losses = []
    for script in sides_of_the_diff():
        names: dict = {}
        exec(compile(LEFT_OUT + script, "docs/porting.md", "exec"), names)
        losses.append(names["loss"].item())

    assert losses[0] == pytest.approx(losses[1], abs=1e-10)


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

    done = python(path, timeout_s=600)

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
    job.run(3, max_norm=0.05)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_is_python(document):
    for block in python_blocks(document):
        compile(block.replace(", ...}", "}"), document, "exec")


@pytest.mark.parametrize("page", DOCUMENTS + SOURCES)
def test_a_page_and_the_comments_of_a_folder_are_in_the_projects_voice(page):
    """``python -m tests.prose PAGE`` shows the sentences."""
    found = prose(page_of(ROOT / page))
    assert found.rate <= RATE and not found.without_subject and not found.long, found


@pytest.mark.parametrize(
    "page, fault",
    [
        ("A rank waits.  What it waits for is a key.", "without_subject"),
        ("| a rank | Who waits; a rank |", "without_subject"),
        ("A rank " + "waits and " * 12 + "ends.", "long"),
    ],
)
def test_a_sentence_beside_the_rules_is_found(page, fault):
    assert getattr(prose(page), fault) and not getattr(prose("A rank waits."), fault)
    block = f"```text\n{page}\n```"
    assert prose(block).words == 0
    assert prose("A rank `that` waits for a rank that waits.").relative == 1


def test_the_comments_of_c_are_a_page():
    source = """
/* A rank waits.
 *
 * Threads  What waits. */
char *who = "/* who */"; // which waits
int   x; /* whose */ // that, too
"""
    page = comments(source)
    assert prose(page).words == 11 and prose(page).relative == 4, page
    assert prose(page).without_subject == ["What waits."]


def test_a_files_remarks_are_its_docstrings_and_comments():
    code = '''"""A rank that waits::

    what = a rank

A rank ends.
"""
who = "which"  # What is ``that``?
# That is a
# rank.
x = 1  # type: ignore[misc]
'''
    found = prose(remarks(code))
    assert found.relative == 3 and len(found.without_subject) == 2
    assert "a rank." in " ".join(remarks(code).split()) and "ignore" not in remarks(code)


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


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_file_that_a_document_names_is_there(document):
    """By its path, or in one line with another of its folder: `csrc/a/b.c`, `c.c`."""
    for line in (ROOT / document).read_text().splitlines():
        folder = None
        for name in re.findall(r"`([\w./]+)`", line):
            if re.match(r"(csrc|smp|tests|benchmarks|examples)/", name):
                folder = (ROOT / name).parent
                assert (ROOT / name).exists(), (document, name)
            elif folder is not None and re.fullmatch(r"\w+\.(c|h|cu|py)", name):
                assert (folder / name).exists(), (document, name)


def test_a_function_is_in_the_file_that_the_architecture_says():
    text = (ROOT / "docs/architecture.md").read_text()
    said = re.findall(r"`(?:\w+\.)*(\w+)\(\)`\s+in\s+`([\w/]+\.(?:c|py))`", text)
    assert len(said) > 10
    for function, file in said:
        assert re.search(rf"\b{function}\(", (ROOT / file).read_text()), (function, file)


def test_the_architecture_has_every_folder_and_every_file_of_the_server_and_of_collectives():
    text = (ROOT / "docs/architecture.md").read_text()
    alike = r"`([\w/]+)\{([\w,]+)\}`"  # `a/{b,c}`
    text = re.sub(alike, lambda m: "".join(f"`{m[1]}{x}`" for x in m[2].split(",")), text)
    core = ROOT / "csrc"
    for file in core.glob("**/*.[ch]"):
        assert f"`{file.parent.relative_to(core)}`" in text, file
    for folder in (f for f in (ROOT / "smp").iterdir() if (f / "__init__.py").exists()):
        assert f"`{folder.name}`" in text, folder
    for file in (core / "server").glob("*.h"):
        assert f"`{file.stem}`" in text or f"`{file.name}`" in text, file
    for side in ("intra_host", "inter_host"):
        for file in (core / "comm/collective" / side).glob("*.c"):
            assert f"`{file.name}`" in text or f"/{file.name}`" in text, file


def test_the_configuration_page_names_every_parameter_and_its_default():
    text = (ROOT / "docs/configuration.md").read_text()
    public = {name for name in config.FIELDS if not name.startswith("_")}
    assert public <= set(re.findall(r"`(\w+)(?:=[^`]*)?`", text))

    for names, default in re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", text, re.M):
        shown = [name for name in re.findall(r"`(\w+)`", names) if name in public]
        values = default.split(", ") if len(shown) > 1 else [default]
        for name, value in zip(shown, values, strict=True):
            assert is_default(name, value), (name, value)


def is_default(name: str, shown: str) -> bool:
    """Whether a page shows a parameter's default; one that depends on others is in words."""
    value = config.FIELDS[name].default
    if value is None:
        return True
    shown = re.sub(r"^(\d+) MiB$", lambda m: str(int(m[1]) << 20), shown.strip("`"))
    return shown.strip('"') == str(value) or shown == f"{value:g}"


def test_the_readme_names_every_parameter_that_is_not_built():
    text = (ROOT / "README.md").read_text()
    [row] = [line for line in text.splitlines() if line.startswith("| not built yet |")]
    said = set(re.findall(r"`(\w+)(?:=[^`]*)?`", row))

    assert said == {name for name, _, _ in config._NOT_BUILT}
