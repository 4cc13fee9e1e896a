"""What SMP_LOG shows of a job: docs/debugging.md."""

import re
from pathlib import Path

from tests.ranks import mpirun

SCRIPT = """
import smp, torch
smp.init({"pipeline_parallel_degree": 2, "comm_transports": ["^mpi"]})
"""
LINE = r"smp \d\d:\d\d:\d\d\.\d\d\d rank {rank} info: {text}"


def run(tmp_path: Path, level: str) -> str:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    done = mpirun(2, script, env={"SMP_LOG": level})
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_the_log_says_how_ranks_found_and_reach_each_other(tmp_path):
    said = run(tmp_path, "info")

    for rank in (0, 1):
        found = rf"2 ranks, found by OverMPI; host 0 of 1, rank {rank} of its 2"
        assert re.search(LINE.format(rank=rank, text=found), said), said
        reached = "1 of 1 other ranks are reached by shm"
        assert re.search(LINE.format(rank=rank, text=reached), said), said


def test_nothing_is_logged_unless_asked(tmp_path):
    assert run(tmp_path, "") == ""
