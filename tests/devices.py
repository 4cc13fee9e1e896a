"""The devices to test on: one list for every test that runs on several.

    @on_ranks(2)
    @pytest.mark.parametrize("device", DEVICES)
    def test_something(device):
        device = use(device)

``"cpu"`` is always there; ``"pretend"``, an accelerator over host memory, where there is
a C++ compiler (``tests/accelerator``); ``"cuda"`` where there is a GPU.  Tests on
``"pretend"`` run on ranks of their own, since a process that has made it known keeps it.
"""

import pytest
import torch

import smp
from tests import accelerator

DEVICES = [
    "cpu",
    pytest.param(
        accelerator.NAME,
        marks=pytest.mark.skipif(accelerator.compiler() is None, reason="no C++ compiler"),
    ),
    *(["cuda"] if torch.cuda.is_available() else []),
]
# Kinds of which a rank has two or more.
SEVERAL = [DEVICES[1], *(["cuda"] if torch.cuda.device_count() > 1 else [])]


def use(name: str) -> torch.device:
    """Make the device ready in this rank, after ``smp.init``; each its own GPU if it can."""
    if name == accelerator.NAME:
        return accelerator.load()
    if name == "cuda":
        torch.cuda.set_device(smp.local_rank() % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)
