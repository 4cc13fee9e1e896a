"""Spec: which rank does what (api section 2), with its worked examples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp.job.config import PLACEMENTS
from smp.job.placement import AXES_OF_GROUP, Coordinates, Placement


def drawn(placement: Placement) -> str:
    """Every rank as the documentation writes it, ``rank:rdp,pp,tp``."""
    return " ".join(
        f"{rank}:{','.join(map(str, placement.coordinates(rank)))}"
        for rank in range(placement.size)
    )


def test_cluster_with_pipeline_parallelism_alone():
    placement = Placement(8, pp=2, strategy="cluster")

    assert placement.groups("mp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert placement.groups("dp") == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_spread_with_pipeline_parallelism_alone():
    placement = Placement(8, pp=2, strategy="spread")

    assert placement.groups("mp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert placement.groups("dp") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_dpt_with_all_three():
    assert drawn(Placement(8, pp=2, tp=2, strategy="DPT")) == (
        "0:0,0,0 1:0,0,1 2:0,1,0 3:0,1,1 4:1,0,0 5:1,0,1 6:1,1,0 7:1,1,1"
    )


def test_ptd_with_all_three():
    assert drawn(Placement(8, pp=2, tp=2, strategy="PTD")) == (
        "0:0,0,0 1:1,0,0 2:0,0,1 3:1,0,1 4:0,1,0 5:1,1,0 6:0,1,1 7:1,1,1"
    )


@pytest.mark.parametrize(
    "strategy, pipelines",
    [("DPT", [4, 6, 5, 7]), ("DTP", [4, 5, 6, 7]), ("PTD", [1, 5, 3, 7])],
)
def test_the_mp_group_is_one_pipeline_behind_the_other(strategy, pipelines):
    placement = Placement(8, pp=2, tp=2, strategy=strategy)

    assert placement.pipelines(7) == pipelines


@pytest.mark.parametrize(
    "strategy, replicas",
    [("DPT", [0, 2, 1, 3, 4, 6, 5, 7]), ("PTD", [0, 4, 1, 5, 2, 6, 3, 7])],
)
def test_all_pipelines_are_one_behind_the_other_by_dp_rank(strategy, replicas):
    placement = Placement(8, pp=2, tp=2, strategy=strategy)

    for rank in range(8):
        assert placement.replicas(rank) == replicas


@pytest.mark.parametrize("name, order", [("cluster", "DPT"), ("spread", "TPD")])
def test_the_named_strategies_are_permutations(name, order):
    assert drawn(Placement(12, 3, 2, name)) == drawn(Placement(12, 3, 2, order))


@st.composite
def placements(draw) -> Placement:
    rdp, pp, tp = (draw(st.integers(1, 5)) for _ in range(3))
    return Placement(rdp * pp * tp, pp, tp, draw(st.sampled_from(PLACEMENTS)))


@given(placements())
def test_sizes_multiply_to_the_world(p):
    """mp*rdp = pp*dp = pp*tp*rdp = size."""
    of = {kind: len(p.group(kind, 0)) for kind in AXES_OF_GROUP}

    assert of["mp"] * of["rdp"] == of["pp"] * of["dp"] == p.size
    assert of["pp"] * of["tp"] * of["rdp"] == of["world"] == p.size


@given(placements())
def test_groups_of_a_kind_share_out_the_ranks(p):
    for kind in AXES_OF_GROUP:
        groups = p.groups(kind)

        assert sorted(rank for group in groups for rank in group) == list(range(p.size))
        assert len({len(group) for group in groups}) == 1
        assert groups == [sorted(group) for group in groups] == sorted(groups)
        assert all(p.group(kind, rank) == group for group in groups for rank in group)


@given(placements())
def test_every_rank_has_its_own_coordinates(p):
    at = [p.coordinates(rank) for rank in range(p.size)]

    assert len(set(at)) == p.size
    assert max(at, key=lambda c: c.pp).pp == p.pp - 1
    assert max(at, key=lambda c: c.tp).tp == p.tp - 1
    assert max(at, key=lambda c: c.rdp).rdp == p.rdp - 1


@given(placements())
def test_the_tp_group_is_inside_the_dp_group_and_rdp_is_the_rest(p):
    for rank in range(p.size):
        dp, tp, rdp = (set(p.group(kind, rank)) for kind in ("dp", "tp", "rdp"))

        assert tp <= dp and rdp <= dp
        assert tp & rdp == {rank}
        assert len(tp) * len(rdp) == len(dp)


@given(placements())
def test_the_position_in_a_group_is_the_coordinate(p):
    for rank in range(p.size):
        at = p.coordinates(rank)

        assert p.group("pp", rank).index(rank) == at.pp
        assert p.group("tp", rank).index(rank) == at.tp
        assert p.group("rdp", rank).index(rank) == at.rdp


@given(placements())
def test_the_right_most_letter_runs_over_neighbouring_ranks(p):
    if p.size == 1:
        return
    extent = {"D": p.rdp, "P": p.pp, "T": p.tp}
    fastest = next(letter for letter in reversed(p.order) if extent[letter] > 1)
    axis = {"D": 0, "P": 1, "T": 2}[fastest]

    first, second = p.coordinates(0), p.coordinates(1)

    assert first == Coordinates(0, 0, 0)
    assert [b - a for a, b in zip(first, second, strict=True)] == [
        int(i == axis) for i in range(3)
    ]
