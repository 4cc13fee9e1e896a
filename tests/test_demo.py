"""The demo, ``examples/train_gpt.py``."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from tests import accelerator
from tests.ranks import TESTS, mpirun, on_ranks
from tests.reference.whole_job import WholeJob, in_float64, split_over_all_ranks

DEMO = TESTS.parent / "examples" / "train_gpt.py"


def demo() -> ModuleType:
    """The script as a module; ``main`` is not called."""
    spec = importlib.util.spec_from_file_location("train_gpt", DEMO)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pieces(rank: int, step: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (torch.randint(0, 256, (2, 7), generator=generator),)


def loss_of(model: nn.Module, pieces: Tensor) -> Tensor:
    scores = model(pieces[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), pieces[:, 1:].flatten())


@on_ranks(2)
def test_its_model_split_over_two_ranks_equals_the_plain_one():
    split_over_all_ranks()
    in_float64(1)
    with smp.tensor_parallelism():
        net = demo().GPT(width=10, heads=5, layers=2, length=8)
    job = WholeJob(net, loss_of, pieces)
    assert isinstance(net.embedding, smp.nn.DistributedEmbedding)
    assert net.head.weight is net.embedding.weight and net.head.weight.shape == (128, 10)
    assert isinstance(net.blocks[1].mlp[2], smp.nn.DistributedLinear)
    job.run(2)


@pytest.mark.skipif(accelerator.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("more", ["--tensor-parallel=2", "--bf16"])
def test_on_an_accelerator_it_trains_and_writes_to_its_end(more, tmp_path):
    accelerator.build()
    script = tmp_path / "on_accelerator.py"
    script.write_text(
        "import runpy, sys\n"
        "from tests import accelerator\n"
        "accelerator.load()\n"
        "sys.argv[0] = sys.argv.pop(1)\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    options = ("--steps", "2", "--write", "2", more)
    done = mpirun(2, script, DEMO, "--output", tmp_path, *options)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "mean loss of the last 2 steps" in done.stdout
    written = done.stdout.partition("nats a byte\n")[2]
    assert "    def " in written and "class " in written


def run(ranks: int, folder: Path, *options: str) -> list[str]:
    """What it prints, with ``--output folder``, but for the speed."""
    done = mpirun(ranks, DEMO, "--output", folder, *options)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return re.sub(r"  [ \d,]+ bytes/s.*", "", done.stdout).splitlines()


@pytest.mark.stress
def test_split_over_two_ranks_it_learns_and_goes_on_from_its_checkpoint(tmp_path):
    """A run that was stopped ends as one that was not: the same losses, the same text."""
    options = ("--tensor-parallel", "2", "--batch", "4")
    whole = run(2, tmp_path / "whole", *options, "--steps", "28")
    assert "parameters on 2 ranks" in whole[0] and "step 0 of 28" in whole[0]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)$", "\n".join(whole), re.M)]
    assert len(losses) == 2 and losses[1] < losses[0] < 5.5  # log(256), before it learns

    parts = [run(2, tmp_path / "parts", *options, "--steps", n) for n in ("25", "28")]
    assert "step 25 of 28" in parts[1][0]
    assert parts[1][1:] == whole[2:]
