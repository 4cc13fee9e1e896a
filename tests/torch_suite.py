"""PyTorch's own tests of process groups, on smddp under the name of another backend.

    python tests/torch_suite.py NAME RANKS [--native] [--list FILE | TEST ...]

Runs ``torch.testing._internal.distributed.distributed_test`` (it is inside the wheel, and
wants ``expecttest``), each test in RANKS forked processes, as it does for the backend NAME
(gloo or mpi).  The last line has the names of the tests that passed, and how many
operations smddp carried out.  With --native the backend is torch's own.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import unittest
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=["gloo", "mpi"])
    parser.add_argument("ranks")
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--list", type=Path, default=None)
    args = parser.parse_args()
    names = args.list.read_text().split() if args.list else args.tests
    with tempfile.TemporaryDirectory() as folder:
        # What the suite reads as it is imported.
        os.environ.update(
            BACKEND=args.name, WORLD_SIZE=args.ranks, TEMP_DIR=folder, MASTER_ADDR="127.0.0.1"
        )
        operations = multiprocessing.Value("q", 0)
        if not args.native:
            stand_in(args.name, operations)
        result = Passed(stream=sys.stderr, verbosity=2)
        with result:
            suite(names)(result)
    print(json.dumps({"passed": sorted(result.passed), "operations": operations.value}))


class Passed(unittest.TextTestResult):
    """Knows what passed."""

    def __init__(self, stream, verbosity):
        super().__init__(unittest.runner._WritelnDecorator(stream), True, verbosity)
        self.passed: list[str] = []

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed.append(test._testMethodName)

    def __enter__(self):
        self.startTestRun()
        return self

    def __exit__(self, *_):
        self.stopTestRun()
        self.printErrors()


def suite(names: list[str]) -> unittest.TestSuite:
    """The tests of these names that this version of torch has; without names: all."""
    from torch.testing._internal.distributed.distributed_test import (
        DistributedTest,
        TestDistBackend,
    )

    class Forked(TestDistBackend, DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    known = unittest.defaultTestLoader.getTestCaseNames(Forked)
    return unittest.TestSuite(Forked(n) for n in (names or known) if n in known)


def stand_in(name: str, operations) -> None:
    """Have smddp make the groups that are asked for under this name."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    from smp.collectives import backend, process_group

    backend.register()
    make, begin = c10d._new_process_group_helper, c10d.init_process_group
    shutdown = process_group.ProcessGroup.shutdown

    def rename(group):
        c10d._world.pg_map[group] = (dist.Backend(name), c10d._world.pg_map[group][1])

    def new_group(size, rank, ranks, backend, *rest, **more):
        group, store = make(size, rank, ranks, dist.Backend("smddp"), *rest, **more)
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            return group, store
        rename(group)
        if name == "gloo":
            # DDP's logger asks a group of this name for its network devices.
            kind = dist.ProcessGroup.BackendType.GLOO
            alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, more["timeout"])
            group._register_backend(torch.device("cpu"), kind, alone)
            group._set_default_backend(kind)
        return group, store

    def init_process_group(backend=None, *rest, **more):
        begin("smddp", *rest, **more)
        rename(dist.group.WORLD)

    def counted(self):
        with operations.get_lock():
            operations.value += self._get_sequence_number_for_group()
        shutdown(self)

    c10d._new_process_group_helper = new_group
    c10d.init_process_group = dist.init_process_group = init_process_group
    process_group.ProcessGroup.shutdown = counted
    process_group.ProcessGroup.name = process_group.ProcessGroup.getBackendName = lambda self: (
        name
    )


if __name__ == "__main__":
    main()
