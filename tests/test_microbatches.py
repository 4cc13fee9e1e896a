"""Spec: api.md, section 3: how values of any type are cut into microbatches and put together.

Without ranks; ``test_step.py`` does the same through the real step.
"""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp.runtime.microbatches import (
    Splitter,
    StepOutput,
    cut,
    map_calls,
    map_tensors,
    merge,
)

Pair = namedtuple("Pair", "first second")


@dataclass
class Batch:
    rows: Tensor
    name: str = "a batch"


@dataclass(eq=False)
class Described(nn.Module):
    """A module whose fields hold a tensor."""

    rows: Tensor


class Rows(list):
    """Has an attribute beside its items."""


class Trio(tuple):
    """Has an attribute beside its items."""


class Named(dict):
    """Has an attribute beside its items."""


class Sliced:
    """Cuts itself."""

    def smp_slice(self, count: int, number: int, axis: int) -> tuple:
        return count, number, axis


def rows(count: int = 5) -> Tensor:
    return torch.arange(2.0 * count).view(count, 2)


def f(model, x, *rest, y=None, **more):
    """A step function of every kind of parameter."""


def split(function: Any, count: int, *args: Any, **options: Any) -> tuple:
    kwargs = options.pop("kwargs", {})
    splitter = Splitter(function, **options)
    return splitter.split(splitter.count(count, args, kwargs), args, kwargs)


def test_each_argument_has_the_name_of_its_parameter_in_errors():
    none = rows(0)
    for args, kwargs, name in (
        ((none,), {}, "model"),
        ((None, none), {}, "x"),
        ((None, None, None, none), {}, "rest"),
        ((None, None), {"y": none}, "y"),
        ((None, None), {"z": none}, "z"),
        ((None, [rows(), {"deep": (none,)}]), {}, "x[1]['deep'][0]"),
        ((None, Pair(rows(), Batch(none))), {}, "x[1]['rows']"),
    ):
        with pytest.raises(ValueError) as caught:
            split(f, 2, *args, kwargs=kwargs)
        assert str(caught.value) == (
            f"smp.step: argument '{name}' has 0 samples on axis 0 (shape (0, 2)): use a batch "
            "that has some, or name it in non_split_inputs"
        )
    with pytest.raises(ValueError, match="argument 'argument 1' has 0 samples"):
        split(lambda x: x, 2, rows(), none)


def test_fewer_samples_than_microbatches_have_one_each_at_any_depth():
    x, y = [rows(3), {"deep": (rows(3),)}], Batch(rows(3))
    sliced = Sliced()
    calls, weights = split(
        f, 4, None, x, sliced, kwargs={"y": y, "whole": rows(1)}, non_split_inputs=["whole"]
    )

    assert weights == [1.0] * 3 and len(calls) == 3
    for number, ((_, (one, inner), its_slice), kwargs) in enumerate(calls):
        for part in (one, inner["deep"][0], kwargs["y"].rows):
            assert torch.equal(part, rows(3)[number : number + 1])
        assert its_slice == (3, number, 0) and len(kwargs["whole"]) == 1


@pytest.mark.parametrize("x, y", [(5, 1), (1, 5), (3, 2)])
def test_fewer_samples_than_microbatches_and_than_another_has_are_an_error(x, y):
    (_, more), (count, less) = sorted([(y, "y"), (x, "x")], reverse=True)
    with pytest.raises(ValueError) as caught:
        split(f, 4, None, rows(x), kwargs={"y": rows(y)})
    assert str(caught.value) == (
        f"smp.step: argument '{less}' has {count} samples on axis 0 (shape ({count}, 2)), "
        f"which is fewer than the 4 microbatches, and '{more}' has {max(x, y)}: give both as "
        f"many, or name '{less}' in non_split_inputs"
    )


