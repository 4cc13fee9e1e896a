"""Spec: containers in context variables go with a call of another rank's module, and come back
with what was added; tensors that they held stay where they are.

Without ranks: what the callee does is done here to what would travel.
"""

import contextvars
import re
import warnings
from contextvars import ContextVar
from typing import Any

import pytest
import torch

from smp.pytorch import call_warnings, context_variables
from smp.pytorch.context_variables import Collected, Kept

noted: ContextVar = ContextVar("noted")


class Holder:
    """Has a variable as an attribute, as transformers' collector has."""

    def __init__(self) -> None:
        self.variable: ContextVar = ContextVar("held")


holder = Holder()


def travelling(container: Any) -> tuple[Collected, Any]:
    collected = Collected([(("a module", "a name"), container)])
    [(home, made)] = collected.values
    assert home == ("a module", "a name") and made is not container
    return collected, made


def test_tensors_stay_and_all_else_is_as_it_was():
    tensor, other = torch.ones(2), object()
    container = {"one": [tensor, 1, (tensor, "two")], "set": {3, "four"}, "other": other}
    _, made = travelling(container)

    kept = made["one"][0]
    assert type(kept) is Kept and made["one"] == [kept, 1, (kept, "two")]
    assert made["set"] == {3, "four"} and made["other"] is other
    assert container["one"][0] is tensor and list(container) == ["one", "set", "other"]
    told = "smp: shape of a tensor that was collected in a context variable before a module"
    with pytest.raises(AttributeError, match=told):
        kept.shape  # noqa: B018


def test_what_the_callee_adds_is_the_callers():
    """In the containers that the script holds, at any depth; tensors are its own again."""
    tensor, new = torch.ones(2), torch.zeros(2)
    inner: list = [tensor]
    members = {1, (tensor, 2)}
    container = {"inner": inner, "members": members}
    collected, made = travelling(container)

    made["inner"] += [new, [made["inner"][0]]]
    made["members"].add(3)
    made["more"] = {"first": made["inner"][0], "again": made["inner"]}
    made["set"] = {(made["inner"][0], 4)}
    collected.settle()

    assert container["inner"] is inner and container["members"] is members
    assert inner[0] is tensor and inner[1] is new and inner[2][0] is tensor
    assert members == {1, (tensor, 2), 3}
    assert container["more"]["first"] is tensor and container["more"]["again"] is inner
    [(back, four)] = container["set"]
    assert back is tensor and four == 4


@pytest.mark.parametrize(
    ("container", "change", "want"),
    [
        ([1, 2], lambda made: made.clear(), []),
        ([1, 2], lambda made: made.reverse(), [2, 1]),
        ([1, 2], lambda made: made.__setitem__(0, 3), [3, 2]),
        ({1: 2}, lambda made: made.pop(1), {}),
        ({1: 2}, lambda made: made.update({1: 3}), {1: 3}),
        ({1, 2}, lambda made: made.discard(1), {2}),
        ({1, 2}, lambda made: made.add(3), {1, 2, 3}),
    ],
)
def test_what_the_callee_takes_out_or_replaces_is_gone(container, change, want):
    collected, made = travelling(container)
    change(made)
    collected.settle()
    assert container == want


def test_a_container_that_the_callee_left_alone_is_not_written():
    """Another microbatch may have added to it meanwhile."""
    container, inner = [1], [2]
    container.append(inner)
    collected, made = travelling(container)
    inner.append("meanwhile")
    made.append(3)
    collected.settle()
    assert container == [1, inner, 3] and container[1] is inner and inner == [2, "meanwhile"]


def test_a_container_in_itself_comes_back_as_itself():
    container: list = [torch.ones(1)]
    container.append(container)
    collected, made = travelling(container)
    assert made[1] is made
    made.append(made)
    collected.settle()
    assert len(container) == 3 and container[1] is container[2] is container


def collected_in_a_step(variable: ContextVar, before: Any, now: Any) -> Collected | None:
    def run() -> Collected | None:
        if before is not None:
            variable.set(before)
        context_variables.begin_step()
        if now is not None:
            variable.set(now)
        return context_variables.collect("far")

    try:
        return contextvars.Context().run(run)
    finally:
        contextvars.Context().run(context_variables.begin_step)


@pytest.mark.parametrize(
    ("variable", "home"),
    [(noted, (__name__, "noted")), (holder.variable, (__name__, "holder", "variable"))],
)
def test_what_the_step_puts_there_travels_by_the_names_that_lead_to_it(variable, home):
    outside: list = []
    for value in ([], {}, set()):
        found = collected_in_a_step(variable, outside, value)
        assert found is not None and [name for name, _ in found.values] == [home]
    assert collected_in_a_step(variable, outside, None) is None
    assert collected_in_a_step(variable, None, None) is None
    assert collected_in_a_step(variable, outside, outside) is None


def test_the_other_rank_has_the_value_for_as_long_as_the_call_runs():
    before = noted.set("before")
    names = [(__name__, "noted"), (__name__, "holder", "variable"), (__name__, "noted")]
    tokens = context_variables.set_collected(zip(names, ([1], [2], [3]), strict=True), [])
    assert (noted.get(), holder.variable.get()) == ([3], [2])
    context_variables.reset(tokens)
    assert noted.get() == "before" and holder.variable.get(None) is None
    noted.reset(before)


def test_what_does_not_travel_is_a_warning_with_the_variables_name():
    nowhere: ContextVar = ContextVar("nowhere to be found")
    with pytest.warns(UserWarning, match="'nowhere to be found' is no global of a module"):
        assert collected_in_a_step(nowhere, None, []) is None
    call_warnings.forget()
    told = "the context variable 'noted' was set in the step, and module 'far', on another rank"
    with pytest.warns(UserWarning, match=re.escape(told)):
        assert collected_in_a_step(noted, None, 3) is None


def test_variables_of_torch_itself_are_not_spoken_of(monkeypatch):
    """By their name, or by the module that has them; what is nowhere may be a library's."""
    of_torch: ContextVar = ContextVar("number of threads")
    monkeypatch.setattr(torch.nn.functional, "threads", of_torch, raising=False)
    named: ContextVar = ContextVar("torch.mode")
    monkeypatch.setattr(holder, "named", named, raising=False)
    nowhere: ContextVar = ContextVar("nowhere either")
    call_warnings.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for variable in (of_torch, named, nowhere):
            assert collected_in_a_step(variable, None, 3) is None
