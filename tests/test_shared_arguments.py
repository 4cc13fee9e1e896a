"""Spec: arguments of one remote call that share memory (docs/debugging.md, "Limits")."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import smp
from smp.pytorch.shared_memory import share_elements
from tests.models.modules import module_of
from tests.models.partition import distributed
from tests.ranks import on_ranks

BYTES = 96


@st.composite
def views(draw):
    """A dtype's view of BYTES bytes: shape, strides, offset in its elements."""
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32]))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = [draw(st.integers(0, 5)) for _ in shape]
    count = BYTES // dtype.itemsize
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    if last >= count:
        shape, strides, last = [], [], 0
    return dtype, shape, strides, draw(st.integers(0, count - 1 - last))


def bytes_of(dtype, shape, strides, offset):
    at = set()
    for index in itertools.product(*map(range, shape)):
        element = offset + sum(i * stride for i, stride in zip(index, strides, strict=True))
        at |= {element * dtype.itemsize + i for i in range(dtype.itemsize)}
    return at


@given(views(), views())
def test_views_share_elements_if_and_only_if_they_have_a_byte_in_common(one, other):
    memory = torch.zeros(BYTES, dtype=torch.uint8)
    a, b = (memory.view(v[0]).as_strided(*v[1:]) for v in (one, other))

    shared = bool(bytes_of(*one) & bytes_of(*other))

    assert share_elements(a, b) is share_elements(b, a) is shared


def test_tensors_without_a_common_storage_share_nothing():
    a = torch.zeros(4)
    assert not share_elements(a, torch.zeros(4))
    assert not share_elements(a, torch.zeros(4).to_sparse())


@module_of(lambda: {"linear": nn.Linear(4, 4)})
def Child(self, x, rest, changes):
    if changes:
        x.mul_(2)
    return self.linear(x).sum() + sum(part.sum() for part in rest["parts"])


@module_of(lambda: {"child": Child()})
def Parent(self, x, how, changes):
    x = x * 3 if how != "no grad" else (x * 3).detach()
    other = {
        "whole": lambda: x.view(4, 8),
        "no grad": lambda: x[:, 4:6],
        "halves": lambda: x[:, :4],
        "clone": lambda: x.clone(),
        "twice": lambda: None,
    }[how]()
    half = x[:, 4:]
    parts = [x.sum(), half if other is None else other]
    return self.child(half, rest={"parts": parts}, changes=changes)


def train(model, x, how, changes):
    loss = model(x, how, changes)
    model.backward(loss)
    return loss


def begin():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
    net = Parent()
    reference = Parent()
    reference.load_state_dict(net.state_dict())
    return distributed(net, {"": 0, "child": 1, "child.linear": 1}), reference, smp.step(train)


@on_ranks(2)
@pytest.mark.parametrize("how", ["whole", "no grad"])
def test_a_change_in_one_of_two_that_share_memory_names_both(how):
    model, _, step = begin()
    x = torch.randn(4, 8)
    step(model, x, how, False)
    step(model, x, how, False)  # nothing is changed: right as it is
    with pytest.raises(
        RuntimeError,
        match=r"'child' changed argument 0 .* in place.* argument 'rest'\['parts'\]\[1\] ",
    ):
        step(model, x, how, True)
    step(model, x, how, False)


@on_ranks(2)
@pytest.mark.parametrize("how", ["halves", "clone", "twice"])
def test_a_change_that_only_one_argument_shows_is_as_in_one_process(how):
    model, reference, step = begin()
    x = torch.randn(4, 8)
    for _ in range(3):
        losses = step(model, x, how, True)
        if smp.pp_rank() == 0:
            assert torch.equal(losses.outputs[0], reference(x, how, True))
