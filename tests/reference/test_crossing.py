"""Spec: crossing.py; design.md, section 3, "Arguments are the caller's objects"."""

from collections import namedtuple

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from tests.models.modules import in_backward, module_of
from tests.reference.crossing import copy_with_strides
from tests.reference.cut_loop import cut_loop

Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).t(),
        torch.randn(3, 8)[:, 1::2],
        torch.randn(1, 4).expand(3, 4),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(1.5),
        torch.empty(0, 3).t(),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.arange(6).view(2, 3) > 2,
        torch.eye(3).to_sparse(),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.dtype}",
)
def test_a_copy_has_the_strides_of_the_tensor_and_memory_of_its_own(tensor):
    copy = copy_with_strides(tensor)

    assert not copy._is_view()
    if tensor.layout is not torch.strided:
        assert torch.equal(copy.to_dense(), tensor.to_dense())
    else:
        assert torch.equal(copy, tensor)
        assert copy.stride() == tensor.stride()
        assert copy.data_ptr() % 64 == 0
        assert tensor.numel() == 0 or copy.data_ptr() != tensor.data_ptr()


@module_of(lambda function: {"weight": nn.Parameter(torch.tensor(3.0)), "function": function})
def Callee(self, *args, **kwargs):
    """Runs a function with its weight, on another rank."""
    return self.function(self.weight, *args, **kwargs)


@module_of(
    lambda call, function: {
        "weight": nn.Parameter(torch.tensor(2.0)),
        "callee": Callee(function),
        "call": call,
    }
)
def Caller(self, x):
    return self.call(self.callee, x * self.weight)


def run_remote(call, function, x=5.0) -> Caller:
    """``call(remote, x * 2)`` on rank 0; ``remote(...)`` is ``function(3, ...)`` on 1.

    What ``call`` returns is the loss.
    """
    model = Caller(call, function)

    def step(model, x):
        loss = model(x)
        if loss is not None and torch.is_grad_enabled():
            model.backward(loss)

    cut_loop(step, model, (torch.tensor([x]),), rank_of={"": 0, "callee": 1})
    return model


def test_a_change_under_no_grad_is_written_back_without_gradient():
    def function(weight, x):
        with torch.no_grad():
            x.add_(1)

    def call(remote, x):
        remote(x)
        assert x.tolist() == [11.0]
        return (x * 4).sum()

    model = run_remote(call, function)

    assert model.weight.grad == 5 * 4
    assert model.callee.weight.grad is None


def test_what_is_not_changed_is_not_touched():
    class Watched(list):
        def __setitem__(self, *args):
            raise AssertionError("written")

    def call(remote, x):
        inner, pair = Watched([1]), Pair(x, [x])
        items = [inner, pair]
        result = remote(x, items)
        assert items[0] is inner and items[1] is pair
        return result.sum()

    run_remote(call, lambda weight, x, items: x * weight + items[0][0])


def test_a_cache_is_filled_for_the_caller_with_its_gradient():
    def function(weight, x, cache):
        state = (x * weight).view(1, 1, 1, 1)
        return cache.update(state, state + 1, 0)[0].sum()

    def call(remote, x):
        cache = DynamicCache()
        remote(x, cache)
        remote(x, cache)
        assert cache.get_seq_length() == 2
        assert cache.layers[0].values.flatten().tolist() == [31.0, 31.0]
        return cache.layers[0].keys.sum()

    model = run_remote(call, function)

    assert (model.weight.grad, model.callee.weight.grad) == (2 * 15, 2 * 10)


def test_only_gradients_that_are_defined_travel():
    seen = []

    def call(remote, x):
        used, unused = remote(x)
        return used.sum()

    run_remote(call, lambda weight, x: (x * weight, in_backward(x * weight, seen.append)))

    assert seen == []
