"""Spec: errors of collectives name the group, the operation, its number and the ranks.

Ranks go by torch's global numbers, whatever the group's backend and its members.
"""

import os
import re
import threading
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

import smp
from tests.namespaces import ranks_behind
from tests.ranks import on_ranks
from tests.test_collectives import job, refused


@contextmanager
def stderr_in(path):
    """What this process, its threads in C too, writes to stderr meanwhile."""
    kept = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield path.read_text
    finally:
        os.dup2(kept, 2)
        os.close(kept)


KILLED = """
import os, signal
import torch, torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
dist.init_process_group("gloo")
rank = dist.get_rank()
group = dist.new_group([2, 3], backend="smddp")
if rank >= 2:
    dist.barrier(group)
if rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
calls = (
    lambda: dist.all_reduce(torch.ones(4), group=group),
    lambda: dist.recv(torch.ones(4), 3, group),
    lambda: dist.send(torch.ones(4), 3, group),
)
for call in calls if rank == 2 else ():
    try:
        call()
    except dist.DistBackendError as error:
        print(error, flush=True)
"""


def test_who_is_killed_goes_by_its_global_number(script):
    """... in a group beside a default group of another backend."""
    with ranks_behind([[]] * 4, script(KILLED)) as started:
        said, errors = started[2].communicate(timeout=120)

    lost = "rank 3 is lost [SMP_ERR_PEER_LOST]"
    for operation in (
        "all-reduce 2 (sum) of 4 float32",
        "receive (tag 0) from rank 3",
        "send (tag 0) to rank 3",
    ):
        told = rf"smp: group '\d+ \(ranks 2, 3\)': {re.escape(operation)}: {re.escape(lost)}"
        assert re.search(told, said), said + errors


@on_ranks(4)
def test_the_ranks_of_a_group_go_by_their_global_numbers(tmp_path, monkeypatch):
    """... in a group beside a default group of another backend."""
    monkeypatch.setenv("SMP_WATCHDOG_REPORT_S", "0.05")
    with job(tmp_path, "gloo") as (rank, size):
        group = dist.new_group([2, 3], backend="smddp")
        if rank == 2:
            calls = "rank 2 calls all-reduce 1 (sum) of 3 float32, rank 3 calls barrier 1"
            assert calls in refused(lambda: dist.all_reduce(torch.ones(3), group=group))
            group.set_timeout(timedelta(seconds=0.2))
            wants = "receive (tag 0) from rank 3: timed out after 0.2 s"
            assert wants in refused(lambda: dist.recv(torch.ones(1), 3, group))
            group.set_timeout(timedelta(seconds=2))
            with stderr_in(tmp_path / "reports") as reports:
                late = refused(lambda: dist.all_reduce(torch.ones(3), group=group))
            assert re.search(r"all-reduce 2 .*: timed out after \d+\.\d s without rank 3", late)
            assert re.search(r"smp: rank 2: group .* waits for rank 3; for", reports())
        if rank == 3:
            refused(lambda: dist.barrier(group))
        dist.barrier()
        if rank == 3:
            dist.all_reduce(torch.ones(3), group=group)  # of what rank 2 has left behind
            assert "rank 2 gave up: all-reduce 2" in refused(lambda: dist.barrier(group))
            dist.send(torch.ones(5), 2, group, tag=1)
        dist.barrier()
        if rank == 2:
            sent = "rank 3 sent 5 float32, rank 2 wants 4 int32"
            other = torch.empty(4, dtype=torch.int32)
            error = refused(lambda: dist.recv(other, 3, group, tag=1))
            assert f"receive (tag 1) from rank 3: {sent}" in error
            group.set_timeout(timedelta(seconds=60))
            with stderr_in(tmp_path / "reports") as reports:
                late = threading.Thread(target=dist.recv, args=(torch.ones(5), 3, group, 2))
                late.start()
                while "receive (tag 2) from rank 3; for" not in reports():
                    os.sched_yield()
        dist.barrier()
        if rank == 3:
            dist.send(torch.ones(5), 2, group, tag=2)
        if rank == 2:
            late.join()


@on_ranks(4)
def test_sparse_tensors_and_peers_go_by_their_global_numbers(tmp_path):
    """... in a group beside a default group of another backend."""
    with job(tmp_path, "gloo") as (rank, size):
        group = dist.new_group([2, 3], backend="smddp")
        if rank >= 2:
            told = refused(
                lambda: dist.all_reduce(torch.ones(2 + rank).to_sparse(), group=group)
            )
            for member in (2, 3):
                shape = f"of a float32 of shape ({2 + member},), 1 of"
                assert f"rank {member} calls sparse all-reduce 1 {shape}" in told
            assert [peer.rank for peer in smp.comm_report().group_peers] == [5 - rank]
        dist.barrier()