@pytest.mark.parametrize("axis", [2, -3, 7])
def test_an_axis_that_a_tensor_lacks_is_an_error(axis):
    with pytest.raises(ValueError) as caught:
        split(f, 2, None, rows(), input_split_axes={"x": axis})
    assert str(caught.value) == (
        f"smp.step: argument 'x' with shape (5, 2) has no axis {axis}; name it in "
        "non_split_inputs or give its axis in input_split_axes"
    )


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("how", ["positional", "keyword", "in a list", "beyond"])
def test_an_axis_holds_for_the_argument_of_its_name_at_any_depth(axis, how):
    x = rows(2)
    value = [x, UserDict(a=x)] if how == "in a list" else x
    name = {"keyword": "y", "beyond": "rest"}.get(how, "x")
    args = {"keyword": (None, None), "beyond": (None, None, value)}.get(how, (None, value))
    kwargs = {"y": value} if how == "keyword" else {}

    calls, weights = split(f, 2, *args, kwargs=kwargs, input_split_axes={name: axis})

    assert weights == [1.0, 1.0]
    for number, (its_args, its_kwargs) in enumerate(calls):
        its = its_kwargs["y"] if how == "keyword" else its_args[-1]
        for part in [its[0], its[1]["a"]] if how == "in a list" else [its]:
            assert torch.equal(part, x[:, number : number + 1])


def test_what_is_named_whole_is_every_microbatchs_and_counts_no_samples():
    x, whole = rows(5), rows(1)
    calls, weights = split(
        f, 2, None, x, whole, kwargs={"y": whole}, non_split_inputs=["rest", "y"]
    )

    assert weights == [3.0, 2.0]
    assert [len(args[1]) for args, _ in calls] == [3, 2]
    assert all(args[2] is whole and kwargs["y"] is whole for args, kwargs in calls)


def test_without_a_tensor_to_cut_all_microbatches_count_alike():
    model, number = nn.Linear(1, 1), torch.tensor(3.0)
    calls, weights = split(f, 3, model, number, "text", kwargs={"y": Batch})

    assert weights == [1.0] * 3
    assert calls == [((model, number, "text"), {"y": Batch})] * 3
    assert all(args[0] is model and args[1] is number for args, _ in calls)


def labelled(value: Any) -> Any:
    value.label = "mine"
    return value


COLLECTIONS = {
    "list": lambda x: [x, 1],
    "tuple": lambda x: (x, 1),
    "named tuple": lambda x: Pair(x, 1),
    "list of its own": lambda x: labelled(Rows([x, 1])),
    "tuple of its own": lambda x: labelled(Trio((x, 1))),
    "of torch": lambda x: torch.return_types.max((x, torch.arange(len(x)))),
    "dict": lambda x: {"x": x, "y": 1},
    "ordered": lambda x: OrderedDict(y=1, x=x),
    "default": lambda x: defaultdict(list, x=x),
    "dict of its own": lambda x: labelled(Named(x=x)),
    "dataclass": lambda x: Batch(x, "other"),
    "nested": lambda x: [{"x": (Batch(x),)}, None],
}


