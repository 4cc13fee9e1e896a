"""What scripts of jobs have in common: ``from tests.models.jobs import *``."""

import ctypes
import os
import random
import re
import select
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

import smp
from smp import _core
from tests.models.partition import distributed

__all__ = ["Path", "_core", "chain", "ctypes", "distributed", "nn", "os", "random", "re"]
__all__ += ["select", "signal", "smp", "sys", "threading", "time", "torch", "train"]
__all__ += ["wait_until_all_have_said"]


def chain(*parts: nn.Module, **config: object) -> smp.DistributedModel:
    """``smp.init``, and a model whose part ``i`` is on pp_rank ``i``, modulo their number."""
    smp.init({"pipeline_parallel_degree": len(parts), **config})
    return distributed(nn.Sequential(*parts), [i % smp.pp_size() for i in range(len(parts))])


@smp.step
def train(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss


def wait_until_all_have_said(rank: int, ranks: int) -> None:
    """A rank that ends with an error ends the others: first all say what they saw."""
    folder = Path(sys.argv[0]).parent
    (folder / f"said {rank}").touch()
    until = time.monotonic() + 20
    while len(list(folder.glob("said *"))) < ranks and time.monotonic() < until:
        threading.Event().wait(0.01)