@on_ranks(4)
@pytest.mark.parametrize("default", ["smddp", "gloo"])
def test_a_group_goes_by_its_description_or_else_by_its_number_and_ranks(default, tmp_path):
    with job(tmp_path, default) as (rank, size):
        for about, called in (
            ({"ranks": [2, 3]}, r"\d+ \(ranks 2, 3\)"),
            ({"ranks": [3, 0]}, r"\d+ \(ranks 0, 3\)"),
            ({"ranks": [0, 1, 2]}, r"\d+ \(ranks 0 to 2\)"),
            ({"ranks": [1, 3], "group_desc": "evaluation"}, "evaluation"),
            ({"group_desc": "all of them, " * 6}, ("all of them, " * 6)[:63]),
            ({}, r"\d+"),
        ):
            group = dist.new_group(backend="smddp", **about)
            members = about.get("ranks", range(size))
            if rank in members:
                x = torch.ones(3) if rank == max(members) else torch.ones(4)
                told = refused(lambda x=x, group=group: dist.all_reduce(x, group=group))
                assert re.match(f"smp: group '{called}': rank", told), told
                named = [use.name[:63] for use in smp.comm_report().groups]
                assert any(re.fullmatch(called, name) for name in named), named
                uses = [use.ranks for use in smp.comm_report().groups]
                assert tuple(group.global_ranks) in uses
                assert sorted(group.global_ranks) == sorted(members)
            dist.barrier()


@on_ranks(4)
def test_a_description_that_comes_later_changes_no_name(tmp_path):
    with job(tmp_path) as (rank, _):
        group = dist.new_group([0, 1], backend="smddp", group_desc="early")
        if rank < 2:
            dist.barrier(group)
            group._set_group_desc("late")
            assert group.group_desc == "late"
            x = torch.ones(3 + rank)
            assert "group 'early': rank" in refused(lambda: dist.all_reduce(x, group=group))
        if rank == 0:
            wait = partial(group.monitored_barrier, timedelta(seconds=0.01))
            assert "group 'early': monitored barrier 1" in refused(wait)
        dist.barrier()


@on_ranks(3)
def test_a_rank_that_cannot_start_goes_by_its_global_number(tmp_path, monkeypatch):
    with job(tmp_path, "gloo") as (rank, size):
        if rank == 2:
            monkeypatch.setenv("SMP_COMM_INTERFACE", "nowhere0")
        make = partial(dist.new_group, [1, 2], backend="smddp", use_local_synchronization=True)
        if rank > 0:
            told = "nowhere0" if rank == 2 else "rank 2 cannot start"
            with pytest.raises(ValueError if rank == 2 else RuntimeError, match=told):
                make()
        dist.barrier()


@on_ranks(2)
def test_a_sparse_all_reduce_is_called_so(tmp_path):
    """... also against a dense one, and in a time-out; the group goes on after a mismatch."""
    with job(tmp_path) as (rank, size):
        dense = torch.ones(4)
        mine = dense.to_sparse(1) if rank == 0 else dense
        assert (
            "group '0': rank 0 calls sparse all-reduce 1 (sum), "
            "rank 1 calls all-reduce 1 (sum) of 4 float32"
        ) in refused(lambda: dist.all_reduce(mine))
        dist.all_reduce(torch.ones(4).to_sparse(1))  # three operations
        dist.all_gather_into_tensor(torch.empty(136), torch.empty(68))
        if rank == 0:
            options = dist.AllreduceOptions()
            options.timeout = timedelta(seconds=0.5)
            call = partial(dist.group.WORLD.allreduce, [torch.ones(4).to_sparse(1)], options)
            late = refused(call)
            assert "group '0': sparse all-reduce 6 (sum): timed out after " in late
            assert "without rank 1" in late
        store = dist.distributed_c10d._get_default_store()
        store.set(f"done {rank}", "")
        store.wait(["done 0"])