def same(one: Any, other: Any) -> bool:
    """Whether both are alike, types and attributes too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Batch):
        return same(vars(one), vars(other))
    if getattr(one, "label", None) != getattr(other, "label", None):
        return False
    if isinstance(one, dict):
        factories = [getattr(each, "default_factory", None) for each in (one, other)]
        keys = list(one) == list(other) and factories[0] is factories[1]
        return keys and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("make", COLLECTIONS.values(), ids=COLLECTIONS)
def test_what_holds_tensors_keeps_its_type_and_attributes(make):
    x = rows()
    whole = make(x)

    pieces = cut(whole, 2, 0, "x", [])
    assert same(pieces[0], make(x[:3])) or "max" in str(type(whole))
    assert torch.equal(torch.cat([tensors(piece)[0] for piece in pieces]), x)
    assert same(map_tensors(whole, torch.clone), whole)
    assert tensors(map_tensors(whole, torch.clone))[0] is not x
    assert same(whole, make(x)), "the argument itself was changed"
    merged = merge(pieces, [3.0, 2.0])
    assert type(merged) is type(whole)
    assert getattr(merged, "label", None) == getattr(whole, "label", None)
    if isinstance(whole, defaultdict):
        assert merged.default_factory is list


def tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)
    return found


def test_a_class_is_no_instance_of_itself():
    for given in (list, dict, Pair, Batch):
        assert map_tensors(given, torch.clone) is given
        assert cut(given, 2, 0, "x", []) == [given, given]


def test_what_is_no_collection_is_every_microbatchs():
    module = Described.__new__(Described)
    nn.Module.__init__(module)
    module.rows = rows()
    plain = ("ab", b"ab", range(4), torch.Size([4, 2]), None, 3, Batch, partial(int))
    for value in (*plain, module):
        assert all(piece is value for piece in cut(value, 2, 0, "x", []))
    assert cut({1, 2}, 2, 0, "x", []) == [{1, 2}] * 2
    assert cut(Sliced(), 2, 1, "x", []) == [(2, 0, 1), (2, 1, 1)]
    assert cut(UserDict(a=1, b=rows()), 2, 0, "x", [])[1]["a"] == 1


@pytest.mark.parametrize("kind", [set, frozenset])
def test_sets_hold_tensors_too(kind):
    x = rows()
    pieces = cut(kind([x, 1]), 2, 0, "x", [])

    assert all(type(piece) is kind and 1 in piece for piece in pieces)
    assert [tensors(piece)[0].tolist() for piece in pieces] == [x[:3].tolist(), x[3:].tolist()]


def test_outputs_that_differ_in_kind_are_a_list_of_their_versions():
    x = rows()
    for outputs in (
        [x, None],
        [1, 2],
        [None, 1],
        [[x], (x,)],
        [[x], [x, x]],
        [{"a": x}, {"b": x}],
        [{"a": x}, OrderedDict(a=x)],
        [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
        ["a", "b"],
    ):
        merged = merge(outputs, [1.0, 1.0])
        assert type(merged) is list and same(merged, outputs)
    assert merge([None, None], [1.0, 1.0]) is None
    assert merge([Batch, Batch], [1.0, 1.0]) == [Batch, Batch]


def test_a_step_output_is_a_sequence_of_its_versions():
    x = rows()
    output = StepOutput([x[:3], x[3:]], [3.0, 2.0])

    assert len(output) == 2 and all(map(torch.equal, output, [x[:3], x[3:]]))
    assert output[1] is output.outputs[1] and output[-1] is output[1] and len(output[:1]) == 1
    assert repr(output) == f"StepOutput([{x[:3]!r}, {x[3:]!r}])"
    assert torch.equal(output.concat(), x)
    with pytest.raises(RuntimeError):
        output.stack()
    told = "'StepOutput' object has no attribute 'item': it holds a tensor for each microbatch"
    with pytest.raises(AttributeError, match=told):
        output.item()


def test_the_mean_of_versions_counts_samples():
    versions = [torch.tensor(6.0, requires_grad=True), torch.tensor(1.0)]
    for weights, mean in ((None, 3.5), ([2.0, 2.0], 3.5), ([3.0, 2.0], 4.0), ([1.0, 4.0], 2.0)):
        output = StepOutput(versions, weights)
        assert output.reduce_mean().item() == pytest.approx(mean)
        assert output.detach().reduce_mean().item() == pytest.approx(mean)
        assert output.reduce_sum().item() == 7.0
        assert output.reduce_sum().requires_grad and not output.detach()[0].requires_grad
        assert output.concat().tolist() == output.stack().tolist() == [6.0, 1.0]


def test_a_tensor_that_several_calls_have_is_mapped_once():
    x, y = rows(), rows()
    made: list[Tensor] = []

    def twin(tensor: Tensor) -> Tensor:
        made.append(tensor)
        return tensor.clone()

    calls = map_calls([((x, [x]), {"y": y}), ((x,), {})], twin)

    assert len(made) == 2
    (first, [inside]), named = calls[0]
    assert first is inside is calls[1][0][0] and named["y"] is not y
    assert torch.equal(first, x)
