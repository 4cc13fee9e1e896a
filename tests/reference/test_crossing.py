"""Spec: crossing.py; design.md, section 3, "Arguments are the caller's objects"."""

from collections import OrderedDict, namedtuple
from contextvars import ContextVar

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

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


class Callee(nn.Module):
    """Runs a function with its weight, on another rank."""

    def __init__(self, function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(self.weight, *args, **kwargs)


class Caller(nn.Module):
    def __init__(self, call, function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.callee = Callee(function)
        self.call = call

    def forward(self, x):
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


def test_a_tensor_changed_in_place_is_changed_for_the_caller_with_its_gradient():
    def call(remote, x):
        before = x
        assert remote(x) is None
        assert x is before and x.tolist() == [30.0]
        return x.sum()

    model = run_remote(call, lambda weight, x: x.mul_(weight) and None)

    assert model.weight.grad == 5 * 3
    assert model.callee.weight.grad == 5 * 2


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


def test_a_view_changed_in_place_changes_its_base():
    def call(remote, x):
        pair = torch.cat([x, x])
        remote(pair[1:])
        assert pair.tolist() == [10.0, 30.0]
        return pair.sum()

    model = run_remote(call, lambda weight, x: x.mul_(weight) and None)

    assert model.weight.grad == 5 + 5 * 3
    assert model.callee.weight.grad == 10


def test_an_argument_that_is_returned_is_the_callers_own():
    def call(remote, x):
        items = [x]
        returned, same_items, made = remote(x, items)
        assert returned is x and same_items is items and made[0] is x
        return returned.sum()

    model = run_remote(call, lambda weight, x, items: (x, items, [x]))

    assert model.weight.grad == 5


def test_a_changed_argument_that_is_returned_is_the_callers_own():
    def call(remote, x):
        returned = remote(x)
        assert returned is x
        return x.sum()

    model = run_remote(call, lambda weight, x: x.mul_(weight))

    assert (model.weight.grad, model.callee.weight.grad) == (15, 10)


def test_an_object_that_occurs_twice_arrives_as_one():
    def function(weight, x, nested, by_name):
        assert nested["x"] is x and nested["again"][0] is x
        assert by_name is nested
        return x * weight

    def call(remote, x):
        nested = {"x": x, "again": (x,)}
        return remote(x, nested, by_name=nested).sum()

    run_remote(call, function)


def test_lists_dicts_and_sets_are_changed_for_the_caller():
    def function(weight, x, items, names, seen):
        items[0] = x * weight
        items.append(items)
        names.pop("old")
        names["new"] = {"x": items[0]}
        seen.add("here")

    def call(remote, x):
        items, names, seen = [x, 1], {"old": x, "kept": x}, {1}
        remote(x, items, names, seen)
        assert len(items) == 3 and items[0].tolist() == [30.0] and items[2] is items
        assert list(names) == ["kept", "new"] and names["kept"] is x
        assert names["new"]["x"] is items[0]
        assert seen == {1, "here"}
        return items[0].sum()

    assert run_remote(call, function).callee.weight.grad == 10


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


def test_containers_keep_their_types():
    def function(weight, x, pair, order, output):
        assert type(pair) is Pair and type(order) is OrderedDict
        assert type(output) is BaseModelOutput and output[0] is output.last_hidden_state
        y = output.last_hidden_state * weight
        return Pair(y, None), BaseModelOutput(last_hidden_state=y, hidden_states=(x, y))

    def call(remote, x):
        output = BaseModelOutput(last_hidden_state=x * 2)
        pair, result = remote(x, Pair(x, 1), OrderedDict(a=x), output)
        assert type(pair) is Pair and pair.b is None
        assert type(result) is BaseModelOutput and result["last_hidden_state"] is pair.a
        assert result.hidden_states[0] is x
        return pair.a.sum()

    assert run_remote(call, function).callee.weight.grad == 20


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


def test_what_is_collected_in_a_context_variable_is_the_callers():
    collected: ContextVar[list] = ContextVar("collected")

    def function(weight, x):
        y = x * weight
        collected.get().append(y)
        return y

    def call(remote, x):
        states = [x]
        token = collected.set(states)
        remote(remote(x))
        assert collected.get() is states and len(states) == 3
        collected.reset(token)
        return sum(state.sum() for state in states)

    model = run_remote(call, function)

    assert (model.weight.grad, model.callee.weight.grad) == (5 + 15 + 45, 10 + 60)


def test_a_result_may_be_changed_in_place():
    def call(remote, x):
        first, second = remote(x)
        first /= 2
        return first.sum() + second.sum()

    model = run_remote(call, lambda weight, x: (x * weight, x * weight))

    assert model.callee.weight.grad == 5 + 10


def test_only_gradients_that_are_defined_travel():
    seen = []

    class Notes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            seen.append(gradient)
            return gradient

    def call(remote, x):
        used, unused = remote(x)
        return used.sum()

    run_remote(call, lambda weight, x: (x * weight, Notes.apply(x * weight)))

    assert seen == []
