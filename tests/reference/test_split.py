"""Spec: api.md, section 3: how a batch becomes microbatches."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.reference.split import split_batch, split_sizes


def step(model, x, y=None, **more):
    """The arguments that a step function may have."""


def rows(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@pytest.mark.parametrize(
    "rows, microbatches, want",
    [(8, 4, [2, 2, 2, 2]), (10, 4, [3, 3, 2, 2]), (5, 1, [5]), (3, 3, [1, 1, 1])],
)
def test_a_batch_is_split_as_evenly_as_possible_larger_ones_first(rows, microbatches, want):
    assert split_sizes(rows, microbatches) == want


def test_a_batch_smaller_than_the_number_of_microbatches_has_one_for_each_sample():
    with pytest.raises(ValueError, match="3 samples cannot fill 4 microbatches"):
        split_sizes(3, 4)
    parts = split_batch(step, None, (rows(5), rows(2, 3)), {}, 4, input_split_axes={"y": 1})

    assert [part.weight for part in parts] == [2 / 5, 2 / 5, 1 / 5]
    assert [part.args[1].shape for part in parts] == [(2, 1)] * 3


def test_each_microbatch_weighs_its_share_of_the_samples():
    parts = split_batch(step, None, (rows(7, 2),), {}, 3)

    assert [part.weight for part in parts] == [3 / 7, 2 / 7, 2 / 7]
    assert torch.equal(torch.cat([part.args[0] for part in parts]), rows(7, 2))


def test_without_tensors_all_weigh_the_same():
    assert [part.weight for part in split_batch(step, None, (1,), {}, 4)] == [0.25] * 4


def test_tensors_at_any_depth_are_split():
    Pair = namedtuple("Pair", "a b")

    @dataclass
    class Item:
        tensor: Tensor
        name: str

    batch = {"list": [rows(4), (rows(4, 2), "text")], "pair": Pair(rows(4), None)}
    parts = split_batch(step, None, (batch,), {"y": Item(rows(4), "n")}, 2)

    first, y = parts[0].args
    assert first["list"][0].tolist() == [0, 1]
    assert first["list"][1][0].shape == (2, 2) and first["list"][1][1] == "text"
    assert type(first["pair"]) is Pair and first["pair"].a.tolist() == [0, 1]
    assert type(y) is Item and y.tensor.tolist() == [0, 1] and y.name == "n"


def test_an_argument_may_have_another_axis_or_none():
    parts = split_batch(
        step,
        None,
        (rows(3, 4), rows(5)),
        {},
        2,
        non_split_inputs=["y"],
        input_split_axes={"x": 1},
    )

    assert torch.equal(parts[1].args[0], rows(3, 4)[:, 2:])
    assert parts[1].args[1].shape == (5,)


def test_an_object_with_smp_slice_slices_itself():
    class Targets:
        def smp_slice(self, num_mb, mb, axis):
            return f"{mb} of {num_mb} on {axis}"

    parts = split_batch(step, None, (rows(2), Targets()), {}, 2)

    assert [part.args[1] for part in parts] == ["0 of 2 on 0", "1 of 2 on 0"]
