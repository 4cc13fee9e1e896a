"""Examples run unchanged under every launcher."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.ranks import mpirun, torchrun

TRAIN_GPT = Path(__file__).parent.parent / "examples" / "train_gpt.py"


def trained(done: CompletedProcess) -> str:
    """What the job says of its model when it is trained: the loss, and what it writes."""
    assert done.returncode == 0, done.stdout + done.stderr
    _, *said = done.stdout.split("mean loss of the last ")
    assert len(said) == 1, done.stdout
    return said[0]


@pytest.mark.stress
def test_train_gpt_trains_one_model_over_all_ranks_under_every_launcher(tmp_path):
    alone = trained(mpirun(1, TRAIN_GPT, "--steps", "2", "--output", tmp_path / "alone"))
    for launch in (mpirun, torchrun):
        output = tmp_path / launch.__name__
        done = launch(2, TRAIN_GPT, "--steps", "2", "--output", output)
        assert trained(done) == alone
        assert "parameters on 2 ranks" in done.stdout
        parts = (output / "checkpoints").glob("*/model_*")
        assert sorted(part.name for part in parts) == ["model_0_0.pt", "model_1_0.pt"]
