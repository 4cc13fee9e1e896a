"""What the text of ``smp.comm_report()`` says, and what groups and calls are called."""

from dataclasses import replace

import pytest

from smp.collectives.backend import _in_words
from smp.collectives.gather_times import Times
from smp.collectives.ranks import GroupUse, PeerUse, PoolUse, Ranks
from smp.job.collective_calls import CallMismatch, Calls
from smp.start.comm_report import CommReport, Peer

MIB = 1 << 20
HOST = GroupUse("WORLD", (0, 1, 2), 7, 3 * MIB, "shared memory", (), 0, 0)
FAR = GroupUse("DP_GROUP", (0, 2), 2, MIB // 2, "", ("tcp", "ucx"), 9, 5 * MIB)


def lines(report: CommReport) -> list[str]:
    """Without the columns' widths."""
    return [" ".join(line.split()) for line in str(report).split("\n")]


def test_the_peers_of_a_pipeline_and_its_pool():
    peers = (Peer(1, 1, "shm", 12, 2 * MIB), Peer(12, 2, "tcp", 3, MIB // 4))
    report = CommReport(4, peers, 64 * MIB, 8 * MIB, 5, 6)
    assert lines(report) == [
        "rank 4 has sent:",
        "to rank pp_rank by messages MiB",
        "1 1 shm 12 2.0",
        "12 2 tcp 3 0.2",
        "pool: 5 tensors, at most 8.0 MiB at a time, of 64.0 MiB; 6 did not fit",
    ]
    heads = str(report).split("\n")[1:4]
    assert len({len(line) for line in heads}) == 1  # columns end at the same place


@pytest.mark.parametrize(
    "device, said",
    [
        ((256 * MIB, 3 * MIB, 4, 5, ""), "4 tensors, at most 3.0 MiB at a time, of 256.0 MiB"),
        ((0, 0, 0, 5, "no peer access"), "none (no peer access)"),
        ((256 * MIB, 0, 0, 5, "out of memory"), "none (out of memory)"),
    ],
)
def test_the_pool_of_a_device_or_why_there_is_none(device, said):
    report = CommReport(0, (Peer(1, 1, "shm", 1, 0),), 0, 0, 0, 0, *device)
    assert lines(report)[-1] == f"device pool: {said}; 5 went through host memory"
    landed = lines(replace(report, device_pool_landed=3))[-1]
    in_pool = device[0] and not device[4]
    assert ("4 tensors (3 straight into the receiver's memory), at" in landed) == bool(in_pool)
    without = CommReport(0, (Peer(1, 1, "shm", 1, 0),), 0, 0, 0, 0)
    assert not any("device" in line for line in lines(without))


def test_groups_their_peers_and_pools():
    times = (Times(MIB, 5.2e-5, 5e-5), Times(16 * MIB, 3e-4, 1e-4))
    devices = GroupUse("a", (0, 1), 1, 0, "", (), 0, 0, 6, 2 * MIB, "", "", 4, times)
    nccl = GroupUse("b", (0, 1), 1, 0, "", (), 0, 0, 0, 0, "several hosts")
    report = CommReport(
        *(2, (), 0, 0, 0, 0),
        groups=(HOST, FAR, devices, nccl),
        group_peers=(PeerUse(1, "tcp", 4, MIB),),
        group_pools=(PoolUse(32 * MIB, MIB, 2, 1),),
    )
    assert lines(report) == [
        "rank 2 has done in groups of smddp:",
        "group ranks operations MiB on this host by to other hosts",
        "WORLD 3 7 3.0 shared memory none",
        "DP_GROUP 2 2 0.5 none 9 messages, 5.0 MiB by tcp, ucx",
        "a 2 1 0.0 none none",
        "b 2 1 0.0 none none",
        "group a: 6 all-gathers of 2.0 MiB by the GPUs' own copies, "
        "4 straight from the tensors",
        "group a: an all-gather of 1024 KiB takes 52 us by copies, 50 by NCCL: copies",
        "group a: an all-gather of 16384 KiB takes 300 us by copies, 100 by NCCL: NCCL",
        "group b: all-gathers of GPUs by NCCL (several hosts)",
        "to rank by messages MiB",
        "1 tcp 4 1.0",
        "pool: 2 tensors, at most 1.0 MiB at a time, of 32.0 MiB; 1 did not fit",
    ]


def test_who_has_nobody_in_a_pipeline_says_so_unless_groups_have_others():
    alone = "rank 0: no other pipeline rank to talk to"
    single = GroupUse("WORLD", (0,), 0, 0, "", (), 0, 0)
    assert lines(CommReport(0, (), 0, 0, 0, 0)) == [alone]
    assert lines(CommReport(0, (), 0, 0, 0, 0, groups=(single,)))[0] == alone
    assert alone not in lines(CommReport(0, (), 0, 0, 0, 0, groups=(HOST,)))


@pytest.mark.parametrize(
    "ranks, said",
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0, 1"),
        ([4, 2, 3], "ranks 2 to 4"),
        ([0, 1, 2, 5, 7, 8], "ranks 0 to 2, 5, 7, 8"),
        ([0, 2, 4, 6, 8, 10], "ranks 0, 2, 4, 6, 8, 10"),
        ([0, 2, 4, 6, 8, 10, 12], "ranks 0, 2, 4, 6, 8, 10, ..."),
        ([*range(5), *range(6, 40)], "ranks 0 to 4, 6 to 39"),
    ],
)
def test_the_ranks_of_a_group_in_words(ranks, said):
    assert _in_words(ranks) == said


def test_groups_of_other_names_have_other_numbers_and_none_has_0():
    numbers = [Ranks.number(str(name)) for name in range(100)]
    assert len(set(numbers)) == 100 and 0 not in numbers and max(numbers) < 1 << 64
    assert Ranks.number("7") == numbers[7]


def test_calls_are_counted_by_group_and_refused_after_two_have_met():
    """The error names ranks in order, whichever of them has it; both calls with their lines."""
    mine, theirs = Calls(), Calls()
    first = mine.begin("smp.barrier", "WORLD")
    assert (mine.begin("smp.barrier", "PP_GROUP").number, first.number) == (1, 1)
    second = mine.begin("smp.barrier", "WORLD")
    assert second.number == 2 and first.matches(second)
    other = theirs.begin("smp.allgather", "WORLD")
    assert not first.matches(other)
    assert not first.matches(theirs.begin("smp.barrier", "DP_GROUP"))
    here = rf"{__file__}:\d+"
    told = (
        rf"rank 0: smp.allgather \(call 1 of WORLD, {here}\); "
        rf"rank 3: smp.barrier \(call 2 of WORLD, {here}\)\.  All ranks"
    )
    with pytest.raises(CallMismatch, match=told):
        raise mine.refuse(second, 3, other, 0)
    with pytest.raises(CallMismatch, match=told):
        raise theirs.refuse(other, 0, second, 3)
    with pytest.raises(CallMismatch, match="smp.send: an earlier call failed: .* rank 3"):
        mine.begin("smp.send", "WORLD")
