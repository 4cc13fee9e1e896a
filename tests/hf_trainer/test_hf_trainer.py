"""Spec: clients.md, section 6: Hugging Face's Trainer runs unchanged (4.17 to 4.26).

``make hf-test`` runs it with the last of these versions, in an environment of its own;
``make stress`` does too, and a plain ``pytest`` leaves it out.
"""

import functools
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.hf_trainer.train import Sentences

pytestmark = pytest.mark.stress

SCRIPT = Path(__file__).with_name("train.py")
REPOSITORY = SCRIPT.parents[2]
LAST = (4, 26)  # later ones do not create the optimizer under model parallelism
TIMEOUT_S = 300


@pytest.fixture(scope="module", autouse=True)
def trainer_knows_model_parallelism() -> None:
    version = importlib.metadata.version("transformers")
    if tuple(int(part) for part in version.split(".")[:2]) > LAST:
        pytest.fail(f"transformers {version} does not know this interface: make hf-test")


def run(
    model: str,
    folder: Path,
    *options: str,
    ranks: int = 0,
    split_into: int = 1,
    resume: bool = False,
    **parameters: Any,
) -> list[dict]:
    """Train, alone or on ``ranks`` ranks; what each rank wrote.

    Args:
        split_into: the tensor parallel degree.
        parameters: others of ``smp.init``.
    """
    folder.mkdir(exist_ok=True)
    arguments = [model, str(folder), *options]
    if resume:
        arguments.append("--resume")
    if split_into > 1:
        arguments.append("--tensor-parallel")
        parameters["tensor_parallel_degree"] = split_into
    run_script(SCRIPT, arguments, ranks, split_into, parameters)
    return [torch.load(folder / f"result{rank}.pt") for rank in range(ranks or 1)]


def run_script(
    script: Path, arguments: list[str], ranks: int, split_into: int, parameters: dict
) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SM_")}
    environment |= {
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # Trainer 4.26 reads its own state of random numbers with torch.load, which
        # refuses what is no tensor since PyTorch 2.6.
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
    }
    command = [sys.executable, str(script), *arguments]
    if ranks:
        parameters = {
            "partitions": ranks // split_into,
            "microbatches": 2,
            "ddp": True,
            "pipeline": "interleaved",
            "optimize": "speed",
            **parameters,
        }
        environment |= {
            "SM_HP_MP_PARAMETERS": json.dumps(parameters),
            "SM_FRAMEWORK_PARAMS": '{"sagemaker_mpi_enabled": true}',
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_btl": "^ofi",  # as in tests/ranks.py
        }
        mpirun = Path(sys.executable).with_name("mpirun")
        mpirun = str(mpirun) if mpirun.exists() else shutil.which("mpirun")
        command = [mpirun, "--oversubscribe", "-np", str(ranks), *command]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"


def check_alike(got: dict, want: dict, evaluated: bool = True) -> None:
    """Losses, what is predicted and what is saved are equal within rounding."""
    assert got["steps"] == want["steps"]
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-3)
    if evaluated:
        assert got["eval_loss"] == pytest.approx(want["eval_loss"], rel=1e-4)
        torch.testing.assert_close(
            got["predictions"], want["predictions"], rtol=1e-3, atol=1e-3
        )
    assert got["parameters"].keys() == want["parameters"].keys()
    for name, parameter in want["parameters"].items():
        torch.testing.assert_close(
            got["parameters"][name],
            parameter,
            rtol=1e-3,
            atol=1e-3,
            msg=lambda said, name=name: f"{name}: {said}",
        )


