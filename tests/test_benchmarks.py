"""Spec: benchmarks can be run short, and say how (docs/benchmarks.md)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import TESTS, mpirun, python

pytestmark = pytest.mark.stress

BENCHMARKS = TESTS.parent / "benchmarks"


@pytest.mark.parametrize(
    "name, options, shows",
    [
        ("remote_call", ["--rounds", "1", "--calls", "5"], "rpc_sync echo"),
        ("memory", ["--steps", "1", "--layers", "1"], "| measured, step 1 |"),
        ("soak", ["10"], "10 steps"),
        ("ncf", ["--rounds", "1", "--steps", "1", "--batch", "8"], "| same batch |"),
        (
            "gpt_stack",
            ["--rounds", "1", "--width", "64", "--layers", "1", "--positions", "8"],
            "| data parallel |",
        ),
        ("empty_step", ["--rounds", "1", "--steps", "2"], "| 6000 parameters |"),
        ("gpt2", ["--rounds", "1", "--layers", "2", "--width", "32"], "of ideal"),
        ("messages", ["--blocks", "2"], "| GPT-2, with a cache |"),
        ("gather_lengths", ["--rounds", "1"], "| unknown |"),
        ("sharded_step", ["--rounds", "1", "--width", "64"], "| smp, sharded |"),
        ("sleeping_stages", ["--rounds", "1", "--block-ms", "1"], "| 8 | chains |"),
    ],
)
def test_benchmarks_of_two_ranks_run_short(name, options, shows):
    done = mpirun(2, BENCHMARKS / f"{name}.py", *options, timeout_s=120)

    assert done.returncode == 0, done.stderr
    assert shows in done.stdout


def test_the_cores_benchmarks_can_be_built(tmp_path):
    mpicc = shutil.which("mpicc", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    command = ["make", "-s", "-C", BENCHMARKS / "core", "build"]
    variables = [f"BUILD={tmp_path}", f"MPICC={mpicc}", "OPTIMIZE=-O1"]
    done = subprocess.run([*command, *variables], capture_output=True, text=True, timeout=200)

    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {
        *("ping", "ping-mpi", "stream", "collective")
    }


def test_the_benchmark_of_orders_runs_short():
    options = ["--rounds", "1", "--steps", "1", "--bytes", "4096"]
    done = mpirun(4, BENCHMARKS / "order.py", *options, timeout_s=120)

    assert done.returncode == 0, done.stderr
    assert "| server, held |" in done.stdout


@pytest.mark.parametrize(
    "argv, shows",
    [
        (["tracing_cost.py", "--rounds", "1"], "with times"),
        (["tp_kernels.py", "--rounds", "1", "--no-compile"], "smp / best"),
    ],
)
def test_benchmarks_of_one_process_run_short(argv, shows):
    done = python(BENCHMARKS / argv[0], *argv[1:])
    assert done.returncode == 0, done.stderr
    assert shows in done.stdout