@on_ranks(2)
def test_splits_that_disagree_name_the_operation_and_its_number(tmp_path):
    with job(tmp_path) as (rank, size):
        dist.barrier()
        sends, expects = ([1, 1], [1, 1]) if rank == 0 else ([3, 1], [1, 1])
        own, out = torch.ones(sum(sends)), torch.ones(sum(expects))
        said = refused(lambda: dist.all_to_all_single(out, own, expects, sends))
        assert (
            "group '0': all-to-all 2 of float32 with split sizes: "
            "rank 1 sends 3 elements to rank 0, which expects 1"
        ) in said
        sizes = [2, 1 + 2 * rank]
        outputs = [torch.empty(size) for size in sizes]
        said = refused(lambda: dist.all_gather(outputs, torch.ones(sizes[rank])))
        assert (
            "group '0': all-gather 3 of float32 with split sizes: "
            "split size 1 is 1 on rank 0 and 3 on rank 1"
        ) in said


@on_ranks(4)
@pytest.mark.parametrize("default", ["smddp", "gloo"])
def test_a_monitored_barrier_names_group_number_and_global_ranks(default, tmp_path):
    """... around the words of gloo, whose ranks are those of the group."""
    short = timedelta(seconds=0.3)
    with job(tmp_path, default) as (rank, size):
        group = dist.new_group([2, 3], backend="smddp")
        if rank >= 2:
            group.monitored_barrier()
        if rank == 2:
            called = f"smp: group '{group.group_name} (ranks 2, 3)': monitored barrier"
            late = "failed to pass monitoredBarrier in"
            assert (f"{called} 2: Ranks 1 {late} 300 ms (global ranks 3)") == refused(
                lambda: group.monitored_barrier(short, wait_all_ranks=True)
            )
            group.set_timeout(timedelta(seconds=0.2))
            assert f"{called} 3: Rank 1 {late} 200 ms (global ranks 3)" == refused(
                group.monitored_barrier
            )
            now = timedelta()
            assert f"{called} 4: Rank 0 timed out in monitoredBarrier after 0 ms" == refused(
                lambda: group.monitored_barrier(now)
            )
            assert f"{called} 5: Ranks 1 {late} 0 ms (global ranks 3)" == refused(
                lambda: group.monitored_barrier(now, wait_all_ranks=True)
            )
        dist.barrier()


@on_ranks(4)
@pytest.mark.parametrize("over", ["shm", "tcp"])
def test_a_group_that_some_do_not_make_names_them_and_the_time(over, tmp_path, monkeypatch):
    """... also if each is on a host of its own."""
    monkeypatch.setenv("SMP_COMM_TRANSPORTS", over)
    with job(tmp_path) as (rank, size):
        if rank == 2:
            make = partial(dist.new_group, timeout=timedelta(seconds=0.5))
            late = refused(make)
            assert re.match(
                r"smp: group '1': could not make the group: timed out after \d+\.\d s without "
                r"ranks 0, 1, 3; a longer timeout can be given to the group "
                r"\[SMP_ERR_TIMED_OUT\]",
                late,
            ), late
        store = dist.distributed_c10d._get_default_store()
        store.set(f"done {rank}", "")
        store.wait(["done 2"])


@on_ranks(2)
def test_what_follows_the_end_of_a_group_is_told_so(tmp_path):
    with job(tmp_path) as (rank, size):
        group = dist.new_group()
        group.set_timeout(timedelta(seconds=0.1))
        if rank == 0:
            first = refused(lambda: dist.all_reduce(torch.ones(3), group=group))
            end = re.match(
                r"smp: group '1': (all-reduce 1 \(sum\) of 3 float32: "
                r"timed out after \d+\.\d s without rank 1);",
                first,
            )
            assert end, first
            later = refused(lambda: dist.broadcast(torch.ones(5), 1, group=group))
            assert later.startswith(
                "smp: group '1': broadcast 2 of 5 float32 with root 1: "
                f"the group ended before: {end[1]};"
            )
        dist.barrier()
        assert dist.get_world_size(dist.new_group()) == size  # what to do then


@on_ranks(1)
def test_too_many_groups_are_an_error_that_says_what_to_do(tmp_path):
    with job(tmp_path):
        groups = []
        with pytest.raises(dist.DistBackendError) as raised:
            for _ in range(1000):
                groups.append(dist.new_group())
        most = len(groups) + 1
        said = str(raised.value)
        assert f"rank 0 is in {most} groups, and cannot be in more" in said
        assert "destroy_process_group(group)" in said and "SMP_ERR_LIMIT" in said
        dist.destroy_process_group(groups.pop())
        dist.all_reduce(torch.ones(1), group=dist.new_group())