@pytest.mark.parametrize(("model", "resumes"), [("gpt2", True), ("bert", False)])
def test_the_trainer_gives_on_two_ranks_what_it_gives_on_one(model, resumes, tmp_path):
    """Train, evaluate, predict and save: equal within rounding; and it learns.

    A training that is resumed from the checkpoint half way has the same bits: parameters,
    optimizer, schedule and data.
    """
    (want,) = run(model, tmp_path / "plain")
    folder = tmp_path / "ranks"
    got, other = run(model, folder, ranks=2)

    assert got["steps"] == want["steps"] == 12
    assert got["wrapped"] == "DistributedModel" != want["wrapped"]
    assert sum(want["losses"][-3:]) < sum(want["losses"][:3])
    assert other["eval_loss"] == got["eval_loss"]
    check_alike(got, want)

    assert (folder / "checkpoint-6" / "user_content.pt").exists()
    assert len(list((folder / "checkpoint-6").glob("optimizer.pt_*"))) == 2
    if not resumes:
        return
    resumed, _ = run(model, folder, ranks=2, resume=True)
    assert resumed["steps"] == got["steps"]
    assert resumed["eval_loss"] == got["eval_loss"]
    assert resumed["losses"][-6:] == got["losses"][-6:]
    for name, parameter in got["parameters"].items():
        assert torch.equal(resumed["parameters"][name], parameter), name


def test_half_precision_and_sharded_state_resume_with_the_same_bits(tmp_path):
    parameters = {"partitions": 1, "bf16": True, "shard_optimizer_state": True}
    got = run("gpt2", tmp_path, ranks=2, **parameters)[0]
    assert sum(got["losses"][-3:]) < sum(got["losses"][:3])
    assert len(list((tmp_path / "checkpoint-6").glob("optimizer.pt_*"))) == 2
    resumed = run("gpt2", tmp_path, ranks=2, resume=True, **parameters)[0]
    assert resumed["losses"][-6:] == got["losses"][-6:]
    for name, parameter in got["parameters"].items():
        assert torch.equal(resumed["parameters"][name], parameter), name


ALIKE = ("--in-order", "--max-norm", "0.5")
REPLACED = {"gpt2": "DistributedTransformerLMHead", "bert": "DistributedTransformer"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[[str], dict]:
    """What one process gives with the samples of all ranks, by model; each trains once."""

    @functools.cache
    def trained(model: str) -> dict:
        folder = tmp_path_factory.mktemp(model)
        (want,) = run(model, folder, *ALIKE, "--batch", "16")
        return want

    return trained


@pytest.mark.sample(1)
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("model", REPLACED)
def test_the_trainer_with_a_split_model(model, alike, alone, tmp_path):
    """As the plain one over the same samples, with gradients clipped; saved for the plain one.

    ``alike``: both ranks are fed the same samples.  The Trainer's own evaluation counts them
    twice then: it gathers over the DP_GROUP what it samples by ``rdp_rank``.
    """
    want = alone(model)
    batch = ("--batch", "16" if alike else "8")
    options = {"ranks": 2, "split_into": 2, "prescaled_batch": alike}
    got, other = run(model, tmp_path / "ranks", *ALIKE, *batch, **options)

    assert REPLACED[model] in got["modules"]
    assert got["losses"][-1] < got["losses"][0]
    assert other["losses"] == got["losses"] and other["eval_loss"] == got["eval_loss"]
    check_alike(got, want, evaluated=not alike)
    name = {"gpt2": "GPT2LMHeadModel", "bert": "BertForSequenceClassification"}[model]
    saved = getattr(transformers, name).from_pretrained(tmp_path / "ranks").eval()
    with torch.no_grad():
        logits = saved(Sentences(24, model == "bert", seed=2).tokens).logits
    torch.testing.assert_close(logits, want["predictions"], rtol=1e-3, atol=1e-3)

    resumed, _ = run(model, tmp_path / "ranks", *ALIKE, *batch, resume=True, **options)
    assert resumed["losses"][-6:] == got["losses"][-6:]
    for name, parameter in got["parameters"].items():
        assert torch.equal(resumed["parameters"][name], parameter), name


def test_a_split_model_in_a_pipeline(alone, tmp_path):
    got, *_ = run("gpt2", tmp_path / "ranks", *ALIKE, ranks=4, split_into=2)
    check_alike(got, alone("gpt2"))


def test_families_that_are_replaced():
    """Losses and state dicts of each: see forms.py."""
    run_script(SCRIPT.with_name("forms.py"), [], 2, 2, {"microbatches": 1})
